"""Reads the header of a GGUF file that may be hostile, and nothing but the header.

Every count and size is checked in Python's unbounded integers against the bytes that are really
there before anything is allocated or skipped. The limits are at most those of llama.cpp, which
sees the file only after this. Weights and long arrays (vocabularies) are never kept.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from node.errors import BadModelFile
from node.models.header import ArrayInfo, GGUFHeader, MetaValue, TensorInfo, brief

__all__ = ["read_header", "split_paths"]

_MAX_HEADER_BYTES = 256 * 2**20
_MAX_KEPT_BYTES = 16 * 2**20
_MAX_KEYS = 65_536
_MAX_TENSORS = 65_536
_MAX_KEY_BYTES = 65_535
_MAX_NAME_BYTES = 63
_MAX_STRING_BYTES = 4 * 2**20
_MAX_ITEM_BYTES = 65_536
_MAX_KEPT_ITEMS = 1024
_MAX_PARTS = 1000
_INT64_MAX = 2**63 - 1

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)

# Value types of GGUF metadata: struct code for the fixed-size ones.
_STRING, _ARRAY, _BOOL = 8, 9, 7
_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_TYPE_NAMES = {
    0: "u8", 1: "i8", 2: "u16", 3: "i16", 4: "u32", 5: "i32", 6: "f32", 7: "bool", 8: "string",
    10: "u64", 11: "i64", 12: "f64",
}  # fmt: skip

# ggml type: name, elements of a block, bytes of a block. Removed types are left out.
_TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2),
    26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip


def read_header(path: Path) -> GGUFHeader:
    """Parse and check a file and, when it is split, all its parts.

    Raises:
        BadModelFile: with the first thing that is wrong.
    """
    first = _read_file(path)
    files: tuple[Path, ...] = (path,)
    parts: tuple[GGUFHeader, ...] = (first,)
    count = _split_number(first, "split.count", default=1)
    if count > 1:
        files = split_paths(path, count)
        parts = (first, *(_read_file(p) for p in files[1:]))
        _check_parts(parts, count)
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise BadModelFile("two parts of the split GGUF hold a tensor of the same name")
    header = GGUFHeader(
        first.version,
        first.metadata,
        tensors,
        tuple(str(p) for p in files),
        sum(part.size_bytes for part in parts),
    )
    _check_properties(header)
    return header


def split_paths(path: Path, count: int | None = None) -> tuple[Path, ...]:
    """All parts of a split GGUF from the path of its first; the path alone if it is not split.

    Raises:
        BadModelFile: not the first part, or the name does not go with `count`.
    """
    match = _PART.search(path.name)
    if match is None:
        if count is not None:
            raise BadModelFile(f"a part of a split GGUF must be named …-00001-of-{count:05}.gguf")
        return (path,)
    number, of = int(match[1]), int(match[2])
    if number != 1:
        raise BadModelFile(f"this is part {number} of {of}: name the first part, …-00001-of-…")
    if not 1 <= of <= _MAX_PARTS or count not in (None, of):
        raise BadModelFile(f"the name says {of} parts, the file {count}")
    stem, suffix = path.name[: match.start()], path.name[-5:]
    return tuple(path.with_name(f"{stem}-{i:05}-of-{of:05}{suffix}") for i in range(1, of + 1))


def _read_file(path: Path) -> GGUFHeader:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise BadModelFile(f"{size} bytes are too few for a GGUF")
            with mmap.mmap(
                file.fileno(), min(size, _MAX_HEADER_BYTES), access=mmap.ACCESS_READ
            ) as m:
                return _Parser(m, size, path).parse()
    except (OSError, ValueError) as error:
        raise BadModelFile(f"the file cannot be read: {_reason(error)}") from error


class _Parser:
    """A cursor over the mapped start of one file."""

    def __init__(self, data: mmap.mmap, file_bytes: int, path: Path) -> None:
        self._data = data
        self._end = len(data)
        self._file_bytes = file_bytes
        self._path = path
        self._at = 0
        self._kept = 0

    def parse(self) -> GGUFHeader:
        if self._take(4) != b"GGUF":
            raise BadModelFile("this is not a GGUF file")
        version = self._number("I")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            hint = "a big-endian file" if swapped in (1, 2, 3) else f"GGUF version {version}"
            raise BadModelFile(f"{hint} is not supported; versions 2 and 3 are")
        n_tensors, n_keys = self._number("Q"), self._number("Q")
        # The smallest key is 13 bytes (empty name, one-byte value), the smallest tensor 33.
        self._check_count("keys", n_keys, 13, _MAX_KEYS)
        metadata = dict(self._keys(n_keys))
        self._check_count("tensors", n_tensors, 33, _MAX_TENSORS)
        tensors = tuple(self._tensor() for _ in range(n_tensors))
        self._check_tensors(tensors, metadata)
        return GGUFHeader(version, metadata, tensors, (str(self._path),), self._file_bytes)

    def _keys(self, count: int) -> Iterator[tuple[str, MetaValue]]:
        seen = set()
        for _ in range(count):
            key = self._string(_MAX_KEY_BYTES, "key")
            if not key or not key.isprintable() or key in seen:
                raise BadModelFile(f"metadata key {brief(key)} is empty, unprintable or repeated")
            seen.add(key)
            yield key, self._value(key)

    def _value(self, key: str) -> MetaValue:
        kind = self._number("I")
        if kind == _ARRAY:
            return self._array(key)
        if kind == _STRING:
            return self._string(_MAX_STRING_BYTES, key)
        if kind not in _FIXED:
            raise BadModelFile(f"metadata {brief(key)} has unknown type {kind}")
        (value,) = struct.unpack(f"<{_FIXED[kind]}", self._take(struct.calcsize(_FIXED[kind])))
        if kind != _BOOL:
            return value  # type: ignore[no-any-return]
        if value > 1:
            raise BadModelFile(f"metadata {brief(key)} is a truth value of {value}")
        return bool(value)

    def _array(self, key: str) -> MetaValue:
        kind, count = self._number("I"), self._number("Q")
        if kind not in _TYPE_NAMES:  # arrays of arrays among them: llama.cpp refuses them too
            raise BadModelFile(f"metadata {brief(key)} is an array of unknown type {kind}")
        width = 8 if kind == _STRING else struct.calcsize(_FIXED[kind])
        self._check_count(f"items of {brief(key)}", count, width, self._end)
        if count <= _MAX_KEPT_ITEMS and not key.startswith("tokenizer."):
            self._keep(8 * count)
            if kind == _STRING:
                return [self._string(_MAX_ITEM_BYTES, key) for _ in range(count)]
            values = struct.unpack(f"<{count}{_FIXED[kind]}", self._take(width * count))
            return [bool(v) for v in values] if kind == _BOOL else list(values)
        if kind == _STRING:
            self._skip_strings(key, count)
        else:
            self._take_at(width * count)
        return ArrayInfo(_TYPE_NAMES[kind], count)

    def _skip_strings(self, key: str, count: int) -> None:
        # A vocabulary has some 10^5 of these: local names, no slices.
        data, at, end, unpack = self._data, self._at, self._end, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > end:
                raise BadModelFile(f"the header ends inside {brief(key)}")
            (length,) = unpack(data, at)
            at += 8 + length
            if length > _MAX_ITEM_BYTES or at > end:
                raise BadModelFile(f"a string of {length} bytes in {brief(key)} is too long")
        self._at = at

    def _tensor(self) -> TensorInfo:
        name = self._string(_MAX_NAME_BYTES, "tensor name")
        n_dims = self._number("I")
        if not 1 <= n_dims <= 4:
            raise BadModelFile(f"tensor {brief(name)} has {n_dims} dimensions")
        shape = tuple(self._number("Q") for _ in range(n_dims))
        kind, offset = self._number("I"), self._number("Q")
        if kind not in _TENSOR_TYPES:
            raise BadModelFile(f"tensor {brief(name)} has unknown type {kind}")
        type_name, block, block_bytes = _TENSOR_TYPES[kind]
        elements = 1
        for extent in shape:
            elements *= extent
        if not 0 < elements <= _INT64_MAX or shape[0] % block:
            raise BadModelFile(f"tensor {brief(name)} of type {type_name} has shape {shape}")
        return TensorInfo(name, shape, type_name, offset, elements // block * block_bytes)

    def _check_tensors(
        self, tensors: tuple[TensorInfo, ...], metadata: dict[str, MetaValue]
    ) -> None:
        alignment = metadata.get("general.alignment", 32)
        if isinstance(alignment, bool) or not isinstance(alignment, int):
            raise BadModelFile("general.alignment is not a number")
        if not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise BadModelFile(f"general.alignment is {alignment}, not a power of two")
        start = -(-self._at // alignment) * alignment
        seen, expected = set(), 0
        for tensor in tensors:
            if not tensor.name or tensor.name in seen:
                raise BadModelFile(f"tensor name {brief(tensor.name)} is empty or repeated")
            seen.add(tensor.name)
            # llama.cpp demands the same: data lies in the order of the table without gaps.
            if tensor.offset != expected:
                raise BadModelFile(
                    f"tensor {brief(tensor.name)} starts at {tensor.offset} instead of {expected}"
                )
            if start + tensor.offset + tensor.size_bytes > self._file_bytes:
                raise BadModelFile(
                    f"tensor {brief(tensor.name)} ends at byte"
                    f" {start + tensor.offset + tensor.size_bytes}, the file at"
                    f" {self._file_bytes}: it is cut off or damaged; pull it again"
                )
            expected += -(-tensor.size_bytes // alignment) * alignment

    def _check_count(self, what: str, count: int, least_bytes: int, limit: int) -> None:
        if count > limit or count * least_bytes > self._end - self._at:
            raise BadModelFile(f"the header claims {count} {what}, more than can be in the file")

    def _string(self, max_bytes: int, what: str) -> str:
        length = self._number("Q")
        if length > max_bytes:
            raise BadModelFile(f"{brief(what)} is a string of {length} bytes (most: {max_bytes})")
        self._keep(length)
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadModelFile(f"{brief(what)} is not valid UTF-8") from error

    def _keep(self, n_bytes: int) -> None:
        self._kept += n_bytes
        if self._kept > _MAX_KEPT_BYTES:
            raise BadModelFile(f"the header holds more than {_MAX_KEPT_BYTES} bytes of metadata")

    def _number(self, code: str) -> int:
        (value,) = struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))
        return int(value)

    def _take(self, n_bytes: int) -> bytes:
        at = self._take_at(n_bytes)
        return self._data[at : at + n_bytes]

    def _take_at(self, n_bytes: int) -> int:
        at = self._at
        if n_bytes > self._end - at:
            raise BadModelFile(f"the header is cut off at byte {self._end}")
        self._at = at + n_bytes
        return at


def _check_parts(parts: tuple[GGUFHeader, ...], count: int) -> None:
    total = _split_number(parts[0], "split.tensors.count", default=-1)
    for number, part in enumerate(parts):
        if _split_number(part, "split.no", default=0) != number:
            raise BadModelFile(f"part {number + 1} of the split GGUF says it is another part")
        if _split_number(part, "split.count", default=1) != count:
            raise BadModelFile(f"part {number + 1} of the split GGUF belongs to another split")
    if total not in (-1, sum(len(part.tensors) for part in parts)):
        raise BadModelFile("the parts of the split GGUF do not hold all its tensors")


def _split_number(header: GGUFHeader, key: str, default: int) -> int:
    value = header.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value > _MAX_TENSORS:
        raise BadModelFile(f"{key} is {brief(value)}")
    if key == "split.count" and not 1 <= value <= _MAX_PARTS:
        raise BadModelFile(f"{key} is {value}; expected 1 to {_MAX_PARTS}")
    return value


def _check_properties(header: GGUFHeader) -> None:
    """Read every property once, so that those who get this header can rely on them."""
    if header.text("general.type") in ("mmproj", "adapter") or header.architecture == "clip":
        raise BadModelFile("this GGUF is a projector or an adapter, not a language model")
    if not header.tensors:
        raise BadModelFile("the GGUF holds no tensors")
    names = "context_tokens n_layers n_embd n_vocab n_heads n_heads_kv n_experts"
    for name in (*names.split(), "key_length", "value_length"):
        getattr(header, name)


def _reason(error: Exception) -> str:
    # `strerror` without the path: an error text must not tell where things are.
    return (getattr(error, "strerror", None) or str(error)).lower()
