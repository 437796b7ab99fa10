"""The judge finds what is wrong: each guarantee broken once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from nbehind.chaos import ledger, verify
from nbehind.chaos.ledger import Life, Step
from nbehind.errors import InputError


def step(number: int, incarnation: int = 1, *, requests: tuple[str, ...] = (), lag: int = 0, weights: str = "") -> Step:
    ids = requests or (f"{number}.0.0", f"{number}.1.0")
    versions = (number - lag,) * len(ids)
    return Step(incarnation, number, 100.0 + number, ids, versions, versions, weights or f"w{number}")


def whole(steps: int = 5) -> list[Step]:
    return [step(s) for s in range(steps)]


def test_a_run_without_fault_is_without_fault() -> None:
    assert verify.check_history(whole(), 2, 0) == verify.History(5, 10, 0, 0, 0, 0)
    assert verify.check_history([], 2, 0) == verify.History(0, 0, 0, 0, 0, 0)


def test_a_request_trained_twice_and_one_lost() -> None:
    history = whole()
    history[3] = step(3, requests=("3.0.0", "2.1.0"))
    found = verify.check_history(history, 2, 0)
    assert (found.trained_twice, found.lost) == (1, 1)


def test_a_replacement_stands_for_its_slot_and_a_foreign_slot_is_no_request() -> None:
    history = whole()
    history[1] = step(1, requests=("1.0.2", "1.1.0"))
    assert verify.check_history(history, 2, 0).lost == 0
    history[1] = step(1, requests=("1.0.0", "1.2.0"))
    assert verify.check_history(history, 2, 0).lost == 2


def test_lag_above_the_bound_and_below_zero() -> None:
    history = whole()
    history[4] = step(4, lag=3)
    assert verify.check_history(history, 2, 3).lag_violations == 0
    assert verify.check_history(history, 2, 2).lag_violations == 2
    history[4] = step(4, lag=-1)
    assert verify.check_history(history, 2, 2).lag_violations == 2


def test_a_missing_step() -> None:
    history = whole()
    del history[2]
    found = verify.check_history(history, 2, 0)
    assert (found.steps_missing, found.lost) == (1, 2)


def test_what_a_life_trained_past_the_checkpoint_is_discarded() -> None:
    lines = [
        Life(1, 0, 0, 0.0, 11), step(0), step(1), step(2), step(3),
        Life(2, 1, 2, 0.0, 12), step(2, 2), step(4, 1),  # the first one woke up
        Life(3, 1, 2, 0.0, 13),  # of the second one nothing was saved
        step(2, 3), step(3, 3),
    ]  # fmt: skip
    assert [(s.incarnation, s.step) for s in ledger.surviving(lines)] == [(1, 0), (1, 1), (3, 2), (3, 3)]


def test_a_checkpoint_of_a_discarded_life_may_be_gone_on_from() -> None:
    lines = [
        Life(1, 0, 0, 0.0, 11), step(0), step(1), step(2),
        Life(2, 1, 1, 0.0, 12), step(1, 2),
        Life(3, 1, 3, 0.0, 13), step(3, 3),
    ]  # fmt: skip
    assert [(s.incarnation, s.step) for s in ledger.surviving(lines)] == [(1, 0), (1, 1), (1, 2), (3, 3)]


def test_a_life_that_nobody_wrote_down() -> None:
    with pytest.raises(InputError, match="no line of incarnation 1"):
        ledger.surviving([Life(2, 1, 4, 0.0, 12)])
    assert ledger.surviving([]) == []


def test_torn_lines_are_passed_over_and_an_unfinished_one_is_read_later(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    assert ledger.read(path) == ([], 0)
    life = {"kind": "life", "incarnation": 1, "parent": 0, "step": 0, "t": 1.0, "pid": 7}
    one = {
        "kind": "step",
        "incarnation": 1,
        "step": 0,
        "t": 2.0,
        "requests": ["0.0.0"],
        "oldest": [0],
        "newest": [0],
        "weights": "w",
    }
    text = f"\n{json.dumps(life)}\n\n{json.dumps(one)[:30]}\n{json.dumps(one)}\n\n{json.dumps(one)}"
    path.write_text(text)
    lines, at = ledger.read(path)
    assert lines == [Life(1, 0, 0, 1.0, 7), Step(1, 0, 2.0, ("0.0.0",), (0,), (0,), "w")]
    path.write_text(text + "\n")
    assert len(ledger.read(path, at)[0]) == 1


def test_differences_from_the_undisturbed_run() -> None:
    assert verify.first_difference(whole(), whole()) == ""
    assert "5 steps" in verify.first_difference(whole(), whole(4))
    other = whole()
    other[2] = dataclasses.replace(other[2], weights="x")
    assert verify.first_difference(whole(), other) == "the weights after step 2 differ"
    other[1] = step(1, requests=("1.1.0", "1.0.0"))
    assert verify.first_difference(whole(), other).startswith("step 1 trained")


@pytest.mark.parametrize(
    ("progress", "faults", "longest"),
    [
        ([10, 20, 30, 100], [], 70.0),
        ([10, 20, 100], [(30, 60)], 40.0),  # counted from the end of the fault; 10 before it
        ([10, 20, 100], [(30, 60), (50, 80)], 20.0),  # ... of the last of overlapping ones
        ([10, 20, 100], [(30, 80), (40, 50)], 20.0),
        ([10, 20, 100], [(70, 70)], 50.0),  # an instant
        ([10, 20], [(20, 100)], 20.0 - 10.0),
        ([], [], 100.0),
    ],
)
def test_the_longest_stall(progress: list[float], faults: list[tuple[float, float]], longest: float) -> None:
    assert verify.longest_stall(progress, faults, 0.0, 100.0)[0] == longest


def test_steps_of_a_trainer_that_is_not_the_newest_are_no_progress() -> None:
    lines = [Life(1, 0, 0, 0.0, 11), step(0), Life(2, 1, 0, 0.0, 12), step(5, 1), step(0, 2)]
    assert verify.progress_times(lines) == [100.0, 100.0]
