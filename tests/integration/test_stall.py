"""Nobody waits without a word: the watchdog says who waits for what, and ends the run."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from pathlib import Path

from nbehind.embedded import EmbeddedRedis, free_port
from tests import runs


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


def test_a_trainer_without_producers_says_so_and_gives_up(tmp_path: Path) -> None:
    port = free_port()
    values = {"run__stall_s": 1.0, "run__give_up_s": 6.0, "metrics__trainer_port": port}
    with EmbeddedRedis(tmp_path / "redis", 64) as server:
        cmd = runs.command("trainer", tmp_path, "--redis", server.url, **values)
        with runs.running(cmd, tmp_path) as trainer:
            line = runs.wait_for(lambda: get(port, "/healthz")[0] == 503 and get(port, "/healthz")[1], "a 503")
            assert "step 0 waits for 4 requests (first 0.0.0, needs version 0): 4 wait for a producer" in line
            assert "no producer is connected" in line
            _, metrics = get(port, "/metrics")
            assert float(metrics.split("\nnbehind_trainer_stalled_seconds ")[1].split()[0]) > 1.0
            assert trainer.wait(60) == 1
            assert trainer.stdout is not None
            said = trainer.stdout.read()
    warnings = [row for row in said.splitlines() if "WARNING" in row]
    assert len(warnings) == 1 and "no step for" in warnings[0], "one message, not one a second"
    assert said.splitlines()[-1].startswith("nbehind trainer: error: no step for")
    assert "run.give_up_s = 6" in said and "Traceback" not in said


def test_a_run_whose_producers_all_hang_ends_with_their_names(tmp_path: Path) -> None:
    values = {"run__max_steps": 1000, "run__stall_s": 1.0, "run__give_up_s": 25.0, "trainer__reconcile_s": 0.5}
    cmd = runs.command("run", tmp_path, producer__count=1, producer__fake_generate_s=0.3, **values)
    with runs.running(cmd, tmp_path) as child:
        runs.wait_for(lambda: len(runs.rows(tmp_path)) >= 2, "the second step")
        (pid,) = [p for p, line in runs.processes_of(tmp_path).items() if " producer " in line]
        os.kill(pid, signal.SIGSTOP)
        assert child.wait(60) == 1
        assert child.stdout is not None
        said = child.stdout.read()
    assert "the trainer ended the run: no step for" in said
    assert "at producer-0." in said or "connected: producer-0." in said
    assert runs.summary(tmp_path)["exit_reason"].startswith("error: no step for")
    assert not runs.processes_of(tmp_path)
