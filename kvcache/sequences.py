"""The sequences that live in the device pool: their tokens, their cells, and who may be evicted.

A live sequence belongs to a running request; an idle one is kept as prefix cache until its
sequence id or its cells are wanted. The ledger here and the `Device` change together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, NewType, Protocol

import numpy as np
import numpy.typing as npt

from kvcache.cells import CellPool, Cells
from kvcache.radix import RadixTree

__all__ = ["Device", "Opened", "SeqId", "Sequence", "SequencePool"]

SeqId = NewType("SeqId", int)
Tokens = npt.NDArray[np.int32]


class Device(Protocol):
    """The real KV cache behind the ledger."""

    def seq_cp(self, source: int, target: int, end: int) -> None:
        """Share the cells of positions [0, end) with another sequence."""
        ...

    def seq_rm(self, seq_id: int, start: int = 0) -> bool:
        """Forget the positions from `start` on; false where the model cannot cut there."""
        ...

    def can_resume(self, seq_id: int, position: int) -> bool:
        """Whether all that a token at `position` looks at is still there: cells that have left
        a sliding window are given to others."""
        ...


class Sequence:
    """Tokens whose KV is in the pool, in order. `live` ones are locked.

    The first `n_stored` are in a lower tier too, or were tried; without `keep` none will be.
    `idle_cost_s` is what its cells have cost the steps of others since it was used last.
    """

    def __init__(self, seq_id: SeqId, tenant: str, keep: bool) -> None:
        self.seq_id = seq_id
        self.tenant = tenant
        self.keep = keep
        self.n_stored = 0
        self.idle_cost_s = 0.0
        self.live = True
        self.last_used = 0
        self.n_tokens = 0
        self._tokens = np.empty(256, np.int32)
        self._cells = np.empty(256, np.int32)

    def __repr__(self) -> str:
        state = "live" if self.live else "idle"
        return f"Sequence(id={self.seq_id}, {state}, n_tokens={self.n_tokens})"

    @property
    def tokens(self) -> Tokens:
        return self._tokens[: self.n_tokens]

    @property
    def cells(self) -> Cells:
        return self._cells[: self.n_tokens]

    def _append(self, tokens: Tokens, cells: Cells) -> None:
        end = self.n_tokens + len(tokens)
        if end > len(self._tokens):
            room = max(end, 2 * len(self._tokens))
            self._tokens = np.resize(self._tokens, room)
            self._cells = np.resize(self._cells, room)
        self._tokens[self.n_tokens : end] = tokens
        self._cells[self.n_tokens : end] = cells
        self.n_tokens = end


class Opened(NamedTuple):
    """A live sequence whose first `n_cached` tokens are in the pool."""

    sequence: Sequence
    n_cached: int


class SequencePool:
    """All sequences of one context. Not thread-safe: the engine loop owns it.

    Args:
        n_cells: size of the device pool.
        n_sequences: sequence ids that exist.
        can_fork: whether a sequence may be shared up to any token (full attention).
        device: is told to share and forget as the ledger changes.
    """

    def __init__(self, n_cells: int, n_sequences: int, can_fork: bool, device: Device) -> None:
        self.cells = CellPool(n_cells)
        self.can_fork = can_fork
        self.on_drop: Callable[[Sequence], None] | None = None  # before a sequence goes
        self._device = device
        self._free_ids = [SeqId(i) for i in reversed(range(n_sequences))]
        self._sequences: dict[SeqId, Sequence] = {}
        self._trees: dict[str, RadixTree] = {}  # by tenant, of what may be found
        self._clock = 0

    def __repr__(self) -> str:
        live = sum(s.live for s in self)
        return f"SequencePool(live={live}, idle={self.n_idle}, {self.cells!r})"

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    @property
    def n_idle(self) -> int:
        return sum(not s.live for s in self)

    def has(self, sequence: Sequence) -> bool:
        return self._sequences.get(sequence.seq_id) is sequence

    @property
    def live_tokens(self) -> int:
        """Distinct tokens of running requests, as far as others may share them."""
        return sum(tree.locked_tokens for tree in self._trees.values())

    def match(self, tokens: Tokens, tenant: str = "") -> tuple[Sequence | None, int]:
        """The sequence that shares most tokens from the start, and how many; ties go to idle ones
        that are used up whole."""
        tree = self._trees.get(tenant)
        for n, keys in tree.match(tokens) if tree else ():
            near = [self._sequences[SeqId(key)] for key in keys]
            whole = [s for s in near if not s.live and s.n_tokens == n]
            for sequence in whole + near if self.can_fork else whole:
                if self._device.can_resume(sequence.seq_id, n):
                    return sequence, n
        return None, 0

    def open(
        self, tokens: Tokens, n_needed: int, use_cache: bool, tenant: str = ""
    ) -> Opened | None:
        """A live sequence for `tokens`, with as much of it in the pool as can be had.

        Three cases: an idle sequence that is a whole prefix is taken over; any other match is
        forked at the last shared token, or, when that does not fit, an idle one is cut there and
        taken over; without a match the sequence starts empty. The last token never comes from the
        cache: it must be evaluated for its logits.

        Args:
            n_needed: cells that must stay free beside those that `tokens` will take.

        Returns:
            None when cells or sequence ids do not suffice, even with all idle sequences evicted.
        """
        donor, n_cached = self.match(tokens[:-1], tenant) if use_cache else (None, 0)
        n_cells = len(tokens) - n_cached + n_needed
        if donor is None:
            if not self._make_room(n_cells, 1, keep=None):
                return None
            return Opened(self._new_sequence(tenant, use_cache), 0)
        if donor.live or n_cached < donor.n_tokens:
            if self._make_room(n_cells, 1, keep=donor):
                return self._fork(donor, n_cached)
            freed_by_cut = self.cells.exclusive(donor.cells[n_cached:])
            if donor.live or not self._within_reach(n_cells - freed_by_cut, donor):
                return None
            self.truncate(donor, n_cached)
        if self._make_room(n_cells, 0, keep=donor):
            donor.live = True
            self._trees[donor.tenant].lock(donor.seq_id)
            return Opened(donor, n_cached)
        return None

    def extend(self, sequence: Sequence, tokens: Tokens) -> bool:
        """Account for tokens about to be evaluated; evicts idle sequences for them.

        Returns:
            False when the cells cannot be had; then nothing was added.
        """
        if not self._make_room(len(tokens), 0, keep=sequence):
            return False
        self._append(sequence, tokens, self.cells.allocate(len(tokens)))
        return True

    def truncate(self, sequence: Sequence, n_tokens: int) -> None:
        """Forget everything after the first n tokens."""
        self._device.seq_rm(sequence.seq_id, n_tokens)
        self.cells.release(sequence.cells[n_tokens:])
        sequence.n_tokens = n_tokens
        sequence.n_stored = min(sequence.n_stored, n_tokens)
        if sequence.keep:
            self._trees[sequence.tenant].cut(sequence.seq_id, n_tokens)

    def retire(self, sequence: Sequence) -> None:
        """The request is done; its sequence stays as prefix cache."""
        sequence.live = False
        sequence.idle_cost_s = 0.0
        if sequence.keep:
            self._trees[sequence.tenant].unlock(sequence.seq_id)
        self._touch(sequence)

    def spoil(self, sequence: Sequence) -> None:
        """Nobody knows what its cells hold: out of the pool, and into no other tier."""
        sequence.keep = False
        self._forget(sequence)
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Take the sequence out of the pool at once."""
        if self.on_drop is not None:
            self.on_drop(sequence)
        self.cells.release(sequence.cells)
        del self._sequences[sequence.seq_id]
        self._forget(sequence)
        self._free_ids.append(sequence.seq_id)
        self._device.seq_rm(sequence.seq_id)

    def evict_idle(self, keep_cells: int = 0) -> None:
        """Drop the least recently used idle sequences until at most `keep_cells` are theirs."""
        idle = self._idle()
        total = sum(s.n_tokens for s in idle)
        for sequence in idle:
            if total <= keep_cells:
                return
            total -= sequence.n_tokens
            self.drop(sequence)

    def check_integrity(self) -> None:
        self.cells.check_integrity()
        used = [s.cells for s in self]
        unique = len(np.unique(np.concatenate(used))) if used else 0
        assert unique == self.cells.total - self.cells.free, "cells and sequences disagree"
        for tree in self._trees.values():
            tree.check_integrity()
        for s in self:
            assert s.keep == (s.seq_id in self._trees.get(s.tenant, ())), "the tree disagrees"

    def _fork(self, donor: Sequence, n_cached: int) -> Opened:
        sequence = self._new_sequence(donor.tenant, keep=True)
        sequence.n_stored = min(donor.n_stored, n_cached)
        self._device.seq_cp(donor.seq_id, sequence.seq_id, n_cached)
        self.cells.share(donor.cells[:n_cached])
        self._append(sequence, donor.tokens[:n_cached], donor.cells[:n_cached])
        self._touch(donor)
        return Opened(sequence, n_cached)

    def _new_sequence(self, tenant: str, keep: bool) -> Sequence:
        sequence = Sequence(self._free_ids.pop(), tenant, keep)
        self._sequences[sequence.seq_id] = sequence
        if keep:
            self._trees.setdefault(tenant, RadixTree()).add(sequence.seq_id, locked=True)
        return sequence

    def _append(self, sequence: Sequence, tokens: Tokens, cells: Cells) -> None:
        sequence._append(tokens, cells)
        if sequence.keep:
            self._trees[sequence.tenant].grow(sequence.seq_id, tokens)

    def _forget(self, sequence: Sequence) -> None:
        """No request finds it any more."""
        tree = self._trees.get(sequence.tenant)
        if tree is not None and sequence.seq_id in tree:
            tree.remove(sequence.seq_id)
            if not len(tree):
                del self._trees[sequence.tenant]

    def _touch(self, sequence: Sequence) -> None:
        self._clock += 1
        sequence.last_used = self._clock

    def _idle(self) -> list[Sequence]:
        return sorted((s for s in self if not s.live), key=lambda s: s.last_used)

    def _make_room(self, n_cells: int, n_ids: int, keep: Sequence | None) -> bool:
        """Evict idle sequences, oldest first, until so many cells and ids are free."""
        if self.cells.free >= n_cells and len(self._free_ids) >= n_ids:
            return True
        if not self._within_reach(n_cells, keep):
            return False
        for sequence in [s for s in self._idle() if s is not keep]:
            self.drop(sequence)
            if self.cells.free >= n_cells and len(self._free_ids) >= n_ids:
                return True
        return False

    def _within_reach(self, n_cells: int, keep: Sequence | None) -> bool:
        """Saves the cache from a hopeless request. Shared cells make this an upper bound."""
        evictable = sum(s.n_tokens for s in self if not s.live and s is not keep)
        return self.cells.free + evictable >= n_cells
