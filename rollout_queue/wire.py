"""Msgpack maps with a schema version, and the checks of their fields. Every failure is a MessageError."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgpack

from rollout_queue.errors import MessageError
from rollout_queue.messages import SCHEMA_VERSION

MAX_COUNT = 2**31 - 1  # entries of one array
MAX_PLACE = 2**53  # step, slot, version, attempt: exact as a double, which Lua computes with
MAX_DEPTH = 32


def pack(fields: Mapping[str, Any]) -> bytes:
    try:
        packed: bytes = msgpack.packb(fields, use_bin_type=True)
        return packed
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"cannot be packed: {error}") from None


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError(f"msgpack extension {code} of {len(data)} bytes")


def unpack(raw: bytes) -> dict[str, Any]:
    try:
        fields = msgpack.unpackb(raw, raw=False, strict_map_key=True, ext_hook=_refuse_extension)
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise MessageError(f"not msgpack: {str(error) or type(error).__name__}") from None
    if not isinstance(fields, dict):
        raise MessageError("not a map")
    if fields.get("v") != SCHEMA_VERSION or isinstance(fields.get("v"), bool):
        raise MessageError(f"schema {str(fields.get('v'))[:20]} is unknown, this is {SCHEMA_VERSION}")
    return fields


def typed(fields: Mapping[str, Any], key: str, kind: type) -> Any:
    value = fields.get(key)
    if type(value) is not kind:
        raise MessageError(f"{key} is not a {kind.__name__}")
    return value


def count(fields: Mapping[str, Any], key: str, most: int = MAX_PLACE) -> int:
    value = fields.get(key)
    if not is_count(value, most):
        raise MessageError(f"{key} is not a whole number from 0 to {most}")
    return int(value)  # type: ignore[arg-type]


def is_count(value: object, most: int = MAX_PLACE) -> bool:
    return type(value) is int and 0 <= value <= most


def is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def plain(value: object, where: str, depth: int = 0) -> None:
    """Raise MessageError unless `value` consists of plain msgpack types."""
    if depth > MAX_DEPTH:
        raise MessageError(f"{where} is nested too deeply")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if type(key) is not str:
                raise MessageError(f"{where} has a key that is not a string")
            plain(item, where, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            plain(item, where, depth + 1)
    elif value is not None and type(value) not in (bool, int, float, str, bytes):
        raise MessageError(f"{where} holds a {type(value).__name__}, which is not a plain type")
