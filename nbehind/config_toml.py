"""Values and sections as TOML text (the standard library only reads TOML), and `--set` values read as TOML literals."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def literal(text: str) -> Any:
    """`text` as a TOML value, or as the string it is: `3` → 3, `[1, 2]` → [1, 2], `abc` → "abc"."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if list(parsed) == ["value"] else text


def toml_value(value: Any) -> str:
    """A value on one line; reading it back gives an equal one (paths as strings, tuples as arrays)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, Path)):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(str(k))} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    raise TypeError(f"{type(value).__name__} has no form in TOML")


def toml_key(key: str) -> str:
    """A key, quoted if it must be."""
    return key if BARE_KEY.fullmatch(key) else toml_value(key)


def toml_document(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """`[section]` and `key = value` lines."""
    blocks = (
        f"[{name}]\n" + "".join(f"{toml_key(k)} = {toml_value(v)}\n" for k, v in section.items())
        for name, section in sections.items()
    )
    return "\n".join(blocks)
