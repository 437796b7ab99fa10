"""Reads the trainer's own account of its steps (trainer_svc/step_ledger.py) and finds the history that survived. Pure but for `read`.

The lives of the trainer form a tree: each begins at the checkpoint of an earlier one. The surviving history is the path
from the root to the last life; what an earlier life trained past the checkpoint that was gone on from is discarded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbehind.errors import InputError


@dataclass(frozen=True, slots=True)
class Life:
    """A trainer began: at `step`, from a checkpoint of the life `parent` (0 = from nothing)."""

    incarnation: int
    parent: int
    step: int
    t: float
    pid: int


@dataclass(frozen=True, slots=True)
class Step:
    """A life trained a step: which requests in which order, from which versions, and what came out."""

    incarnation: int
    step: int
    t: float  # seconds since the epoch
    requests: tuple[str, ...]
    oldest: tuple[int, ...]  # version number, for each request
    newest: tuple[int, ...]
    weights: str  # digest after the step


Line = Life | Step


def read(path: Path, start: int = 0) -> tuple[list[Line], int]:
    """The whole lines from byte `start` on, and where to go on. A line that is not whole is not read yet; none if there is no file."""
    if not path.exists():
        return [], start
    with path.open("rb") as file:
        file.seek(start)
        raw = file.read()
    whole = raw[: raw.rfind(b"\n") + 1]
    return parse(whole.decode("utf-8", "replace").splitlines()), start + len(whole)


def parse(lines: Iterable[str]) -> list[Line]:
    """Lines without their end. Empty ones, and pieces of lines that a kill tore, are passed over."""
    out: list[Line] = []
    for text in lines:
        try:
            out.append(_line(json.loads(text)))
        except (ValueError, KeyError, TypeError):
            continue
    return out


def _line(raw: dict[str, Any]) -> Line:
    if raw["kind"] == "life":
        return Life(int(raw["incarnation"]), int(raw["parent"]), int(raw["step"]), float(raw["t"]), int(raw["pid"]))
    return Step(
        int(raw["incarnation"]),
        int(raw["step"]),
        float(raw["t"]),
        tuple(map(str, raw["requests"])),
        tuple(map(int, raw["oldest"])),
        tuple(map(int, raw["newest"])),
        str(raw["weights"]),
    )


def surviving(lines: Sequence[Line]) -> list[Step]:
    """The steps of the surviving history, in order. InputError when a life goes on from one that the ledger does not know."""
    lives = {line.incarnation: line for line in lines if isinstance(line, Life)}
    steps: dict[int, dict[int, Step]] = {}
    for line in lines:
        if isinstance(line, Step):
            steps.setdefault(line.incarnation, {})[line.step] = line
    out: list[Step] = []
    at, end = max(lives, default=0), float("inf")
    while at:
        if at not in lives:
            raise InputError(f"the ledger has no line of incarnation {at}, which a later one goes on from")
        life = lives[at]
        out += [s for s in steps.get(at, {}).values() if life.step <= s.step < end]
        at, end = life.parent, min(end, life.step)
    return sorted(out, key=lambda s: s.step)
