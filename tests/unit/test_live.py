"""The live view: what is read, what is worked out, what is drawn."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nbehind.live import (
    PlainDisplay,
    RichDisplay,
    SturdyDisplay,
    duration,
    make_display,
    message_of,
    render,
    sparkline,
    step_line,
)
from nbehind.live_data import MetricsTail, Probe, ServiceLine, View, eta_s, number, tokens_per_s
from rollout_queue.errors import ConnectionRefused
from rollout_queue.messages import RunState


def row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "t": 100.0 + 2 * step,
        "reward_mean": 0.5,
        "reward_std": 0.25,
        "lag_max": 1,
        "lag_mean": 0.5,
        "tokens": 3000,
        "seconds": {"total": 2.0},
        "queue": {"open": 32, "queued": 3, "leased": 20, "delivered": 9},
        "loss": 0.0123,
        "length_mean": 12.0,
        **more,
    }


def view(rows: list[dict[str, Any]], **more: Any) -> View:
    return View("demo", "training", 100, rows, **more)


def drawn(shown: View) -> str:
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(render(shown))
    return console.export_text()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_tail_takes_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    tail.read()
    assert not tail.rows
    line = json.dumps(row(0)) + "\n"
    path.write_text(line + line[:10])
    tail.read()
    assert [r["step"] for r in tail.rows] == [0]
    with path.open("a") as file:
        file.write(line[10:] + "garbage\n\n")
    tail.read()
    tail.read()
    assert (len(tail.rows), tail.bad_lines) == (2, 1)


def test_a_file_that_a_resumed_trainer_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row(s)) + "\n" for s in range(5)))
    tail = MetricsTail(path)
    tail.read()
    new = tmp_path / "new"
    new.write_text("".join(json.dumps(row(s)) + "\n" for s in range(3)) + " " * 9000)
    new.replace(path)
    tail.read()
    assert [r["step"] for r in tail.rows] == [0, 1, 2]
    path.write_text("")  # the same file, shortened
    tail.read()
    assert not tail.rows


def test_eta_is_the_pace_of_the_newest_steps() -> None:
    # steps 10 to 29 in 2 s each after slow ones: 70 steps are left of 100, so 140 s
    slow = [row(s, t=-1000.0 * (10 - s)) for s in range(10)]
    assert eta_s([*slow, *(row(s) for s in range(10, 30))], 100) == pytest.approx(140.0)
    assert eta_s([row(0)], 100) is None
    assert eta_s([row(0), row(1)], 0) is None
    assert eta_s([row(0), row(0)], 100) is None
    assert eta_s([row(0), {"step": 1, "t": "late"}], 100) is None
    assert eta_s([row(98), row(99)], 100) == 0.0


def test_rates_and_numbers() -> None:
    assert tokens_per_s([row(0), row(1)]) == 1500.0
    assert tokens_per_s([{"step": 0}]) is None
    assert number({"a": {"b": 3}}, "a", "b") == 3.0
    for odd in ({}, {"a": True}, {"a": "3"}, {"a": [1]}, {"a": 10**400}):
        assert number(odd, "a") is None


def test_small_words() -> None:
    assert [duration(s) for s in (0, 7.4, 754, 3723)] == ["0:00", "0:07", "12:34", "1:02:03"]
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([1.0, 1.0]) == "▄▄"
    assert sparkline([float("nan"), float("inf")]) == ""
    assert message_of("2026-01-31T12:00:00.123Z INFO trainer: engine ready: 3 s") == "engine ready: 3 s"
    assert message_of("Loading: 50%") == "Loading: 50%"


def test_a_step_as_a_line() -> None:
    line = step_line(view([row(10), row(11)]))
    assert (
        line
        == "step 12/100  reward 0.500 ± 0.250  lag 1 (mean 0.50)  1,500 tok/s  open 32 (queued 3)  loss 0.0123  eta 2:56"
    )
    assert step_line(View("r", "training", 0, [{"step": 4}])).startswith("step 5  reward – ± –")


def test_the_block_shows_steps_queue_and_producers() -> None:
    producers = {"p-[bold]0": {"version": "11", "tokens_per_s": "812", "in_flight": "8", "stage": "generating"}}
    services = [ServiceLine("trainer", "running"), ServiceLine("producer-1", "restarting in 2 s (restart 1)")]
    text = drawn(view([row(10), row(11)], producers=producers, services=services, problem="Redis at x is away"))
    for part in (
        "demo",
        "step 12/100",
        "eta 2:56",
        "open 32",
        "queued 3, leased 20, delivered 9",
        "p-[bold]0",
        "812",
        "restarting in 2 s",
        "Redis at x is away",
    ):
        assert part in text


def test_before_the_first_step_the_services_tell_their_stage() -> None:
    services = [ServiceLine("trainer", "running", "2026-01-31T12:00:00.123Z INFO trainer: loading [weights]")]
    assert "loading [weights]" in drawn(View("demo", "starting", 100, services=services))


def test_plain_lines_come_once_a_second_at_most_and_the_last_is_never_lost() -> None:
    stream, clock = io.StringIO(), Clock()
    display = PlainDisplay(stream, clock)
    rows: list[dict[str, Any]] = []
    for step in range(28):
        rows.append(row(step))
        display.update(view(rows))
        display.update(view(rows))
        clock.now += 0.125
    display.close()
    steps = [line.split()[1] for line in stream.getvalue().splitlines()]
    assert steps == ["1/100", "9/100", "17/100", "25/100", "28/100"]


def test_plain_stages_are_said_once() -> None:
    stream, clock = io.StringIO(), Clock()
    display = PlainDisplay(stream, clock)
    for _ in range(5):
        display.update(View("demo", "starting", 100, services=[ServiceLine("trainer", "running", "loading")]))
        clock.now += 10
    display.update(View("demo", "starting", 100, services=[ServiceLine("trainer", "running", "ready")]))
    assert stream.getvalue() == "trainer: loading\ntrainer: ready\n"


def test_a_pipe_gets_plain_lines_and_a_terminal_a_block() -> None:
    stream = io.StringIO()
    display = make_display(stream, plain=False)
    display.note("hello [x]")
    assert stream.getvalue() == "hello [x]\n"
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    rich = RichDisplay(console)
    rich.note("worth [keeping]")
    rich.update(view([row(1)]))
    rich.update(view([row(2)]))  # too soon to be drawn before the display closes
    rich.close()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "worth [keeping]" in text
    assert "step 2/100" in text
    assert "step 3/100" in text


def test_a_terminal_that_goes_away_does_not_end_the_run() -> None:
    stream = io.StringIO()
    display = SturdyDisplay(PlainDisplay(stream))
    stream.close()
    display.note("into the void")
    display.update(view([row(1)]))
    display.close()
    assert display.broken


class Queue:
    def __init__(self) -> None:
        self.ended = ""

    def state(self) -> RunState:
        return RunState(incarnation=1, published=1, floor=0, ended=self.ended, trainer_alive=True)

    def producers(self) -> Mapping[str, Mapping[str, str]]:
        return {"p": {"version": "1"}}


def test_the_probe_survives_a_redis_that_goes_away() -> None:
    queue = Queue()
    tries: list[str] = []

    def connect() -> Queue:
        tries.append("try")
        if len(tries) < 3:
            raise ConnectionRefused(f"away {len(tries)}")
        return queue

    probe = Probe(connect, period_s=0.01)
    probe.start()
    try:
        wait_for(lambda: probe.result.producers == {"p": {"version": "1"}})
        assert len(tries) == 3
        assert (probe.result.error, probe.run_ended()) == ("", False)
        queue.ended = "done"
        wait_for(probe.run_ended)
    finally:
        probe.close()
    assert not probe._thread.is_alive()


def test_what_the_probe_knew_of_the_end_outlives_its_redis() -> None:
    queue = Queue()
    queue.ended = "done"
    answers = iter([queue])

    def connect() -> Queue:
        try:
            return next(answers)
        except StopIteration:
            raise ConnectionRefused("gone for good") from None

    def away() -> RunState:
        raise ConnectionRefused("gone")

    probe = Probe(connect, period_s=0.01)
    probe.start()
    try:
        wait_for(probe.run_ended)
        queue.state = away  # type: ignore[method-assign]
        wait_for(lambda: probe.result.error == "gone for good")
        assert probe.run_ended()
    finally:
        probe.close()


def wait_for(condition: Any) -> None:
    waiter = threading.Event()
    for _ in range(3000):
        if condition():
            return
        waiter.wait(0.01)
    raise AssertionError("waited in vain")
