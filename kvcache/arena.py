"""One preallocated piece of memory from which the DRAM tier takes contiguous spaces."""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Arena", "Space"]

_ALIGNMENT_BYTES = 64


class Space(NamedTuple):
    """Bytes [offset, offset + n_bytes) of an arena."""

    offset: int
    n_bytes: int


class Arena:
    """First fit with coalescing. The system gives pages as they are first touched. Not
    thread-safe."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes - n_bytes % _ALIGNMENT_BYTES
        self.memory: npt.NDArray[np.uint8] = np.empty(self.n_bytes, np.uint8)
        self.free_bytes = self.n_bytes
        # Holes in order of offset; two holes never touch.
        self._holes: list[tuple[int, int]] = [(0, self.n_bytes)] if self.n_bytes else []
        self._taken: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"Arena(n_bytes={self.n_bytes}, free_bytes={self.free_bytes})"

    def allocate(self, n_bytes: int) -> Space | None:
        """None when no hole is large enough."""
        size = max(1, -(-n_bytes // _ALIGNMENT_BYTES)) * _ALIGNMENT_BYTES
        for i, (offset, hole) in enumerate(self._holes):
            if hole < size:
                continue
            if hole == size:
                del self._holes[i]
            else:
                self._holes[i] = (offset + size, hole - size)
            self._taken[offset] = size
            self.free_bytes -= size
            return Space(offset, n_bytes)
        return None

    def free(self, space: Space) -> None:
        start, size = space.offset, self._taken.pop(space.offset)
        self.free_bytes += size
        i = bisect.bisect(self._holes, (start, 0))
        if i < len(self._holes) and self._holes[i][0] == start + size:
            size += self._holes.pop(i)[1]
        if i and sum(self._holes[i - 1]) == start:
            start, before = self._holes[i - 1]
            self._holes[i - 1] = (start, before + size)
        else:
            self._holes.insert(i, (start, size))

    def view(self, space: Space) -> npt.NDArray[np.uint8]:
        return self.memory[space.offset : space.offset + space.n_bytes]

    def check_integrity(self) -> None:
        pieces = sorted([*self._holes, *self._taken.items()])
        at = 0
        for offset, size in pieces:
            assert offset == at, "a gap or an overlap"
            at += size
        assert at == self.n_bytes, "bytes are lost"
        assert self.free_bytes == sum(size for _, size in self._holes), "free bytes miscounted"
        ends = {offset + size for offset, size in self._holes}
        assert not ends & {offset for offset, _ in self._holes}, "two holes touch"
