"""Reads llama.cpp's sequence state: cuts it into ranges of positions and joins ranges again.

The layout, little-endian (`llama_kv_cache::state_write` in llama.cpp's src/llama-kv-cache.cpp):

    magic u32, sequence id i32, then one section for each attention cache:
        n_stream u32 = 1, n_cells u32
        a cell: position i32, n_seq_id u32 = 1, sequence id i32
        v_trans u32 = 0, n_layer u32
        for K and then for V, a layer: type i32, row_bytes u64, n_cells rows

A sliding-window model has two such sections (all layers that see everything, then the others). A
hybrid one has one, and behind it its recurrent state, which cannot be cut. What is not exactly
like this is refused, never guessed at.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = [
    "CODEC_VERSION",
    "CodecError",
    "Memory",
    "attention_span",
    "cut",
    "has_blocks",
    "has_snapshots",
    "join",
    "joined_bytes",
    "recurrent_bytes",
    "recurrent_position",
    "with_recurrent",
]

CODEC_VERSION = 1

Memory = Literal["full", "window", "hybrid", "recurrent", "unknown"]
Blob = npt.NDArray[np.uint8]  # shape (n_bytes,)

_HEAD_BYTES = 8
_N_SECTIONS = {"full": 1, "window": 2, "hybrid": 1}
_CELL = np.dtype([("position", "<i4"), ("n_seq_id", "<u4"), ("seq_id", "<i4")])
_COUNTS = struct.Struct("<II")
_LAYER = struct.Struct("<iQ")
_RECURRENT_CELL = struct.Struct("<IiI")  # number of cells, position, number of sequence ids
_MAX_LAYERS = 4096


class CodecError(ValueError):
    """The bytes are not laid out as this module knows it."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """K or V of one layer; `rows` has shape (n_cells, row_bytes)."""

    type: int
    rows: Blob


@dataclass(frozen=True, slots=True)
class _Section:
    positions: npt.NDArray[np.int32]
    n_layer: int
    layers: list[_Layer]


def has_blocks(memory: Memory) -> bool:
    """Whether the state, or a part of it, can be cut into ranges of positions."""
    return memory in _N_SECTIONS


def has_snapshots(memory: Memory) -> bool:
    """Whether a part of the state, or all of it, can only be taken up where it was read."""
    return memory not in ("full", "window")


def attention_span(blob: Blob, memory: Memory) -> tuple[int, int]:
    """The positions [start, end) that a blob holds.

    Raises:
        CodecError: it has gaps, or its sections hold different positions.
    """
    sections, _ = _parse(blob, memory)
    spans = {_span(section.positions) for section in sections}
    if len(spans) != 1:
        raise CodecError("the sections hold different positions")
    return spans.pop()


def cut(blob: Blob, memory: Memory, start: int, end: int) -> Blob:
    """A blob with only the positions [start, end), in order, without recurrent state.

    Raises:
        CodecError: not all of them are there.
    """
    sections, _ = _parse(blob, memory)
    return _emit(blob[:_HEAD_BYTES], [[_only(section, start, end)] for section in sections])


def join(blobs: Sequence[Blob], memory: Memory, out: Blob | None = None) -> Blob:
    """One blob with the positions of all, which must follow one another; without recurrent state.

    Args:
        out: filled and returned instead of new memory; `joined_bytes` long.
    """
    parsed = [_parse(blob, memory)[0] for blob in blobs]
    per_cache = [list(parts) for parts in zip(*parsed, strict=True)]
    for parts in per_cache:
        _check_neighbours(parts)
    return _emit(blobs[0][:_HEAD_BYTES], per_cache, out)


def joined_bytes(blobs: Sequence[Blob], memory: Memory) -> int:
    """Size of what `join` makes of these."""
    parsed = [_parse(blob, memory)[0] for blob in blobs]
    return _size([list(parts) for parts in zip(*parsed, strict=True)])


def recurrent_position(blob: Blob, memory: Memory) -> int:
    """Position of the last token that the recurrent state behind the attention sections has seen.

    Args:
        blob: a whole state, or one that holds the recurrent part only (memory "recurrent").
    """
    tail = blob[_HEAD_BYTES:] if memory == "recurrent" else _parse(blob, memory)[1]
    if len(tail) < _RECURRENT_CELL.size:
        raise CodecError("there is no recurrent state")
    n_cells, position, n_seq_id = _RECURRENT_CELL.unpack_from(tail.data)
    if (n_cells, n_seq_id) != (1, 0):
        raise CodecError(f"recurrent state of {n_cells} cells, {n_seq_id} sequences")
    return int(position)


def recurrent_bytes(snapshot_bytes: int) -> int:
    """What a snapshot of so many bytes adds to attention state."""
    return snapshot_bytes - _HEAD_BYTES


def with_recurrent(blob: Blob, recurrent: Blob) -> Blob:
    """Attention state and the recurrent part to go with it, as one blob."""
    return np.concatenate([blob, recurrent[_HEAD_BYTES:]])


def _parse(blob: Blob, memory: Memory) -> tuple[list[_Section], Blob]:
    """The attention sections, and what follows them (only a hybrid's may be followed)."""
    if memory not in _N_SECTIONS:
        raise CodecError(f"state of {memory} memory cannot be cut")
    at = _HEAD_BYTES
    sections: list[_Section] = []
    for _ in range(_N_SECTIONS[memory]):
        section, at = _parse_section(blob, at)
        sections.append(section)
    if at != len(blob) and memory != "hybrid":
        raise CodecError(f"{len(blob) - at} bytes too many")
    return sections, blob[at:]


def _parse_section(blob: Blob, at: int) -> tuple[_Section, int]:
    n_stream, n_cells = _unpack(_COUNTS, blob, at)
    if n_stream != 1 or n_cells == 0:
        raise CodecError(f"{n_stream} streams, {n_cells} cells")
    at += _COUNTS.size
    cells = _take(blob, at, n_cells * _CELL.itemsize).view(_CELL)
    if (cells["n_seq_id"] != 1).any():
        raise CodecError("cells that belong to more than one sequence")
    at += cells.nbytes
    v_trans, n_layer = _unpack(_COUNTS, blob, at)
    if v_trans != 0 or not 0 < n_layer <= _MAX_LAYERS:
        raise CodecError(f"v_trans {v_trans}, {n_layer} layers")
    at += _COUNTS.size
    layers: list[_Layer] = []
    while len(layers) < 2 * n_layer:
        if len(layers) == n_layer and at == len(blob):
            break  # multi-head latent attention has no V of its own
        type_id, row_bytes = _unpack(_LAYER, blob, at)
        at += _LAYER.size
        rows = _take(blob, at, n_cells * row_bytes)
        layers.append(_Layer(type_id, rows.reshape(n_cells, row_bytes)))
        at += n_cells * row_bytes
    return _Section(cells["position"], n_layer, layers), at


def _unpack(layout: struct.Struct, blob: Blob, at: int) -> tuple[int, ...]:
    return layout.unpack(_take(blob, at, layout.size).tobytes())


def _take(blob: Blob, at: int, n_bytes: int) -> Blob:
    if n_bytes > len(blob) - at:
        raise CodecError(f"{n_bytes} bytes wanted at {at} of {len(blob)}")
    return blob[at : at + n_bytes]


def _span(positions: npt.NDArray[np.int32]) -> tuple[int, int]:
    ordered = np.sort(positions)
    if not (np.diff(ordered) == 1).all():
        raise CodecError("positions are missing or double")
    return int(ordered[0]), int(ordered[-1]) + 1


def _only(section: _Section, start: int, end: int) -> _Section:
    """Rows of the positions [start, end) in their order; a view where they are already."""
    order = np.argsort(section.positions, kind="stable")
    ordered = section.positions[order]
    first, last = np.searchsorted(ordered, (start, end))
    wanted = order[first:last]
    if not np.array_equal(ordered[first:last], np.arange(start, end)) or start == end:
        raise CodecError(f"positions {start} to {end} are not all there")
    rows: slice | npt.NDArray[np.int64] = wanted
    if (np.diff(wanted) == 1).all():
        rows = slice(int(wanted[0]), int(wanted[-1]) + 1)
    layers = [_Layer(layer.type, layer.rows[rows]) for layer in section.layers]
    return _Section(ordered[first:last], section.n_layer, layers)


def _check_neighbours(parts: Sequence[_Section]) -> None:
    shape = [(layer.type, layer.rows.shape[1]) for layer in parts[0].layers]
    for before, after in zip(parts, parts[1:], strict=False):
        if _span(before.positions)[1] != _span(after.positions)[0]:
            raise CodecError("the ranges do not follow one another")
        if shape != [(layer.type, layer.rows.shape[1]) for layer in after.layers]:
            raise CodecError("the ranges are of different models")


def _size(per_cache: Sequence[Sequence[_Section]]) -> int:
    total = _HEAD_BYTES
    for parts in per_cache:
        n_cells = sum(len(part.positions) for part in parts)
        row_bytes = sum(layer.rows.shape[1] for layer in parts[0].layers)
        total += 2 * _COUNTS.size + len(parts[0].layers) * _LAYER.size
        total += n_cells * (_CELL.itemsize + row_bytes)
    return total


def _emit(head: Blob, per_cache: Sequence[Sequence[_Section]], out: Blob | None = None) -> Blob:
    size = _size(per_cache)
    out = np.empty(size, np.uint8) if out is None else out
    if len(out) != size:
        raise CodecError(f"{size} bytes do not go into {len(out)}")
    out[:_HEAD_BYTES] = head
    at = _HEAD_BYTES
    for parts in per_cache:
        at = _emit_section(parts, out, at)
    return out


def _emit_section(parts: Sequence[_Section], out: Blob, at: int) -> int:
    n_cells = sum(len(part.positions) for part in parts)
    _COUNTS.pack_into(out.data, at, 1, n_cells)
    at += _COUNTS.size
    cells = out[at : at + n_cells * _CELL.itemsize].view(_CELL)
    cells["position"] = np.concatenate([part.positions for part in parts])
    cells["n_seq_id"], cells["seq_id"] = 1, 0
    at += cells.nbytes
    _COUNTS.pack_into(out.data, at, 0, parts[0].n_layer)
    at += _COUNTS.size
    for i, layer in enumerate(parts[0].layers):
        row_bytes = layer.rows.shape[1]
        _LAYER.pack_into(out.data, at, layer.type, row_bytes)
        at += _LAYER.size
        for part in parts:
            rows = part.layers[i].rows
            out[at : at + rows.size] = rows.reshape(-1)
            at += rows.size
    return at
