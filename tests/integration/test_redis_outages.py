"""Whole runs whose Redis is killed, flushed, demoted, full, silent or cut off: they cost generation, never the run."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from nbehind.embedded import EmbeddedRedis
from rollout_queue.connection import connect
from rollout_queue.keys import Keys
from tests import runs
from tests.proxies import Gate

KEYS = Keys("run")
RETRY_S = 28.0
NOTICED_S = 30.0
SERVICES = ("trainer", "producer-0", "producer-1")


def log_of(folder: Path, service: str) -> str:
    path = folder / "runs" / "run" / "logs" / f"{service}.log"
    return path.read_text() if path.exists() else ""


def check_history(folder: Path, groups_per_step: int = 4) -> None:
    """Every step once and in order, every request trained once, and conservation at every step."""
    rows = runs.rows(folder)
    assert [r["step"] for r in rows] == list(range(len(rows)))
    for row in rows:
        runs.check_conservation(row["counters"])
    lines = (folder / "runs/run/rollouts.jsonl").read_text().splitlines()
    trained = Counter((r["step"], r["request"]) for r in map(json.loads, lines))
    slots = [f"{s}.{i}.0" for s in range(len(rows)) for i in range(groups_per_step)]
    assert Counter(request for _, request in trained) == Counter(slots)
    assert max(r["lag_max"] for r in rows) <= 1


class TestBattered:
    def test_a_run_goes_on_whatever_happens_to_its_redis(self, tmp_path: Path) -> None:
        with EmbeddedRedis(tmp_path / "redis", 64, persistence=True) as server, Gate(server.port) as gate:
            url = f"redis://127.0.0.1:{gate.port}"
            values = {
                "run__max_steps": 100_000,
                "trainer__fake_step_s": 0.05,
                "trainer__reconcile_s": 1.0,
                "checkpoint__every_steps": 20,
                "metrics__rollouts_per_step": 4,
                "metrics__rollouts_max_mb": 64.0,
                "redis__retry_s": RETRY_S,
            }
            cmd = runs.command("run", tmp_path, "--redis", url, **values)
            by_hand = runs.command("producer", tmp_path, "--redis", url, "--name", "hand", **values)
            with runs.running(cmd, tmp_path) as child, runs.running(by_hand, tmp_path) as hand:
                runs.wait_for(lambda: len(runs.rows(tmp_path)) >= 5, "the fifth step")
                before = services_of(tmp_path)
                for fault in (flush, cut_clients, lose_groups, demote, load, die_with_aof, die_without_aof, silence):
                    fault(tmp_path, server, gate)
                    seen = len(runs.rows(tmp_path))
                    runs.wait_for(
                        lambda seen=seen: len(runs.rows(tmp_path)) >= seen + 5, f"a step after {fault.__name__}", 60
                    )
                assert services_of(tmp_path) == before, "services reconnect; none is restarted"
                check_history(tmp_path)

                server.kill()
                assert child.wait(RETRY_S + 30) == 1
                assert hand.wait(30) == 1
                assert hand.stdout is not None
                words = hand.stdout.read()
        check_history(tmp_path)
        said = log_of(tmp_path, "trainer").splitlines()[-1]
        for line in (said, words.splitlines()[-1]):
            assert f"error: Redis at 127.0.0.1:{gate.port} cannot be used" in line
            assert "is it running" in line
        for text in (words, *(log_of(tmp_path, s) for s in SERVICES)):
            assert "Traceback" not in text
        assert not runs.processes_of(tmp_path)


def services_of(folder: Path) -> set[int]:
    """Pids of trainer and producers."""
    return {p for p, line in runs.processes_of(folder).items() if " trainer " in line or " producer " in line}


def flush(folder: Path, server: EmbeddedRedis, gate: Gate) -> None:
    call(server, lambda c: c.flushall())


def cut_clients(folder: Path, server: EmbeddedRedis, gate: Gate) -> None:
    call(server, lambda c: c.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))
    call(server, lambda c: c.script_flush())
    gate.cut()


def lose_groups(folder: Path, server: EmbeddedRedis, gate: Gate) -> None:
    call(server, lambda c: (c.xgroup_destroy(KEYS.requests, "producers"), c.xgroup_destroy(KEYS.rollouts, "trainer")))


def demote(folder: Path, server: EmbeddedRedis, gate: Gate) -> None:
    call(server, lambda c: c.execute_command("REPLICAOF", "127.0.0.1", "1"))
    runs.wait_for(lambda: "read only replica" in log_of(folder, "trainer"), "the trainer's word on the replica", 30)
    call(server, lambda c: c.execute_command("REPLICAOF", "NO", "ONE"))


def load(folder: Path, server: EmbeddedRedis, gate: Gate) -> None:
    gate.loading = True
    time.sleep(1.5)
    gate.loading = False


def die_with_aof(folder: Path, server: EmbeddedRedis, gate: Gate) -> None:
    server.kill()
    time.sleep(1.0)
    server.restart()
    assert call(server, lambda c: c.exists(KEYS.run_state))


def die_without_aof(folder: Path, server: EmbeddedRedis, gate: Gate) -> None:
    server.kill()
    shutil.rmtree(server.folder / "appendonlydir")
    server.restart()


def silence(folder: Path, server: EmbeddedRedis, gate: Gate) -> None:
    """Nothing is closed, nothing comes: every service notices, and recovers when the old connections are cut."""
    sizes = {s: len(log_of(folder, s)) for s in SERVICES}
    gate.silent = True
    deadline = time.monotonic() + NOTICED_S
    for service in SERVICES:
        left = deadline - time.monotonic()
        runs.wait_for(
            lambda s=service: "trying again" in log_of(folder, s)[sizes[s] :], f"{service} noticing the silence", left
        )
    gate.cut()
    gate.silent = False


def call(server: EmbeddedRedis, action: Callable[[redis.Redis], object]) -> object:
    client = connect(server.url)
    try:
        return action(client)
    finally:
        client.close()


def test_full_memory_is_freed_and_the_run_recovers(tmp_path: Path) -> None:
    """Nothing but the retained groups can be freed: checkpoints come only at the end."""
    with EmbeddedRedis(tmp_path / "redis", 64) as server:
        values = {"run__max_steps": 120, "checkpoint__every_steps": 0, "sampling__num_generations": 64}
        cmd = runs.command("run", tmp_path, "--redis", server.url, **values, trainer__reconcile_s=1.0)
        with runs.running(cmd, tmp_path) as child:
            runs.wait_for(lambda: len(runs.rows(tmp_path)) >= 60, "step 60")
            client = connect(server.url)
            used = client.info("memory")["used_memory"]
            client.config_set("maxmemory", used - 50_000)
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                client.set("x", "y")
            assert client.exists(KEYS.trainer_alive)
            client.close()
            assert child.wait(runs.DEADLINE_S) == 0
    result = runs.summary(tmp_path)
    assert (result["trained"], result["open"], result["lag_max"]) == (480, 0, 1)
    runs.check_conservation(result)
    assert "consumed groups go before their checkpoint" in log_of(tmp_path, "trainer")
    assert "Traceback" not in "".join(log_of(tmp_path, s) for s in SERVICES)
