"""What each key allows, in words: for error messages, and for the table of the README."""

from __future__ import annotations

import sys
import typing
from pathlib import Path
from types import UnionType
from typing import Any, Literal

import annotated_types
from pydantic.fields import FieldInfo

from nbehind.config import Config
from nbehind.config_toml import toml_value

KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    dict: "a table",
    tuple: "a list",
}
BEGIN, END = "<!-- configuration: begin -->", "<!-- configuration: end -->"


def is_number(field: FieldInfo) -> bool:
    """Does the key hold one number?"""
    return field.annotation in (int, float)


def is_text(field: FieldInfo) -> bool:
    """Does the key hold a text or a path?"""
    return field.annotation in (str, Path) or typing.get_origin(field.annotation) is Literal


def allowed(field: FieldInfo) -> str:
    """Such as `a whole number ≥ 1` or `one of "keep", "finish"`."""
    kind = field.annotation
    origin = typing.get_origin(kind)
    assert origin not in (UnionType, typing.Union), "a union needs words of its own"
    if origin is Literal:
        choices = typing.get_args(kind)
        names = ", ".join(toml_value(c) for c in choices)
        return names if len(choices) == 1 else f"one of {names}"
    if origin is tuple:
        parts = typing.get_args(kind)
        return "a list of texts" if parts == (str, ...) else f"a list of {len(parts)} numbers"
    words = KINDS[origin or kind]
    limits = [text for text in map(_limit, field.metadata) if text]
    return f"{words} {' and '.join(limits)}" if limits else words


def _limit(rule: Any) -> str:
    """One limit of a field in words, '' for what is none."""
    if isinstance(rule, annotated_types.Ge):
        return f"≥ {_plain(rule.ge)}"
    if isinstance(rule, annotated_types.Gt):
        return f"> {_plain(rule.gt)}"
    if isinstance(rule, annotated_types.Le):
        return f"≤ {_plain(rule.le)}"
    if isinstance(rule, annotated_types.Lt):
        return f"< {_plain(rule.lt)}"
    pattern = getattr(rule, "pattern", None)
    return f"of the form {pattern}" if pattern else ""


def _plain(limit: Any) -> str:
    """1.0 as 1, 0.1 as 0.1, 2147483648 as itself."""
    return str(int(limit)) if limit == int(limit) else str(limit)


def markdown_table() -> str:
    """The configuration table: a row a key."""
    rows = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for section in Config.model_fields:
        for key, field in type(getattr(Config(), section)).model_fields.items():
            default = toml_value(field.get_default(call_default_factory=True))
            cells = (f"`{section}.{key}`", f"`{default}`", allowed(field), field.description or "")
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def with_table(document: str) -> str:
    """`document` with the table between its two markers brought up to date; ValueError without them."""
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document has no {BEGIN} … {END}")
    return f"{head}{begin}\n\n{markdown_table()}\n{end}{tail}"


def main(document: str) -> None:
    """Bring the table in `document` up to date."""
    path = Path(document)
    path.write_text(with_table(path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1])
