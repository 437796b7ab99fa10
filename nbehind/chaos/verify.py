"""What must hold of a run, whatever died meanwhile. Pure: the ledger's lines and times in, a verdict out."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nbehind.chaos.ledger import Life, Line, Step

Span = tuple[float, float]  # seconds since the epoch, end ≥ begin


@dataclass(frozen=True, slots=True)
class History:
    """Counts of broken promises in a surviving history; all must be 0."""

    steps: int
    trained: int
    trained_twice: int
    lost: int
    lag_violations: int
    steps_missing: int


def check_history(steps: Sequence[Step], groups_per_step: int, n_behind: int) -> History:
    """Is every request (step, slot) below the last step trained exactly once, within the bound, and in its own step's turn?

    Requests are counted by slot, whatever their round: a replacement stands for what it replaces.
    """
    total = steps[-1].step + 1 if steps else 0
    slots = Counter(_slot(request) for s in steps for request in s.requests)
    wanted = {(step, slot) for step in range(total) for slot in range(groups_per_step)}
    return History(
        steps=len(steps),
        trained=sum(slots.values()),
        trained_twice=sum(count - 1 for count in slots.values()),
        lost=len(wanted - slots.keys()) + len(slots.keys() - wanted),
        lag_violations=sum(
            s.step - old > n_behind or new > s.step for s in steps for old, new in zip(s.oldest, s.newest, strict=True)
        ),
        steps_missing=len(set(range(total)) - {s.step for s in steps}),
    )


def _slot(request: str) -> tuple[int, int]:
    step, slot, *_ = request.split(".")
    return int(step), int(slot)


def first_difference(ours: Sequence[Step], reference: Sequence[Step]) -> str:
    """'' when both trained the same requests in the same order and had the same weights after every step, else where not."""
    if len(ours) != len(reference):
        return f"{len(ours)} steps, undisturbed {len(reference)}"
    for a, b in zip(ours, reference, strict=True):
        if a.requests != b.requests:
            return f"step {a.step} trained {' '.join(a.requests)}, undisturbed {' '.join(b.requests)}"
        if a.weights != b.weights:
            return f"the weights after step {a.step} differ"
    return ""


def progress_times(lines: Sequence[Line]) -> list[float]:
    """When a step was done by the trainer that was the newest then."""
    out, newest = [], 0
    for line in lines:
        newest = max(newest, line.incarnation)
        if isinstance(line, Step) and line.incarnation == newest:
            out.append(line.t)
    return sorted(out)


def longest_stall(progress: Sequence[float], faults: Iterable[Span], begin: float, end: float) -> tuple[float, float]:
    """(seconds, when it began): the longest time without a step between begin and end.

    While a fault is in effect the clock stands still, and it starts anew at the end of one: a stall is counted from the
    last of overlapping faults.
    """
    spans = sorted(faults)
    moments = {begin, end, *progress, *(moment for span in spans for moment in span)}
    marks = sorted(m for m in moments if begin <= m <= end)
    longest = (0.0, begin)
    for start, stop in itertools.pairwise(marks):
        if any(b <= start < e for b, e in spans):  # in effect
            continue
        longest = max(longest, (stop - start, start))
    return longest


def lives(lines: Sequence[Line]) -> int:
    return sum(isinstance(line, Life) for line in lines)
