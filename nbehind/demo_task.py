"""The demo's task: sums and differences of two small numbers, "7+8" -> "15". Pure functions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

MAX_OPERAND = 9  # the demo model has seen no larger one


@dataclass(frozen=True, slots=True)
class Problem:
    """What is asked and what is right."""

    question: str
    answer: str


def make_problem(a: int, operator: str, b: int) -> Problem:
    """`operator` is "+" or "-"."""
    if operator not in ("+", "-"):
        raise ValueError(f"operator {operator!r}: must be + or -")
    return Problem(f"{a}{operator}{b}", str(a + b if operator == "+" else a - b))


def every_problem(max_operand: int = MAX_OPERAND) -> list[Problem]:
    """All of them, in order: 2 * (max_operand + 1)^2."""
    numbers = range(max_operand + 1)
    return [make_problem(a, operator, b) for operator in "+-" for a in numbers for b in numbers]


def draw_problems(size: int, seed: int, max_operand: int = MAX_OPERAND) -> Iterator[Problem]:
    """`size` seeded problems. Every problem comes once before any comes again, so that a run sees them all."""
    rng = random.Random(f"demo-{seed}")
    deck: list[Problem] = []
    for _ in range(size):
        if not deck:
            deck = every_problem(max_operand)
            rng.shuffle(deck)
        yield deck.pop()
