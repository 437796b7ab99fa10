"""What goes through the pipes of a worker: a length as uint32 little-endian, then a msgpack map."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

import msgpack

LENGTH = struct.Struct("<I")


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """The next frame; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = stream.read(length)
    if len(body) < length:
        return None
    frame: dict[str, Any] = msgpack.unpackb(body, strict_map_key=True)
    return frame


def pack_frame(fields: Mapping[str, Any]) -> bytes:
    body: bytes = msgpack.packb(dict(fields))
    return LENGTH.pack(len(body)) + body


def write_frame(stream: BinaryIO, fields: Mapping[str, Any]) -> None:
    stream.write(pack_frame(fields))
    stream.flush()
