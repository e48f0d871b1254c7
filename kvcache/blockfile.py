"""One piece of state as a file: a header, the tokens it stands for, the bytes, a checksum over all.

A file is written under a temporary name and renamed, so that under its own name it is whole.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import xxhash

from kvcache.keys import BlockHash, Namespace

__all__ = ["SUFFIX", "BadFile", "Entry", "Kind", "file_path", "read", "read_entry", "write"]

Kind = Literal["block", "tail", "snapshot"]
Tokens = npt.NDArray[np.int32]
Blob = npt.NDArray[np.uint8]

SUFFIX = ".kv"
_MAGIC = b"INGLKV01"
_KINDS: tuple[Kind, ...] = ("block", "tail", "snapshot")
# Checksum; then magic, namespace, hash, parent, kind, first position, tokens, payload bytes.
_CHECKSUM_BYTES = 16
_HEADER = struct.Struct("<8s16s16s16sIIIQ")
_TOKENS_AT = _CHECKSUM_BYTES + _HEADER.size


class BadFile(ValueError):
    """The file is not what its name says: cut, changed, or of another kind."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A piece of state: `tokens` from position `start` on, behind `parent`. `size_bytes` is that of
    the state alone."""

    namespace: Namespace
    hash: BlockHash
    parent: BlockHash
    kind: Kind
    start: int
    tokens: Tokens
    size_bytes: int

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def file_bytes(self) -> int:
        return _TOKENS_AT + self.tokens.nbytes + self.size_bytes


def file_path(folder: Path, namespace: Namespace, name: BlockHash) -> Path:
    text = name.hex()
    return folder / namespace / text[:2] / f"{text}{SUFFIX}"


def write(folder: Path, entry: Entry, payload: Blob) -> None:
    """Raises: OSError; then nothing is left behind."""
    path = file_path(folder, entry.namespace, entry.hash)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.stem}.{os.getpid()}.{threading.get_native_id()}.tmp")
    header = _HEADER.pack(
        _MAGIC,
        bytes.fromhex(entry.namespace),
        entry.hash,
        entry.parent,
        _KINDS.index(entry.kind),
        entry.start,
        len(entry.tokens),
        len(payload),
    )
    tokens = np.ascontiguousarray(entry.tokens, "<i4")
    parts = (header, tokens.data.cast("B"), np.ascontiguousarray(payload).data)
    checksum = xxhash.xxh3_128()
    for part in parts:
        checksum.update(part)
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", 0) as file:
            for part in (checksum.digest(), *parts):
                _write_all(file.fileno(), part)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def read(path: Path, entry: Entry) -> Blob:
    """The payload, after everything has been checked; shape (size_bytes,).

    Raises:
        BadFile: delete it.
        OSError: it could not be read; it may still be good.
    """
    data = np.empty(entry.file_bytes, np.uint8)
    with path.open("rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != len(data):
            raise BadFile(f"{path}: the size is wrong")
        view, n = data.data, 0
        while n < len(data):
            got = file.readinto(view[n:])
            if not got:
                raise BadFile(f"{path}: it ends early")
            n += got
    if xxhash.xxh3_128(data.data[_CHECKSUM_BYTES:]).digest() != data[:_CHECKSUM_BYTES].tobytes():
        raise BadFile(f"{path}: the checksum is wrong")
    found = _entry(data.data[_CHECKSUM_BYTES:], path)
    if (found.namespace, found.hash, found.parent, found.start) != (
        entry.namespace,
        entry.hash,
        entry.parent,
        entry.start,
    ) or not np.array_equal(found.tokens, entry.tokens):
        raise BadFile(f"{path}: it holds something else")
    return data[_TOKENS_AT + entry.tokens.nbytes :]


def read_entry(path: Path) -> Entry:
    """What a file says of itself; the checksum is not looked at.

    Raises:
        BadFile, OSError: as `read`.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(_CHECKSUM_BYTES)
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size:
            raise BadFile(f"{path}: it ends early")
        n_tokens = _HEADER.unpack(head)[6]
        entry = _entry(memoryview(head + file.read(min(4 * n_tokens, size))), path)
    if entry.file_bytes != size or path.stem != entry.hash.hex():
        raise BadFile(f"{path}: the size or the name is wrong")
    return entry


def _entry(data: memoryview, path: Path) -> Entry:
    magic, namespace, name, parent, kind, start, n_tokens, size = _HEADER.unpack_from(data)
    tokens = np.frombuffer(data[_HEADER.size : _HEADER.size + 4 * n_tokens], "<i4")
    if magic != _MAGIC or kind >= len(_KINDS) or len(tokens) != n_tokens:
        raise BadFile(f"{path}: not a state file of this version")
    return Entry(
        Namespace(namespace.hex()),
        BlockHash(name),
        BlockHash(parent),
        _KINDS[kind],
        start,
        tokens.astype(np.int32),
        size,
    )


def _write_all(fd: int, part: bytes | memoryview) -> None:
    view = memoryview(part)
    while len(view):
        view = view[os.write(fd, view) :]
