"""Sequence states in llama.cpp's layout, with rows that follow from position and token."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcache.codec import CodecError, attention_span, cut

__all__ = ["FakeSource", "holds", "make_blob"]

Blob = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.int32]

ROW_BYTES = 24
N_LAYER = 3


def make_blob(
    positions: Sequence[int],
    tokens: Sequence[int] | None = None,
    n_sections: int = 1,
    tail: bytes = b"",
) -> Blob:
    """Cells in the order of `positions`; `tokens[i]` belongs to `positions[i]`."""
    tokens = positions if tokens is None else tokens
    out = struct.pack("<Ii", 0xABCD, 7)
    for section in range(n_sections):
        out += struct.pack("<II", 1, len(positions))
        for position in positions:
            out += struct.pack("<iIi", position, 1, 7)
        out += struct.pack("<II", 0, N_LAYER)
        for layer in range(2 * N_LAYER):
            out += struct.pack("<iQ", 1, ROW_BYTES)
            for position, token in zip(positions, tokens, strict=True):
                row = struct.pack("<iiii", position, token, layer, section)
                out += row.ljust(ROW_BYTES, b"\0")
    return np.frombuffer(out + tail, np.uint8).copy()


class FakeSource:
    """A device that holds one sequence."""

    def __init__(self, tokens: Tokens, n_sections: int = 1) -> None:
        self._tokens = tokens
        self._n_sections = n_sections
        self.reads = 0
        self.oldest = 0

    def state_bytes(self, start: int, end: int) -> int:
        return len(self._blob(start, end))

    def read_state(self, start: int, end: int, out: Blob) -> bool:
        self.reads += 1
        if start < self.oldest:
            return False
        out[:] = self._blob(start, end)
        return True

    def _blob(self, start: int, end: int) -> Blob:
        return make_blob(range(start, end), self._tokens[start:end].tolist(), self._n_sections)


def holds(blob: Blob, start: int, tokens: Tokens) -> bool:
    """Whether a blob is what the device computed for these tokens."""
    try:
        if attention_span(blob, "full") != (start, start + len(tokens)):
            return False
    except CodecError:
        return False
    want = make_blob(range(start, start + len(tokens)), tokens.tolist())
    return np.array_equal(cut(want, "full", start, start + len(tokens)), blob) or np.array_equal(
        want, blob
    )
