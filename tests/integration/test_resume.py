"""A trainer killed at any step and resumed gives the run that it would have been: same requests, losses, weights."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from nbehind.embedded import EmbeddedRedis
from tests import runs

STEPS = 14
EXACT = {
    "run__n_behind": 0,
    "run__max_steps": STEPS,
    "trainer__lr": 0.5,
    "metrics__step_ledger": True,
    "checkpoint__every_steps": 3,
}
SLOW = {"trainer__fake_step_s": 0.15}


def account(folder: Path, run: str = "run") -> list[dict[str, Any]]:
    """Per step the line of the life that counts: the last one that trained it."""
    text = (folder / "runs" / run / "ledger.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    last = {row["step"]: row for row in lines if row["kind"] == "step"}
    return [last[step] for step in sorted(last)]


def lives(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "runs" / "run" / "ledger.jsonl").read_text()
    return [row for line in text.splitlines() if line.strip() and (row := json.loads(line))["kind"] == "life"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    runs.finish(runs.command("run", folder, **EXACT), folder)
    return folder


@contextmanager
def surviving_producers(folder: Path, url: str, **values: object) -> Iterator[None]:
    with ExitStack() as stack:
        for index in ("0", "1"):
            cmd = runs.command("producer", folder, "--redis", url, "--index", index, **values)
            stack.enter_context(runs.running(cmd, folder))
        yield


def kill_at(folder: Path, url: str, step: int, *arguments: str, **values: object) -> None:
    """Start a trainer, and kill it when it has trained `step` steps."""
    cmd = runs.command("trainer", folder, "--redis", url, *arguments, **values)
    with runs.running(cmd, folder) as trainer:
        runs.wait_for(lambda: len(runs.rows(folder)) >= step or trainer.poll() is not None, f"step {step}")
        os.kill(trainer.pid, signal.SIGKILL)


def test_killed_at_any_step_the_history_is_the_same(tmp_path: Path, undisturbed: Path):
    """Three kills: before the first checkpoint, just after one, and between two; the producers live through all of it."""
    values = {**EXACT, **SLOW}
    with EmbeddedRedis(tmp_path / "redis", max_mb=256) as server, surviving_producers(tmp_path, server.url, **values):
        kill_at(tmp_path, server.url, 2, **values)
        kill_at(tmp_path, server.url, 6, "--resume", **values)
        kill_at(tmp_path, server.url, 11, "--resume", **values)
        runs.finish(runs.command("trainer", tmp_path, "--redis", server.url, "--resume", **values), tmp_path)
    assert len(lives(tmp_path)) == 4
    resumed_at = [life["step"] for life in lives(tmp_path)]
    assert all(step % 3 == 0 for step in resumed_at) and resumed_at[-1] > 0
    mine, theirs = account(tmp_path), account(undisturbed)
    assert [row["requests"] for row in mine] == [row["requests"] for row in theirs]
    assert [row["weights"] for row in mine] == [row["weights"] for row in theirs]
    keys = ("step", "loss", "lr", "reward_mean", "counters")
    pick = [[{k: row[k] for k in keys} for row in runs.rows(folder)] for folder in (tmp_path, undisturbed)]
    assert pick[0] == pick[1]
    runs.check_conservation(runs.summary(tmp_path))


@pytest.mark.parametrize("order", ["strict", "ready"])
def test_the_bound_and_exactly_once_hold_across_a_resume(tmp_path: Path, order: str):
    values = {
        "run__n_behind": 2, "run__order": order, "run__max_steps": 16, "producer__fake_generate_s": 0.1,
        "producer__fake_sigma": 1.0, "metrics__step_ledger": True, "checkpoint__every_steps": 4, **SLOW,
    }  # fmt: skip
    with EmbeddedRedis(tmp_path / "redis", max_mb=256) as server, surviving_producers(tmp_path, server.url, **values):
        kill_at(tmp_path, server.url, 7, **values)
        runs.finish(runs.command("trainer", tmp_path, "--redis", server.url, "--resume", **values), tmp_path)
    history = account(tmp_path)
    assert [row["step"] for row in history] == list(range(16))
    trained = [request for row in history for request in row["requests"]]
    assert len(trained) == len(set(trained)) == 64
    assert {r.rsplit(".", 1)[0] for r in trained} == {f"{s}.{i}" for s in range(16) for i in range(4)}
    lags = [row["step"] - oldest for row in history for oldest in row["oldest"]]
    assert min(lags) >= 0 and max(lags) <= 2
    result = runs.summary(tmp_path)
    assert (result["trained"], result["open"], result["incarnation"]) == (64, 0, 2)


def test_damaged_checkpoints_are_passed_over(tmp_path: Path, undisturbed: Path):
    values = {**EXACT, "checkpoint__keep": 3}
    runs.finish(runs.command("run", tmp_path, **{**values, "run__max_steps": 9}), tmp_path)
    root = tmp_path / "runs" / "run" / "checkpoints"
    assert sorted(p.name for p in root.glob("step-*")) == ["step-000003", "step-000006", "step-000009"]
    (root / "step-000009" / "meta.json").unlink()  # missing
    weights = root / "step-000006" / "fake_weights.bin"
    weights.write_bytes(weights.read_bytes()[:-8])  # truncated
    done = runs.finish([*runs.command("run", tmp_path, **values), "--resume", "--plain"], tmp_path)
    log = (tmp_path / "runs" / "run" / "logs" / "trainer.log").read_text()
    assert "step-000009" in log and "step-000006" in log and "resumed from" in log, done.stderr
    assert lives(tmp_path)[-1]["step"] == 3
    assert [r["weights"] for r in account(tmp_path)] == [r["weights"] for r in account(undisturbed)]


def test_a_trainer_that_was_stopped_while_another_resumed_its_run_changes_nothing(tmp_path: Path, undisturbed: Path):
    values = {**EXACT, **SLOW}
    with EmbeddedRedis(tmp_path / "redis", max_mb=256) as server, surviving_producers(tmp_path, server.url, **values):
        zombie_cmd = runs.command("trainer", tmp_path, "--redis", server.url, **values)
        with runs.running(zombie_cmd, tmp_path) as zombie:
            runs.wait_for(lambda: len(runs.rows(tmp_path)) >= 5, "step 5")
            os.kill(zombie.pid, signal.SIGSTOP)
            resumed = runs.command("trainer", tmp_path, "--redis", server.url, "--resume", **values)
            with runs.running(resumed, tmp_path) as successor:
                runs.wait_for(
                    lambda: len(lives(tmp_path)) == 2 and len(account(tmp_path)) >= 7, "the successor's steps"
                )
                os.kill(zombie.pid, signal.SIGCONT)
                assert zombie.wait(60) not in (0, None)
                assert successor.wait(runs.DEADLINE_S) == 0
            assert zombie.stdout is not None
            assert "owns the run" in zombie.stdout.read()
    mine = account(tmp_path)
    assert {row["incarnation"] for row in mine if row["step"] >= lives(tmp_path)[1]["step"]} == {2}
    assert [row["weights"] for row in mine] == [row["weights"] for row in account(undisturbed)]
    assert len(runs.rows(tmp_path)) == STEPS
