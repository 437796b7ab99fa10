"""Real runs for tests: `nbehind run` with the fake policy as a child process, and what is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEADLINE_S = 120.0
FAKE = {
    "model.path": "fake",
    "trainer.engine": "fake",
    "trainer.lr": 2.0,
    "producer.backend": "fake",
    "producer.lease_s": 2.0,
    "sampling.groups_per_step": 4,
    "sampling.num_generations": 4,
    "sampling.max_new_tokens": 16,
    "checkpoint.every_steps": 5,
    "run.max_steps": 10,
    "run.drain_s": 5.0,
}


def command(what: str, folder: Path, *arguments: str, **values: object) -> list[str]:
    """`nbehind WHAT` on an empty config with the fake policy; `run__max_steps=3` sets run.max_steps."""
    config = folder / "empty.toml"
    if not config.exists():
        config.write_text("")
    settings = {"run.dir": str(folder / "runs"), **FAKE, **{k.replace("__", "."): v for k, v in values.items()}}
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    return [sys.executable, "-m", "nbehind", what, str(config), *sets, *arguments]


def environment() -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")]))
    return {**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def finish(cmd: list[str], folder: Path, code: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Run to the end."""
    done = subprocess.run(cmd, cwd=folder, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S)
    assert code is None or done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@contextmanager
def running(cmd: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A child in a session of its own, which is killed as a whole in the end."""
    child = subprocess.Popen(
        cmd, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield child
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(DEADLINE_S)
        assert child.stdout is not None
        child.stdout.close()


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {timeout_s:g} s")


def rows(folder: Path, run: str = "run") -> list[dict[str, Any]]:
    path = folder / "runs" / run / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def summary(folder: Path, run: str = "run") -> Mapping[str, Any]:
    return json.loads((folder / "runs" / run / "summary.json").read_text())


def processes_of(folder: Path) -> dict[int, str]:
    """pid -> command line of every live process that names `folder`, or whose environment or working directory does."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            cwd = str((entry / "cwd").readlink())
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and (str(folder) in line or cwd.startswith(str(folder))):
            found[int(entry.name)] = line
    return found


def check_conservation(result: Mapping[str, Any]) -> None:
    resolved = result["trained"] + result["filtered"] + result["dead_lettered"] + result["open"]
    assert result["issued"] == resolved
