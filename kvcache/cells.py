"""Accounts for the cells of the device KV pool: who uses how many, and what is shared.

llama.cpp places the cells; this ledger mirrors it with numbers of its own, so that admission can
count unique cells and nobody has to ask the engine. It owns no memory of the cache.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["CellPool", "Cells"]

Cells = npt.NDArray[np.int32]


class CellPool:
    """A fixed number of cells with reference counts. Not thread-safe: the engine loop owns it."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._references = np.zeros(total, np.int32)
        # A stack of free cells: _stack[:free] are free.
        self._stack: Cells = np.arange(total - 1, -1, -1, dtype=np.int32)
        self.free = total

    def __repr__(self) -> str:
        return f"CellPool(total={self.total}, free={self.free})"

    def allocate(self, n: int) -> Cells:
        """Take n free cells, each with one reference. The caller checks `free` first."""
        assert 0 <= n <= self.free, f"asked for {n} cells, {self.free} are free"
        cells = self._stack[self.free - n : self.free].copy()
        self.free -= n
        self._references[cells] = 1
        return cells

    def share(self, cells: Cells) -> None:
        """Add a reference to cells in use. A sequence holds a cell at most once."""
        self._references[cells] += 1

    def release(self, cells: Cells) -> int:
        """Drop one reference of each cell; returns how many became free."""
        self._references[cells] -= 1
        freed = cells[self._references[cells] == 0]
        self._stack[self.free : self.free + len(freed)] = freed
        self.free += len(freed)
        return len(freed)

    def exclusive(self, cells: Cells) -> int:
        """How many of these cells `release` would free."""
        return int(np.count_nonzero(self._references[cells] == 1))

    def check_integrity(self) -> None:
        free = self._stack[: self.free]
        assert len(np.unique(free)) == self.free, "a cell is free twice"
        assert np.all(self._references[free] == 0), "a free cell has references"
        assert np.count_nonzero(self._references) == self.total - self.free, "a cell is lost"
        assert np.all(self._references >= 0), "a cell was released too often"
