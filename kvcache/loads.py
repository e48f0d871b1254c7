"""Brings state from the disk into DRAM for requests that wait."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvcache import codec
from kvcache.blockfile import Entry, Kind
from kvcache.disk import DiskTier
from kvcache.dram import Block, DramTier, Extent
from kvcache.iopool import IOPool
from kvcache.keys import BLOCK_TOKENS, Namespace
from kvcache.lookup import Lookup, pieces_on
from kvcache.policy import load_pays

__all__ = ["Loader", "Ticket"]

Tokens = npt.NDArray[np.int32]
Blob = npt.NDArray[np.uint8]

_FIRST_READ_BYTES_PER_S = 500e6  # until something has been read
_MOST_PATIENCE_S = 60.0  # where nothing is known of the speed of computing


@dataclass(eq=False, slots=True)
class Ticket:
    """What a waiting request has asked of the lower tiers."""

    pins: list[Extent] = field(default_factory=list)
    pending: int = 0
    ssd: list[tuple[int, int]] = field(default_factory=list)
    deadline_s: float = 0.0

    @property
    def ready(self) -> bool:
        return self.pending == 0 or time.monotonic() > self.deadline_s

    def ssd_tokens(self, start: int, end: int) -> int:
        """How many of the positions [start, end) came from the disk for this request."""
        return sum(max(0, min(b, end) - max(a, start)) for a, b in self.ssd)


class Loader:
    """Args:
    lock: guards `dram`, every ticket and all pins.
    run_blocks: most blocks of an extent.
    reasons, counters: of the manager.
    on_loaded: called on another thread when a ticket has become ready.
    """

    def __init__(
        self,
        lookup: Lookup,
        dram: DramTier,
        disk: DiskTier,
        io: IOPool,
        lock: threading.Lock,
        memory: codec.Memory,
        run_blocks: int,
        reasons: Counter[str],
        counters: Counter[str],
        on_loaded: Callable[[], None],
    ) -> None:
        self.read_bytes_per_s = _FIRST_READ_BYTES_PER_S
        self._lookup = lookup
        self._dram = dram
        self._disk = disk
        self._io = io
        self._lock = lock
        self._memory = memory
        self._run_blocks = run_blocks
        self._reasons = reasons
        self._counters = counters
        self._on_loaded = on_loaded

    def prefetch(
        self, namespace: Namespace, tokens: Tokens, n_resident: int, compute_token_s: float
    ) -> Ticket:
        """Begin to bring what is kept of a prompt into DRAM, as far as loading beats computing.

        Args:
            tokens: those that may come from the cache.
            n_resident: how many the device has.
            compute_token_s: what it costs to compute one token; 0 when not known.
        """
        ticket = Ticket()
        with self._lock:
            way = self._lookup.way(namespace, tokens, n_resident, also_disk=True)
            for piece in pieces_on(way):
                if isinstance(piece, Block):
                    self._pin(piece.extent, ticket)
        wanted = [p for p in pieces_on(way) if isinstance(p, Entry) and p.end > n_resident]
        if not wanted:
            return ticket
        load_s = sum(entry.size_bytes for entry in wanted) / self.read_bytes_per_s
        n_tokens = way.end - min(entry.start for entry in wanted)
        if not load_pays(n_tokens, load_s, compute_token_s):
            self._reasons["slower_than_computing"] += 1
            return ticket
        # Should the disk be slower than it was, what has not come by then is computed.
        compute_s = n_tokens * compute_token_s if compute_token_s else _MOST_PATIENCE_S
        ticket.deadline_s = time.monotonic() + min(compute_s, 1.2 * load_s + 0.05 * compute_s)
        for group in self._groups(wanted):
            ticket.pending += 1
            self._io.load(lambda group=group: self._load(namespace, group, ticket))  # type: ignore[misc]
        return ticket

    def _groups(self, wanted: Sequence[Entry]) -> Iterator[list[Entry]]:
        """Consecutive blocks that become one extent; a snapshot by itself."""
        blocks = [entry for entry in wanted if entry.kind != "snapshot"]
        for _, same in groupby(enumerate(blocks), lambda p: p[1].start // BLOCK_TOKENS - p[0]):
            run = [entry for _, entry in same]
            for i in range(0, len(run), self._run_blocks):
                yield run[i : i + self._run_blocks]
        yield from ([entry] for entry in wanted if entry.kind == "snapshot")

    def _load(self, namespace: Namespace, entries: list[Entry], ticket: Ticket) -> None:
        try:
            extent = self._read_extent(namespace, entries)
            if extent is not None:
                with self._lock:
                    ticket.pins.append(extent)
                    ticket.ssd.append(self._covers(entries[0].kind, extent))
        finally:
            with self._lock:
                ticket.pending -= 1
                done = ticket.pending == 0
                released = ticket.deadline_s < 0
            if released:
                self.release(ticket)
            elif done:
                self._on_loaded()

    def _covers(self, kind: Kind, extent: Extent) -> tuple[int, int]:
        """Positions that need not be computed thanks to it alone: without blocks a snapshot stands
        for all that came before."""
        if kind != "snapshot":
            return extent.start, extent.end
        return (0, 0) if codec.has_blocks(self._memory) else (0, extent.end)

    def _read_extent(self, namespace: Namespace, entries: list[Entry]) -> Extent | None:
        """Pinned; what follows a block that cannot be read is left out."""
        started = time.monotonic()
        payloads: list[Blob] = []
        for entry in entries:
            payload = self._disk.read(entry)
            if payload is None:
                self._reasons["ssd_bad_or_gone"] += 1
                break
            payloads.append(payload)
        if not payloads:
            return None
        good = entries[: len(payloads)]
        self._note_speed(sum(map(len, payloads)), time.monotonic() - started)
        start, end = good[0].start, good[-1].end
        whole = good[0].kind == "snapshot"
        n_bytes = len(payloads[0]) if whole else codec.joined_bytes(payloads, self._memory)
        with self._lock:
            extent = self._dram.reserve(namespace, start, end, n_bytes)
        if extent is None:
            self._reasons["dram_full"] += 1
            return None
        if whole:
            self._dram.view(extent)[:] = payloads[0]
        else:
            codec.join(payloads, self._memory, out=self._dram.view(extent))
        with self._lock:
            self._dram.insert(
                extent,
                [Block(e.hash, e.parent, e.kind, e.start, e.tokens, extent) for e in good],
            )
        self._counters["loaded_bytes"] += extent.space.n_bytes
        return extent

    def _note_speed(self, n_bytes: int, elapsed_s: float) -> None:
        if elapsed_s > 0:  # a disk that has become slow is believed sooner
            seen = n_bytes / elapsed_s
            weight = 0.7 if seen < self.read_bytes_per_s else 0.3
            self.read_bytes_per_s += weight * (seen - self.read_bytes_per_s)

    def release(self, ticket: Ticket) -> None:
        """The request has started, or has left; loads still under way release themselves."""
        with self._lock:
            ticket.deadline_s = -1.0
            pins, ticket.pins = ticket.pins, []
            for extent in pins:
                extent.pins -= 1

    def _pin(self, extent: Extent, ticket: Ticket) -> None:
        if extent not in ticket.pins:
            extent.pins += 1
            ticket.pins.append(extent)
