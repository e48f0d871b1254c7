"""The DRAM tier: extents of state in one arena, found by the hash chain of their tokens.

An extent is a run of positions as it was read from the device, at most eight blocks, so that
it goes back with one copy. Not thread-safe: the manager holds a lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcache.arena import Arena, Space
from kvcache.blockfile import Kind
from kvcache.keys import BlockHash, Namespace
from kvcache.policy import Facts, eviction_key

__all__ = ["Block", "DramTier", "Extent", "Kind"]


Tokens = npt.NDArray[np.int32]


@dataclass(eq=False, slots=True)
class Extent:
    """Positions [start, end) of one sequence, in one blob. Pinned ones stay."""

    namespace: Namespace
    start: int
    end: int
    space: Space
    blocks: list[Block] = field(default_factory=list)
    pins: int = 0
    uses: int = 0
    last_used_s: float = 0.0
    superseded: bool = False

    def facts(self, now_s: float) -> Facts:
        return Facts(self.superseded, self.uses, now_s - self.last_used_s, self.start)


@dataclass(eq=False, slots=True)
class Block:
    """A named piece of an extent: tokens from `start` on, behind `parent`. A snapshot is the
    state behind these tokens."""

    hash: BlockHash
    parent: BlockHash
    kind: Kind
    start: int
    tokens: Tokens
    extent: Extent

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class DramTier:
    """Args:
    n_bytes: size of the arena.
    """

    def __init__(self, n_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.arena = Arena(n_bytes)
        self.extents: set[Extent] = set()
        self.evicted = 0
        self.evicted_unread_bytes = 0
        self._clock = clock
        self._blocks: dict[BlockHash, Block] = {}
        self._children: dict[BlockHash, list[Block]] = {}

    def __repr__(self) -> str:
        return f"DramTier(extents={len(self.extents)}, {self.arena!r})"

    @property
    def used_bytes(self) -> int:
        return self.arena.n_bytes - self.arena.free_bytes

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, name: BlockHash) -> Block | None:
        return self._blocks.get(name)

    def children(self, parent: BlockHash) -> Sequence[Block]:
        return self._children.get(parent, ())

    def view(self, extent: Extent) -> npt.NDArray[np.uint8]:
        return self.arena.view(extent.space)

    def reserve(self, namespace: Namespace, start: int, end: int, n_bytes: int) -> Extent | None:
        """A pinned extent to be filled, after evicting what must go; None, and nothing evicted,
        when it cannot be had."""
        space = self.arena.allocate(n_bytes)
        if space is None:
            space = self._make_room(n_bytes)
        if space is None:
            return None
        return Extent(namespace, start, end, space, pins=1)

    def insert(self, extent: Extent, blocks: Iterable[Block]) -> None:
        """The extent is filled; blocks that are known already keep their older place."""
        extent.blocks = [block for block in blocks if block.hash not in self._blocks]
        for block in extent.blocks:
            self._blocks[block.hash] = block
            self._children.setdefault(block.parent, []).append(block)
        extent.last_used_s = self._clock()
        self.extents.add(extent)

    def abandon(self, extent: Extent) -> None:
        """A reserved extent that could not be filled."""
        self.arena.free(extent.space)

    def touch(self, extent: Extent) -> None:
        extent.uses += 1
        extent.last_used_s = self._clock()

    def drop(self, extent: Extent) -> None:
        assert extent.pins == 0
        self.extents.discard(extent)
        for block in extent.blocks:
            del self._blocks[block.hash]
            siblings = self._children[block.parent]
            siblings.remove(block)
            if not siblings:
                del self._children[block.parent]
        self.arena.free(extent.space)

    def clear(self, namespace: str = "") -> None:
        """Forget everything that is not pinned, or that of one namespace."""
        for extent in [e for e in self.extents if not e.pins]:
            if namespace in ("", extent.namespace):
                self.drop(extent)

    def check_integrity(self) -> None:
        self.arena.check_integrity()
        named = [block for extent in self.extents for block in extent.blocks]
        assert {b.hash for b in named} == set(self._blocks), "extents and names disagree"
        assert sum(map(len, self._children.values())) == len(named), "children disagree"
        assert all(b.extent.start <= b.start and b.end <= b.extent.end for b in named)

    def _make_room(self, n_bytes: int) -> Space | None:
        now_s = self._clock()
        loose = [extent for extent in self.extents if not extent.pins]
        if self.arena.free_bytes + sum(e.space.n_bytes for e in loose) < n_bytes:
            return None
        for extent in sorted(loose, key=lambda e: eviction_key(e.facts(now_s))):
            self.evicted += 1
            self.evicted_unread_bytes += 0 if extent.uses else extent.space.n_bytes
            self.drop(extent)
            if (space := self.arena.allocate(n_bytes)) is not None:
                return space
        return None
