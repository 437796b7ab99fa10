"""Small files of a run folder: read what is whole, write as a whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file; a torn last line is passed over."""
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def write_text_atomic(path: Path, text: str) -> None:
    """Replace the file as a whole."""
    temporary = path.with_name(path.name + f".tmp{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
