"""Who goes first when a tier is full, and what is worth moving: pure functions of facts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Admission", "Facts", "Piece", "eviction_key", "eviction_order", "load_pays"]

_MOST_USES = 8
_THRASHING, _CALM = 0.9, 0.6  # share of evicted bytes that nobody had read
_MOST_SEEN = 20_000


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of one piece of state. `start` is its first position."""

    superseded: bool
    uses: int
    idle_s: float
    start: int


class Piece(NamedTuple):
    """A file of the SSD tier, as far as eviction looks at it."""

    namespace: str
    hash: bytes
    parent: bytes
    kind: str
    start: int
    file_bytes: int
    uses: int
    last_used_s: float


def eviction_key(facts: Facts) -> tuple[bool, float, int]:
    """The smallest goes first: superseded state, then by idle time over reuse, and of pieces that
    were used together the later one, as it is worth nothing without the earlier."""
    idle_s = max(0.0, facts.idle_s)
    return (not facts.superseded, -idle_s / (1 + min(facts.uses, _MOST_USES)), -facts.start)


def eviction_order(pieces: Iterable[Piece], now_s: float) -> list[Piece]:
    """First the one to go first. A piece is as recent and as used as what follows it in the chain,
    so that a prefix never goes before what hangs on it."""
    uses: dict[bytes, int] = {}
    last_used_s: dict[bytes, float] = {}
    keyed: list[tuple[tuple[bool, float, int], Piece]] = []
    for piece in sorted(pieces, key=lambda p: -p.start):
        n = max(piece.uses, uses.get(piece.hash, 0))
        at_s = max(piece.last_used_s, last_used_s.get(piece.hash, 0.0))
        uses[piece.parent] = max(n, uses.get(piece.parent, 0))
        last_used_s[piece.parent] = max(at_s, last_used_s.get(piece.parent, 0.0))
        keyed.append((eviction_key(Facts(False, n, now_s - at_s, piece.start)), piece))
    return [piece for _, piece in sorted(keyed, key=lambda pair: pair[0])]


def load_pays(n_tokens: int, load_s: float, compute_token_s: float) -> bool:
    """Whether loading so many tokens beats computing them. Unknown speeds (0) speak for loading."""
    return compute_token_s == 0 or load_s < n_tokens * compute_token_s


class Admission:
    """Notices when a tier is too small for what goes through it: then most of what it evicts was
    never read, and only what is offered a second time is let in. Not thread-safe.

    Args:
        window_bytes: evictions looked at together.
    """

    def __init__(self, window_bytes: int) -> None:
        self.narrow = False
        self._window_bytes = max(1, window_bytes)
        self._evicted_bytes = 0
        self._unread_bytes = 0
        self._seen: dict[bytes, None] = {}

    def allows(self, name: bytes) -> bool:
        if not self.narrow or name in self._seen:
            return True
        self._seen[name] = None
        if len(self._seen) > _MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        return False

    def note_evicted(self, n_bytes: int, *, unread: bool) -> None:
        self._evicted_bytes += n_bytes
        self._unread_bytes += n_bytes if unread else 0
        if self._evicted_bytes < self._window_bytes:
            return
        share = self._unread_bytes / self._evicted_bytes
        self.narrow = share > (_CALM if self.narrow else _THRASHING)
        self._evicted_bytes = self._unread_bytes = 0
