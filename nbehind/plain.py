"""Python values <-> values that msgpack carries, without loss where it matters to a verifier (tuples, keys that are no strings)."""

from __future__ import annotations

from typing import Any

TUPLE, MAP = "__tuple__", "__map__"
INT_RANGE = range(-(2**63), 2**64)


def to_plain(value: Any) -> Any:
    """None, bool, int, float, str, list and dict with string keys; anything else becomes its text."""
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        return value if value in INT_RANGE else str(value)
    if isinstance(value, list):
        return [to_plain(v) for v in value]
    if isinstance(value, tuple):
        return {TUPLE: [to_plain(v) for v in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: to_plain(v) for key, v in value.items()}
        return {MAP: [[to_plain(key), to_plain(v)] for key, v in value.items()]}
    if isinstance(value, (set, frozenset)):
        return [to_plain(v) for v in sorted(value, key=str)]
    return to_plain(value.item()) if hasattr(value, "item") and not getattr(value, "shape", ()) else str(value)


def from_plain(value: Any) -> Any:
    """Inverse of to_plain for lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        return [from_plain(v) for v in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {TUPLE}:
        return tuple(from_plain(v) for v in value[TUPLE])
    if set(value) == {MAP}:
        return {from_plain(key): from_plain(v) for key, v in value[MAP]}
    return {key: from_plain(v) for key, v in value.items()}
