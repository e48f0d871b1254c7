"""Where computed state is kept below the device: the one class of this package that node uses.

The engine loop stores runs of positions as it computes them and takes them back; everything
that touches the disk happens on other threads. A fault of the cache costs time, never a request.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvcache import codec
from kvcache.blockfile import Entry
from kvcache.disk import DiskTier
from kvcache.dram import Block, DramTier, Extent
from kvcache.iopool import IOPool
from kvcache.keys import (
    BLOCK_TOKENS,
    BlockHash,
    ModelIdentity,
    Namespace,
    child_hash,
    snapshot_hash,
)
from kvcache.loads import Loader, Ticket
from kvcache.lookup import Lookup, Step, Way, parents_of, pieces_on

__all__ = ["KVCacheManager", "Piece", "StateSource"]

logger = logging.getLogger(__name__)

Tokens = npt.NDArray[np.int32]
Blob = npt.NDArray[np.uint8]

_EXTENT_BLOCKS = 8
_IO_THREADS = 2
_MAX_STORE_BYTES = 512 * 2**20
_PURGE_WAIT_S = 8.0
_MIN_MATCH_TOKENS = 8  # a chance agreement of a few tokens is not worth a copy


class StateSource(Protocol):
    """Reads computed state of one sequence out of the device."""

    def state_bytes(self, start: int, end: int) -> int: ...

    def read_state(self, start: int, end: int, out: Blob) -> bool:
        """The part that can be cut, of the positions [start, end); false when they are not all
        there any more."""
        ...

    def snapshot_bytes(self) -> int: ...

    def read_snapshot(self, out: Blob) -> bool:
        """The part that cannot be cut, as it is behind the last token."""
        ...


class Piece(NamedTuple):
    """Positions [start, end) as bytes to give to the device. Where the model needs a snapshot every
    piece holds that of the last one, so that all of them must be given."""

    start: int
    end: int
    blob: Blob


class KVCacheManager:
    """Args:
    identity: what the state depends on besides tokens.
    memory: kind of memory that the codec should expect; "unknown" is kept in whole snapshots.
    dram_bytes: size of the DRAM arena.
    disk: the SSD tier, shared with other processes; None to do without.
    on_loaded: called on another thread when a ticket has become ready.
    max_run_tokens: longest run of positions that can be read at once.
    model: name for people.
    """

    def __init__(
        self,
        identity: ModelIdentity,
        memory: codec.Memory,
        dram_bytes: int,
        disk: DiskTier | None,
        on_loaded: Callable[[], None],
        max_run_tokens: int = _EXTENT_BLOCKS * BLOCK_TOKENS,
        model: str = "",
    ) -> None:
        self.dram = DramTier(dram_bytes)
        self.disk = disk
        self.reasons: Counter[str] = Counter()
        self.counters: Counter[str] = Counter()
        self._identity = identity
        self._model = model
        self._memory = memory
        self.has_snapshots = codec.has_snapshots(memory)
        self._has_blocks = codec.has_blocks(memory)
        self._lookup = Lookup(self.dram, disk, memory)
        self._run_blocks = max(1, min(_EXTENT_BLOCKS, max_run_tokens // BLOCK_TOKENS))
        self._namespaces: dict[str, Namespace] = {}
        self._lock = threading.Lock()
        self._io = IOPool(_IO_THREADS, _MAX_STORE_BYTES)
        self._loader: Loader | None = None
        if disk is not None:
            self._loader = Loader(
                self._lookup,
                self.dram,
                disk,
                self._io,
                self._lock,
                memory,
                self._run_blocks,
                self.reasons,
                self.counters,
                on_loaded,
            )

    def namespace(self, tenant: str) -> Namespace:
        known = self._namespaces.get(tenant)
        if known is None:
            known = self._namespaces[tenant] = self._identity.namespace(tenant)
            if self.disk is not None:
                self.disk.describe(known, {"model": self._model, **self._identity.describe()})
        return known

    # Down: from the device

    def store(
        self, namespace: Namespace, tokens: Tokens, start: int, end: int, source: StateSource
    ) -> int:
        """Keep the positions [start, end) of a sequence; what is kept already is not read again.

        Args:
            start: a multiple of the block size.

        Returns:
            The number of bytes read from the device.
        """
        if not self._has_blocks:
            return 0
        n_read = 0
        parents = parents_of(namespace, tokens[:end])
        for run in self._unknown_runs(namespace, tokens, start, end, parents):
            n_read += self._store_run(namespace, run, source)
        return n_read

    def store_snapshot(self, namespace: Namespace, tokens: Tokens, source: StateSource) -> None:
        """Keep the part of the state behind `tokens` that cannot be cut, unless it is kept."""
        if not self.has_snapshots or not len(tokens):
            return
        at = (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        parent, part = parents_of(namespace, tokens)[at // BLOCK_TOKENS], tokens[at:].copy()
        name = snapshot_hash(namespace, parent, part)
        if self._is_kept(namespace, name):
            return
        with self._lock:
            extent = self.dram.reserve(namespace, at, len(tokens), source.snapshot_bytes())
        if extent is None:
            self.reasons["dram_full"] += 1
            return
        if not source.read_snapshot(self.dram.view(extent)):
            with self._lock:
                self.dram.abandon(extent)
            self.reasons["device_refused"] += 1
            return
        with self._lock:
            self.dram.insert(extent, [Block(name, parent, "snapshot", at, part, extent)])
        self.counters["stored_bytes"] += extent.space.n_bytes
        self._queue_write(extent)

    def _unknown_runs(
        self,
        namespace: Namespace,
        tokens: Tokens,
        start: int,
        end: int,
        parents: Sequence[BlockHash],
    ) -> Iterator[list[tuple[BlockHash, BlockHash, int, Tokens]]]:
        """Runs of (hash, parent, start, tokens) that no tier has, as long as one extent at most."""
        run: list[tuple[BlockHash, BlockHash, int, Tokens]] = []
        for at in range(start, end, BLOCK_TOKENS):
            parent = parents[at // BLOCK_TOKENS]
            part = tokens[at : min(at + BLOCK_TOKENS, end)]
            name = child_hash(namespace, parent, part)
            if self._is_kept(namespace, name):
                if run:
                    yield run
                run = []
                continue
            run.append((name, parent, at, part.copy()))
            if len(run) == self._run_blocks:
                yield run
                run = []
        if run:
            yield run

    def _is_kept(self, namespace: Namespace, name: BlockHash) -> bool:
        with self._lock:
            if self.dram.find(name) is not None:
                return True
        return self.disk is not None and self.disk.find(namespace, name) is not None

    def _store_run(
        self,
        namespace: Namespace,
        run: list[tuple[BlockHash, BlockHash, int, Tokens]],
        source: StateSource,
    ) -> int:
        start, end = run[0][2], run[-1][2] + len(run[-1][3])
        n_bytes = source.state_bytes(start, end)
        with self._lock:
            extent = self.dram.reserve(namespace, start, end, n_bytes)
        if extent is None:
            self.reasons["dram_full"] += 1
            return 0
        if not source.read_state(start, end, self.dram.view(extent)):
            with self._lock:
                self.dram.abandon(extent)
            self.reasons["window_gone"] += 1
            return 0
        blocks = [
            Block(name, parent, "block" if len(part) == BLOCK_TOKENS else "tail", at, part, extent)
            for name, parent, at, part in run
        ]
        with self._lock:
            self.dram.insert(extent, blocks)
            for block in blocks:
                self._supersede(block)
        self.counters["stored_bytes"] += n_bytes
        self._queue_write(extent)
        return n_bytes

    def _supersede(self, block: Block) -> None:
        for other in self.dram.children(block.parent):
            if _extends(block.tokens, other) and len(other.extent.blocks) == 1:
                other.extent.superseded = True

    def _queue_write(self, extent: Extent) -> None:
        """The extent stays pinned until it is on the disk."""
        if self.disk is None or not self._io.store(
            lambda: self._write(extent), extent.space.n_bytes
        ):
            self.reasons["store_dropped"] += self.disk is not None
            self._unpin([extent])

    def _write(self, extent: Extent) -> None:
        assert self.disk is not None
        try:
            blob = self.dram.view(extent)
            for block in extent.blocks:
                payload = (
                    blob
                    if (block.start, block.end) == (extent.start, extent.end)
                    else codec.cut(blob, self._memory, block.start, block.end)
                )
                self._write_block(block, payload)
        finally:
            self._unpin([extent])

    def _write_block(self, block: Block, payload: Blob) -> None:
        assert self.disk is not None
        namespace = block.extent.namespace
        entry = Entry(
            namespace=namespace,
            hash=block.hash,
            parent=block.parent,
            kind=block.kind,
            start=block.start,
            tokens=block.tokens,
            size_bytes=len(payload),
        )
        older = [
            other.hash
            for other in self.disk.children(namespace, block.parent)
            if _extends(block.tokens, other)
        ]
        outcome = self.disk.write(
            entry,
            payload,
            supersedes=older[0] if older else None,
            priority=float(block.extent.uses > 0),
        )
        if outcome not in ("stored", "present"):
            self.reasons[f"ssd_{outcome}"] += 1

    # Up: to the device

    def prefetch(
        self, namespace: Namespace, tokens: Tokens, n_resident: int, compute_token_s: float
    ) -> Ticket | None:
        """See `Loader.prefetch`; None when there is nothing to wait for."""
        if self._loader is None:
            return None
        return self._loader.prefetch(namespace, tokens, n_resident, compute_token_s)

    def release(self, ticket: Ticket) -> None:
        if self._loader is not None:
            self._loader.release(ticket)

    @contextmanager
    def taken(
        self, namespace: Namespace, tokens: Tokens, n_resident: int
    ) -> Iterator[Sequence[Piece]]:
        """What DRAM has of the positions behind the first `n_resident`, in order, without gaps.

        The blobs are good inside the context.
        """
        with self._lock:
            way = self._lookup.way(namespace, tokens, n_resident, also_disk=False)
            if way.end - n_resident < _MIN_MATCH_TOKENS:
                way = Way([], None, 0)
            extents = list(dict.fromkeys(p.extent for p in pieces_on(way) if isinstance(p, Block)))
            for extent in extents:
                extent.pins += 1
                self.dram.touch(extent)
        try:
            yield list(self._pieces_of(way, n_resident))
        finally:
            self._unpin(extents)

    def _pieces_of(self, way: Way, n_resident: int) -> Iterator[Piece]:
        snapshot = way.snapshot
        last = self.dram.view(snapshot.extent) if isinstance(snapshot, Block) else None
        if last is not None and not self._has_blocks:
            yield Piece(n_resident, way.end, last)
            return
        for extent, start, end in _runs(way.steps, n_resident):
            blob = self.dram.view(extent)
            if (start, end) != (extent.start, extent.end):
                blob = codec.cut(blob, self._memory, start, end)
            yield Piece(start, end, blob if last is None else codec.with_recurrent(blob, last))

    def _unpin(self, extents: Sequence[Extent]) -> None:
        with self._lock:
            for extent in extents:
                extent.pins -= 1

    # Care

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that is stored is on the disk."""
        return self._io.drain(timeout_s)

    def purge(self, namespace: str = "") -> bool:
        """Forget what DRAM holds, or that of one namespace, once what waited for the disk is there;
        false when that took too long. Files stay."""
        done = self._io.drain(_PURGE_WAIT_S)
        with self._lock:
            self.dram.clear(namespace)
        return done

    def stats(self) -> dict[str, Any]:
        """Bytes, entries and counters of both tiers, and why things were not kept or found."""
        with self._lock:
            dram = {
                "bytes": self.dram.used_bytes,
                "capacity_bytes": self.dram.arena.n_bytes,
                "blocks": len(self.dram),
                "evicted": self.dram.evicted,
                "evicted_unread_bytes": self.dram.evicted_unread_bytes,
            }
        return {
            "dram": dram,
            "ssd": None if self.disk is None else self.disk.stats(),
            "ssd_read_bytes_per_s": self._loader.read_bytes_per_s if self._loader else None,
            "waiting_store_bytes": self._io.waiting_store_bytes,
            "reasons": dict(self.reasons),
            **self.counters,
        }

    def close(self) -> None:
        self._io.close()
        if self.disk is not None:
            self.disk.close()


def _runs(steps: Sequence[Step], n_resident: int) -> list[tuple[Extent, int, int]]:
    """Positions [start, end) wanted of every extent, in order."""
    runs: list[tuple[Extent, int, int]] = []
    for block, n_tokens in steps:
        start, end = max(block.start, n_resident), block.start + n_tokens
        if not isinstance(block, Block) or end <= n_resident:
            continue
        if runs and runs[-1][0] is block.extent:
            runs[-1] = (block.extent, runs[-1][1], end)
        else:
            runs.append((block.extent, start, end))
    return runs


def _extends(tokens: Tokens, older: Block | Entry) -> bool:
    n = len(older.tokens)
    return (
        older.kind == "tail" and n < len(tokens) and bool(np.array_equal(older.tokens, tokens[:n]))
    )
