"""Whole runs as a user starts them, with the fake policy: real processes, real Valkey, real weight channel."""

import os
import signal
from pathlib import Path

import pytest

from nbehind.embedded import EmbeddedRedis
from tests import runs


def producers(folder: Path, name: str) -> list[int]:
    """Pids of the live processes of a producer."""
    return [pid for pid, line in runs.processes_of(folder).items() if " producer " in line and name in line]


@pytest.mark.parametrize(
    ("n_behind", "order"), [(0, "strict"), (0, "ready"), (1, "strict"), (2, "ready"), (4, "ready")]
)
def test_every_bound_and_order(tmp_path: Path, n_behind: int, order: str):
    values = {"run__n_behind": n_behind, "run__order": order, "producer__fake_generate_s": 0.05}
    runs.finish(runs.command("run", tmp_path, **values, producer__fake_sigma=1.0), tmp_path)
    result = runs.summary(tmp_path)
    assert result["exit_reason"] == "done" and result["steps"] == 10
    assert result["lag_max"] <= n_behind
    assert (result["trained"], result["open"]) == (40, 0)
    runs.check_conservation(result)
    if n_behind == 0:
        assert max(r["ratio_max_dev_first"] for r in runs.rows(tmp_path)) == 0.0
    assert (tmp_path / "runs" / "run" / "report.html").exists()
    assert (tmp_path / "runs" / "run" / "final").is_dir()
    assert not runs.processes_of(tmp_path)


def test_publishing_every_other_step_keeps_the_bound(tmp_path: Path):
    runs.finish(runs.command("run", tmp_path, run__publish_every=2), tmp_path)
    assert runs.summary(tmp_path)["lag_max"] == 1
    assert [r["published"] for r in runs.rows(tmp_path)][:4] == [0, 2, 2, 4]


def test_filtered_groups_are_replaced_and_counted(tmp_path: Path):
    runs.finish(runs.command("run", tmp_path, algo__skip_zero_variance=True, trainer__lr=0.01), tmp_path)
    result = runs.summary(tmp_path)
    assert result["filtered"] > 0
    assert result["issued"] == 40 + result["filtered"]
    runs.check_conservation(result)


def test_data_that_do_not_divide_end_with_a_smaller_step(tmp_path: Path):
    values = {"run__max_steps": 0, "data__epochs": 1, "data__size": 10}
    runs.finish(runs.command("run", tmp_path, **values), tmp_path)
    result = runs.summary(tmp_path)
    assert (result["steps"], result["trained"]) == (3, 10)


def test_a_killed_producer_is_restarted_and_its_requests_are_taken_over(tmp_path: Path):
    cmd = runs.command("run", tmp_path, run__max_steps=12, producer__fake_generate_s=0.5)
    with runs.running(cmd, tmp_path) as child:
        runs.wait_for(lambda: len(runs.rows(tmp_path)) >= 3, "the third step")
        for pid in runs.wait_for(lambda: producers(tmp_path, "--index 0"), "producer 0"):
            os.kill(pid, signal.SIGKILL)
        assert child.wait(runs.DEADLINE_S) == 0
    result = runs.summary(tmp_path)
    assert (result["trained"], result["steps"], result["lag_max"]) == (48, 12, 1)
    runs.check_conservation(result)
    assert not runs.processes_of(tmp_path)


def test_a_producer_started_by_hand_joins_and_contributes(tmp_path: Path):
    cmd = runs.command(
        "run", tmp_path, run__max_steps=80, producer__count=1, producer__fake_generate_s=0.2, producer__max_requests=2
    )
    with runs.running(cmd, tmp_path) as child:
        runs.wait_for(lambda: len(runs.rows(tmp_path)) >= 3, "the third step")
        url = f"unix://{tmp_path}/runs/run/redis/redis.sock"
        late = runs.command("producer", tmp_path, "--redis", url, "--name", "late", "--index", "7")
        with runs.running(late, tmp_path) as joiner:
            assert child.wait(runs.DEADLINE_S) == 0
            assert joiner.wait(30) == 0
    names = {
        line.split('"producer": "')[1].split('"')[0]
        for line in (tmp_path / "runs/run/rollouts.jsonl").read_text().splitlines()
    }
    assert any(name.startswith("late.") for name in names), names
    assert not runs.processes_of(tmp_path)


def test_three_shells_and_two_runs_share_one_redis(tmp_path: Path):
    with EmbeddedRedis(tmp_path / "redis", max_mb=256) as server:
        cmds = []
        for name in ("one", "two"):
            values = {"run__name": name, "run__seed": len(name + name[0])}
            cmds.append(runs.command("trainer", tmp_path, "--redis", server.url, **values))
            cmds += [
                runs.command("producer", tmp_path, "--redis", server.url, "--index", str(i), **values) for i in range(2)
            ]
        with (
            runs.running(cmds[0], tmp_path) as t1, runs.running(cmds[1], tmp_path) as p1, runs.running(cmds[2], tmp_path) as p2,
            runs.running(cmds[3], tmp_path) as t2, runs.running(cmds[4], tmp_path) as p3, runs.running(cmds[5], tmp_path) as p4,
        ):  # fmt: skip
            assert [child.wait(runs.DEADLINE_S) for child in (t1, t2, p1, p2, p3, p4)] == [0] * 6
    for name in ("one", "two"):
        result = runs.summary(tmp_path, name)
        assert (result["trained"], result["lag_max"]) == (40, 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_a_checkpoint_and_leaves_nothing(tmp_path: Path, number: signal.Signals):
    cmd = runs.command("run", tmp_path, run__max_steps=500, producer__fake_generate_s=0.2)
    with runs.running(cmd, tmp_path) as child:
        runs.wait_for(lambda: len(runs.rows(tmp_path)) >= 6, "the sixth step")
        os.kill(child.pid, number)
        assert child.wait(60) == 130
    assert runs.summary(tmp_path)["exit_reason"] == "interrupted"
    steps = len(runs.rows(tmp_path))
    assert (tmp_path / "runs" / "run" / "checkpoints" / f"step-{steps:06d}" / "meta.json").exists()
    assert not runs.processes_of(tmp_path)


def test_a_killed_supervisor_leaves_no_process_behind(tmp_path: Path):
    cmd = runs.command("run", tmp_path, run__max_steps=500, producer__fake_generate_s=0.2)
    with runs.running(cmd, tmp_path) as child:
        runs.wait_for(lambda: len(runs.rows(tmp_path)) >= 2, "the second step")
        os.kill(child.pid, signal.SIGKILL)
        runs.wait_for(lambda: not runs.processes_of(tmp_path), "the end of all processes", 20)


def test_a_dead_trainer_ends_the_run_with_its_name_and_last_lines(tmp_path: Path):
    cmd = runs.command("run", tmp_path, run__max_steps=500, producer__fake_generate_s=0.2)
    with runs.running(cmd, tmp_path) as child:
        runs.wait_for(lambda: len(runs.rows(tmp_path)) >= 2, "the second step")
        (trainer,) = [pid for pid, line in runs.processes_of(tmp_path).items() if " trainer " in line]
        os.kill(trainer, signal.SIGKILL)
        assert child.wait(60) == 1
        assert child.stdout is not None
        output = child.stdout.read()
    assert "trainer" in output and "SIGKILL" in output
    assert not runs.processes_of(tmp_path)


def test_evaluations_go_beside_the_steps_and_the_best_checkpoint_is_kept(tmp_path: Path):
    values = {"checkpoint__every_steps": 2, "checkpoint__keep": 1, "eval__every_steps": 4, "eval__size": 8}
    runs.finish(runs.command("run", tmp_path, run__max_steps=16, **values), tmp_path)
    result = runs.summary(tmp_path)
    assert [r["step"] for r in result["eval"]] == [4, 8, 12, 16]
    assert all(r["samples"] == 8 and r["version_max"] >= r["step"] for r in result["eval"])
    assert result["issued"] == result["trained"] == 64  # evaluation is not part of conservation
    best = result["eval_best"]["step"]
    kept = {p.name for p in (tmp_path / "runs/run/checkpoints").glob("step-*")}
    assert kept == {f"step-{best:06d}", "step-000016"}
    assert f'"step": {best}' in (tmp_path / "runs/run/checkpoints/best.json").read_text()


@pytest.mark.parametrize(("transport", "said"), [("gloo", "over gloo"), ("auto", "over shm")])
def test_weights_go_over_the_transport_that_the_config_names(tmp_path: Path, transport: str, said: str):
    name = f"over-{transport}-{tmp_path.name}"[:60]
    runs.finish(runs.command("run", tmp_path, sync__transport=transport, run__max_steps=4, run__name=name), tmp_path)
    assert runs.summary(tmp_path, name)["steps"] == 4
    assert any(said in log.read_text() for log in (tmp_path / "runs" / name).rglob("*trainer*.log"))
    assert not list(Path("/dev/shm").glob(f"*{name.replace('-', '_')}*")), "shared memory is given back"
