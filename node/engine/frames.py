"""Frames on the pipe between daemon and worker: u32 little-endian length, then msgpack."""

from __future__ import annotations

import struct
from typing import BinaryIO

import msgspec

from node.engine.messages import Command, Report

__all__ = ["HEADER", "decode_command", "decode_report", "encode", "read_frame"]

HEADER = struct.Struct("<I")
_MAX_FRAME_BYTES = 256 * 2**20

_encoder = msgspec.msgpack.Encoder()
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


def encode(message: Command | Report) -> bytes:
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame's body; None at the end of the stream, also in the middle of a frame."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    if size > _MAX_FRAME_BYTES:
        return None
    body = stream.read(size)
    return body if len(body) == size else None
