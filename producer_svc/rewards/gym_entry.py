"""Entries of reasoning-gym tasks in plain msgpack types and back, without loss: verifiers care for tuple and int keys.

What JSON has no type for is a map with one key that begins with "~"; only the few types below are ever made from it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

WORD_64 = range(-(2**63), 2**64)
MARK = "~"


class NotPlain(ValueError):
    """A value that has no plain form."""


_WRITE: dict[type, tuple[str, Callable[[Any], Any]]] = {
    Fraction: ("fraction", str),
    Decimal: ("decimal", str),
    complex: ("complex", lambda v: [v.real, v.imag]),
    datetime: ("datetime", lambda v: v.isoformat()),
    date: ("date", lambda v: v.isoformat()),
    time: ("time", lambda v: v.isoformat()),
    timedelta: ("timedelta", lambda v: [v.days, v.seconds, v.microseconds]),
}
_READ: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "fraction": Fraction,
    "decimal": Decimal,
    "complex": lambda v: complex(*v),
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": lambda v: timedelta(*v),
}
_MANY: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_MAKE: dict[str, type] = {name: kind for kind, name in _MANY.items()}


def encode_entry(value: Any) -> Any:
    """Plain types only. NotPlain for a type that has no plain form; numpy scalars and arrays become Python's own."""
    kind = type(value)
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        return encode_entry(str(value) if isinstance(value, str) else value.tolist())
    if value is None or kind in (bool, float, str, bytes):
        return value
    if kind is int:
        return value if value in WORD_64 else {MARK + "int": str(value)}
    if kind is list:
        return [encode_entry(item) for item in value]
    if isinstance(value, dict):
        return _encode_map(value)
    if kind in _MANY:
        return {MARK + _MANY[kind]: [encode_entry(item) for item in value]}
    if kind in _WRITE:
        name, write = _WRITE[kind]
        return {MARK + name: write(value)}
    if isinstance(value, (str, int, float)):  # an enum, say
        base = str.__str__ if isinstance(value, str) else int if isinstance(value, int) else float
        return encode_entry(base(value))
    raise NotPlain(f"holds a {kind.__module__}.{kind.__name__}, which cannot be sent")


def _encode_map(value: dict[Any, Any]) -> Any:
    if all(type(key) is str and not key.startswith(MARK) for key in value):
        return {key: encode_entry(item) for key, item in value.items()}
    return {MARK + "map": [[encode_entry(key), encode_entry(item)] for key, item in value.items()]}


def decode_entry(value: Any) -> Any:
    """Inverse of `encode_entry`. ValueError on what it did not make."""
    if isinstance(value, (list, tuple)):
        return [decode_entry(item) for item in value]
    if not isinstance(value, dict):
        return value
    name = next(iter(value), "")
    if not name.startswith(MARK):
        return {key: decode_entry(item) for key, item in value.items()}
    inner, name = value[name], name.removeprefix(MARK)
    if name == "map":
        return {decode_entry(key): decode_entry(item) for key, item in inner}
    if name in _MAKE:
        return _MAKE[name](decode_entry(item) for item in inner)
    if name in _READ:
        return _READ[name](inner)
    raise ValueError(f"an entry with the unknown mark {name[:20]!r}")
