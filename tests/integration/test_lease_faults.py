"""A whole run with a prompt that cannot be scored, one that kills its producer, a producer that hangs, and a dead embedded Redis."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import redis

from rollout_queue.keys import Keys
from tests import runs

POISON = """
import os, pathlib
from producer_svc.reward import RewardResult

def reward(request, completion):
    if tuple(request.id) == (2, 1, 0):
        raise ValueError("no verdict on this prompt")
    deaths = pathlib.Path(os.environ["NBEHIND_TEST_DEATHS"])
    if tuple(request.id) == (4, 0, 0) and deaths.stat().st_size < 3:
        with deaths.open("a") as file:
            file.write("x")
        os._exit(9)
    return RewardResult(float(completion.text == request.payload["gt_answer"]), {})
"""


def rollouts(folder: Path) -> list[dict]:
    path = folder / "runs/run/rollouts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def log_of(folder: Path, service: str) -> str:
    return (folder / "runs/run/logs" / f"{service}.log").read_text()


def test_poison_deaths_and_a_hung_producer_cost_no_step(tmp_path: Path, monkeypatch) -> None:
    deaths = tmp_path / "deaths"
    deaths.write_text("")
    (tmp_path / "poison.py").write_text(POISON)
    monkeypatch.setenv("NBEHIND_TEST_DEATHS", str(deaths))
    values = {
        "run__max_steps": 100_000,
        "reward__name": f"{tmp_path}/poison.py:reward",
        "producer__max_attempts": 2,
        "producer__max_restarts": 5,
        "producer__lease_s": 1.0,
        "producer__fake_generate_s": 0.1,
        "metrics__rollouts_per_step": 4,
        "sync__transfer_timeout_s": 3.0,
        "trainer__reconcile_s": 1.0,
    }
    with runs.running(runs.command("run", tmp_path, **values), tmp_path) as child:
        runs.wait_for(lambda: len(runs.rows(tmp_path)) >= 8, "step 8: nothing has stopped the run")
        assert deaths.read_text() == "xxx", "the prompt has killed more producers than it may have failed tries"
        pid = hung_with_work(tmp_path)
        name = f"producer-{index_of(tmp_path, pid)}"
        seen = len(runs.rows(tmp_path))
        runs.wait_for(lambda: len(runs.rows(tmp_path)) >= seen + 5, "steps without the hung producer")
        os.kill(pid, signal.SIGCONT)
        runs.wait_for(lambda: lost(log_of(tmp_path, name)), "the woken producer finding its leases lost")
        awake = len(runs.rows(tmp_path))
        runs.wait_for(
            lambda: any(r["producer"].startswith(f"{name}.") for r in rollouts(tmp_path) if r["step"] > awake),
            "a group of the woken producer",
        )
        assert pid in runs.processes_of(tmp_path), "it was not restarted"

        (server,) = [p for p, line in runs.processes_of(tmp_path).items() if "valkey-server" in line]
        os.kill(server, signal.SIGKILL)  # the embedded one, which comes back empty
        seen = len(runs.rows(tmp_path))
        runs.wait_for(lambda: len(runs.rows(tmp_path)) >= seen + 5, "steps on the restarted Redis")
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(60) == 130
    result = runs.summary(tmp_path)
    runs.check_conservation(result)
    assert result["dead_lettered"] == 1
    trained = Counter(r["request"] for r in rollouts(tmp_path))
    assert set(trained.values()) == {1}
    assert "2.1.0" not in trained and "2.1.1" in trained, "the poison is replaced in its slot"
    assert "4.0.0" in trained, "deaths of producers are no failed tries"
    assert "no verdict on this prompt" in log_of(tmp_path, "trainer")


def lost(text: str) -> bool:
    return "is not ours any more" in text or "was answered FENCED" in text or "was answered GONE" in text


def index_of(folder: Path, pid: int) -> str:
    return runs.processes_of(folder)[pid].split("--index ")[1].split()[0]


def hung_with_work(folder: Path) -> int:
    """A producer stopped by SIGSTOP while it holds requests."""

    def stopped() -> int:
        (pid, *_) = [p for p, line in runs.processes_of(folder).items() if " producer " in line] or [0]
        if pid:
            os.kill(pid, signal.SIGSTOP)
            if f"producer-{index_of(folder, pid)}" in holders(folder):
                return pid
            os.kill(pid, signal.SIGCONT)
        return 0

    return runs.wait_for(stopped, "a producer with work")


def holders(folder: Path) -> set[str]:
    """Names of the producers that hold leases now, without what makes a life of theirs unique."""
    with redis.Redis(unix_socket_path=str(folder / "runs/run/redis/redis.sock")) as client:
        records = [raw.decode().split("|") for raw in client.hvals(Keys("run").open)]
    return {owner.split(".")[0] for _, _, state, *_, owner in records if state == "l"}
