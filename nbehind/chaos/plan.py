"""Which faults happen when: a pure function of the seed. No I/O, no clock.

Kinds are dealt like cards: every kind comes once before any comes again, each round in another order.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FIRST_S = 5.0  # the run gets this long to take its first steps
GAP_S = (3.0, 10.0)  # between the beginnings of two faults ...
TOGETHER_S = (0.05, 1.0)  # ... or this, so that they overlap
TOGETHER = 0.2  # share of faults that follow at once on the one before


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `at_s` after the beginning, in effect for `seconds`. `draw` decides the rest (which producer, which bytes)."""

    at_s: float
    kind: str
    seconds: float
    draw: int


def plan(seed: int, total_s: float, kinds: Mapping[str, tuple[float, float]]) -> tuple[Fault, ...]:
    """The faults of a run of `total_s` seconds, in order. `kinds` maps a name to its shortest and longest duration in seconds.

    No fault begins in the last tenth, so that the last ones are judged too. ValueError when there is no time or no kind.
    """
    if not kinds or total_s <= 0:
        raise ValueError(f"nothing to plan: {len(kinds)} kinds in {total_s:g} s")
    rng = random.Random(seed)
    end, at_s = total_s * 0.9, min(FIRST_S, total_s / 10)
    faults: list[Fault] = []
    deck: list[str] = []
    while at_s < end:
        deck = deck or _shuffled(sorted(kinds), rng)
        kind = deck.pop()
        faults.append(Fault(at_s, kind, rng.uniform(*kinds[kind]), rng.getrandbits(32)))
        at_s += rng.uniform(*(TOGETHER_S if rng.random() < TOGETHER else GAP_S))
    return tuple(faults)


def _shuffled(names: Sequence[str], rng: random.Random) -> list[str]:
    out = list(names)
    rng.shuffle(out)
    return out
