"""The supervisor with stand-in services: real processes, real signals, a real embedded Redis."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from nbehind.config import Config
from nbehind.config_load import config_of
from nbehind.embedded import EmbeddedRedis
from nbehind.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, InputError, ServiceDied
from nbehind.guardian import Guardian
from nbehind.launch import CommandsOf, RunOptions, launch
from nbehind.process import Child, service_env
from nbehind.run_folder import RunFolder, open_run_folder
from nbehind.services import open_client
from nbehind.supervisor import ServiceCommands

ROOT = Path(__file__).resolve().parents[2]

# A service that does what its flags say and writes down what happens to it.
SERVICE = r"""
import json, os, signal, subprocess, sys, time
from nbehind.process import die_with_parent

die_with_parent()
role, folder, flags = sys.argv[1], sys.argv[2], dict(f.split("=", 1) for f in sys.argv[3:])

def event(what):
    with open(os.path.join(folder, "events"), "a") as file:
        file.write(f"{role} {what} {os.getpid()}\n")

def on_term(number, frame):
    event("term")
    if "ignore_term" not in flags:
        time.sleep(float(flags.get("drain", 0)))
        event("drained")
        sys.exit(int(flags.get("term_exit", 130 if role == "trainer" else 0)))

signal.signal(signal.SIGTERM, on_term)
event("start")
print(f"{role} says hello", flush=True)
if "grandchild" in flags:  # in the same session, deaf to SIGTERM, like an engine that hangs
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    event(f"grandchild {subprocess.Popen([sys.executable, '-c', code]).pid}")
for step in range(int(flags.get("steps", 0))):
    with open(os.path.join(folder, "metrics.jsonl"), "a") as file:
        row = {"step": step, "t": time.time(), "reward_mean": step / 10, "tokens": 10, "seconds": {"total": 0.1}}
        file.write(json.dumps(row) + "\n")
    time.sleep(float(flags.get("pause", 0.1)))
if "summary" in flags:
    with open(os.path.join(folder, "summary.json"), "w") as file:
        json.dump({"run": "test", "exit_reason": "done", "steps": int(flags["steps"])}, file)
if "until_end" in flags:  # as producers do: leave when the trainer has ended
    while not os.path.exists(os.path.join(folder, "summary.json")):
        time.sleep(0.05)
if "kill" in flags:
    os.kill(os.getpid(), int(flags["kill"]))
if "exit" in flags:
    print(flags["say"].replace("_", " ") if "say" in flags else f"{role} cannot go on", flush=True)
    event("end")
    sys.exit(int(flags["exit"]))
while True:
    time.sleep(0.05)
"""

# Runs `launch` with stand-in services in a process of its own, so that it can be signalled and killed.
DRIVER = """
import json, sys
from nbehind.cli import describe
from nbehind.errors import exit_code_of, expected_errors
from tests.integration.test_supervisor import commands, fake_config
from nbehind.launch import RunOptions, launch

folder, script, trainer, producer = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
from pathlib import Path
try:
    config = fake_config(Path(folder), run={"drain_s": float(sys.argv[5])})
    code = launch(config, RunOptions(plain=True), commands(Path(script), trainer, producer))
except expected_errors() as error:
    sys.stderr.write(describe(error, "run"))
    code = exit_code_of(error)
sys.exit(code)
"""


Drive = Callable[..., subprocess.Popen[str]]


def fake_config(folder: Path, **sections: Mapping[str, object]) -> Config:
    tables: dict[str, dict[str, object]] = {
        "run": {"name": "test", "dir": str(folder), "max_steps": 5, "drain_s": 3.0},
        "model": {"path": "fake"},
        "trainer": {"engine": "fake"},
        "producer": {"backend": "fake", "count": 2, "max_restarts": 1},
    }
    for name, values in sections.items():
        tables[name] = {**tables.get(name, {}), **values}
    return config_of(tables)


def commands(script: Path, trainer: Sequence[str], producer: Sequence[str]) -> CommandsOf:
    """What `launch` needs to start stand-ins with these flags."""

    def make(config: Config, folder: RunFolder, url: str, resume: bool) -> ServiceCommands:
        base = [sys.executable, str(script)]
        return ServiceCommands(
            trainer=[*base, "trainer", str(folder.path), *trainer],
            producer=lambda index: [*base, f"producer-{index}", str(folder.path), *producer],
        )

    return make


def events(folder: Path) -> list[tuple[str, str, int]]:
    """(service, what, pid), in order."""
    path = folder / "test" / "events"
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(r[0], r[1], int(r[-2] if r[1] == "grandchild" else r[-1])) for r in rows]


def pids(folder: Path) -> set[int]:
    return {pid for _, what, pid in events(folder) if what in ("start", "grandchild")}


def alive(pid: int) -> bool:
    """Does the process run? (A zombie does not.)"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = tmp_path / "service.py"
    path.write_text(SERVICE)
    return path


@pytest.fixture
def drive(tmp_path: Path, script: Path) -> Iterator[Drive]:
    """Start `launch` in a process; at the end nothing of it may be left."""
    started: list[subprocess.Popen[str]] = []

    def start(trainer: Sequence[str], producer: Sequence[str], drain_s: float = 3.0) -> subprocess.Popen[str]:
        flags = [json.dumps(trainer), json.dumps(producer), str(drain_s)]
        argv = [sys.executable, "-c", DRIVER, str(tmp_path), str(script), *flags]
        process = subprocess.Popen(argv, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    for pid in pids(tmp_path):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def assert_nothing_left(folder: Path, timeout_s: float = 10.0) -> None:
    assert pids(folder)
    wait_until(lambda: not any(alive(p) for p in pids(folder)), timeout_s)


def test_a_run_ends_in_order_and_shows_its_result(
    tmp_path: Path, script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = ["steps=5", "pause=0", "summary=1", "exit=0"]  # the last step is not shown unless one looks after the end
    producer = ["until_end=1", "exit=0", "grandchild=1"]
    assert launch(fake_config(tmp_path), RunOptions(plain=True), commands(script, trainer, producer)) == 0
    out, err = capfd.readouterr()
    assert "steps" in out
    assert "step 5/5" in err
    assert (tmp_path / "test" / "report.html").stat().st_size > 0
    assert {e[:2] for e in events(tmp_path)} >= {("producer-0", "end"), ("producer-1", "end"), ("trainer", "end")}
    assert not any(what == "term" for _, what, _ in events(tmp_path)), "everyone left by itself"
    assert "trainer says hello" in (tmp_path / "test" / "logs" / "trainer.log").read_text()
    assert not (tmp_path / "test" / "redis.url").exists()
    assert_nothing_left(tmp_path, 0)


def test_producers_that_stay_are_ended(tmp_path: Path, script: Path) -> None:
    config = fake_config(tmp_path, run={"drain_s": 0.5})
    code = launch(
        config,
        RunOptions(plain=True),
        commands(script, ["steps=1", "summary=1", "exit=0"], ["ignore_term=1", "grandchild=1"]),
    )
    assert code == 0
    assert {e[:2] for e in events(tmp_path)} >= {("producer-0", "term"), ("producer-1", "term")}
    assert_nothing_left(tmp_path, 0)


def test_a_dead_producer_is_restarted_until_restarts_are_exhausted(
    tmp_path: Path, script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ServiceDied, match=r"producer-0 ended for good, after 1 restarts .*exit code 7") as error:
        launch(fake_config(tmp_path, producer={"count": 1}), RunOptions(plain=True), commands(script, [], ["exit=7"]))
    assert error.value.log_lines[-1] == "producer-0 cannot go on"
    assert error.value.exit_code == EXIT_FAILED
    assert (
        "producer-0 died: exit code 7; restart 1 of 1 in 1 s; last line: producer-0 cannot go on"
        in capfd.readouterr().err
    )
    assert [e[:2] for e in events(tmp_path)].count(("producer-0", "start")) == 2
    assert_nothing_left(tmp_path, 0)


def test_a_producer_that_finds_its_input_bad_is_not_restarted(tmp_path: Path, script: Path) -> None:
    with pytest.raises(ServiceDied, match="producer-0 cannot start: exit code 2") as error:
        launch(fake_config(tmp_path, producer={"count": 1}), RunOptions(plain=True), commands(script, [], ["exit=2"]))
    assert error.value.exit_code == EXIT_BAD_INPUT
    assert [e[:2] for e in events(tmp_path)].count(("producer-0", "start")) == 1


@pytest.mark.parametrize(
    ("flags", "message", "code"),
    [
        (["kill=9"], r"the trainer ended the run: killed by SIGKILL \(often the kernel's out-of-memory", EXIT_FAILED),
        (["exit=1"], "the trainer ended the run: exit code 1", EXIT_FAILED),
        (["exit=2"], "the trainer ended the run: exit code 2", EXIT_BAD_INPUT),
    ],
)
def test_a_dead_trainer_ends_the_run(tmp_path: Path, script: Path, flags: list[str], message: str, code: int) -> None:
    with pytest.raises(ServiceDied, match=message) as error:
        launch(fake_config(tmp_path), RunOptions(plain=True), commands(script, flags, ["grandchild=1"]))
    assert error.value.exit_code == code
    assert error.value.log_lines[0] == "trainer says hello"
    wait_until(lambda: not any(alive(p) for p in pids(tmp_path)), 0)


def test_what_a_service_says_of_its_bad_input_is_what_is_shown(tmp_path: Path, script: Path) -> None:
    says = ["say=nbehind_trainer:_error:_data.source_=_x:_no_such_file", "exit=2"]
    with pytest.raises(ServiceDied) as error:
        launch(fake_config(tmp_path), RunOptions(plain=True), commands(script, says, []))
    log = tmp_path / "test" / "logs" / "trainer.log"
    assert (
        str(error.value) == f"the trainer ended the run: data.source = x: no such file (exit code 2; whole log: {log})"
    )
    assert error.value.log_lines == []


def test_a_program_that_cannot_be_started_leaves_nothing(tmp_path: Path, script: Path) -> None:
    def broken(config: Config, folder: RunFolder, url: str, resume: bool) -> ServiceCommands:
        good = commands(script, [], [])(config, folder, url, resume)
        return ServiceCommands(trainer=good.trainer, producer=lambda index: ["/no/such/program"])

    with pytest.raises(FileNotFoundError):
        launch(fake_config(tmp_path), RunOptions(plain=True), broken)
    wait_until(lambda: not any(alive(p) for p in pids(tmp_path)), 0)


def test_sigterm_drains_the_trainer_first(tmp_path: Path, drive: Drive) -> None:
    process = drive(["steps=1", "drain=0.5"], ["grandchild=1"])
    wait_until(lambda: len(pids(tmp_path)) == 5)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPTED
    assert "the trainer's state is saved" in err
    order = [e[:2] for e in events(tmp_path)]
    assert order.index(("trainer", "drained")) < order.index(("producer-0", "term"))
    assert_nothing_left(tmp_path, 0)


def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path, drive: Drive) -> None:
    process = drive(["drain=600"], ["ignore_term=1"], drain_s=600.0)
    wait_until(lambda: len(pids(tmp_path)) == 3)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: ("trainer", "term") in [e[:2] for e in events(tmp_path)])
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPTED
    assert "ended before it could save" in err
    assert ("trainer", "drained") not in [e[:2] for e in events(tmp_path)]
    assert_nothing_left(tmp_path, 0)


def test_a_trainer_that_hangs_is_killed_past_drain_s(tmp_path: Path, drive: Drive) -> None:
    process = drive(["ignore_term=1"], [])
    wait_until(lambda: len(pids(tmp_path)) == 3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=90)
    assert process.returncode == EXIT_INTERRUPTED
    assert_nothing_left(tmp_path, 0)


@pytest.mark.parametrize("stopped", [False, True], ids=["deaf", "stopped"])
def test_when_the_supervisor_is_killed_nothing_is_left(tmp_path: Path, drive: Drive, stopped: bool) -> None:
    process = drive(["ignore_term=1"], ["grandchild=1", "ignore_term=1"])
    wait_until(lambda: len(pids(tmp_path)) == 5)
    redis_pids = children_named(process.pid, "valkey-server")
    assert len(redis_pids) == 1
    if stopped:
        for pid in pids(tmp_path):
            os.kill(pid, signal.SIGSTOP)
    process.kill()
    assert_nothing_left(tmp_path, 10.0)
    wait_until(lambda: not alive(redis_pids[0]), 10.0)


@pytest.mark.parametrize(("flags", "code"), [(["exit=1"], EXIT_FAILED), (["exit=2"], EXIT_BAD_INPUT)])
def test_a_model_that_cannot_be_prepared_ends_the_run_before_it_begins(
    tmp_path: Path, script: Path, flags: list[str], code: int
) -> None:
    def with_model(config: Config, folder: RunFolder, url: str, resume: bool) -> ServiceCommands:
        model = [sys.executable, str(script), "model", str(folder.path), *flags]
        return replace(commands(script, [], [])(config, folder, url, resume), model=model)

    with pytest.raises(ServiceDied, match="the model could not be prepared: exit code") as error:
        launch(fake_config(tmp_path), RunOptions(plain=True), with_model)
    assert error.value.exit_code == code
    assert error.value.log_lines == ["model says hello", "model cannot go on"]
    assert {service for service, _, _ in events(tmp_path)} == {"model"}


def test_a_log_stays_bounded_while_it_is_written(tmp_path: Path) -> None:
    loop = "import time\nwhile True: print('x' * 999, flush=True); time.sleep(0.001)"
    child = Child("chatty", [sys.executable, "-c", loop], tmp_path / "chatty.log", service_env(1))
    try:
        for _ in range(3):
            wait_until(lambda: child.log_file.stat().st_size > 20_000)
            child.trim_log(max_bytes=20_000)
            assert child.log_file.stat().st_size < 20_000
        wait_until(lambda: child.last_lines(1) == ["x" * 999])
        assert (tmp_path / "chatty.log.1").stat().st_size > 20_000
        assert sorted(p.name for p in tmp_path.iterdir()) == ["chatty.log", "chatty.log.1"]
    finally:
        assert child.kill() == -signal.SIGKILL
    assert child.kill() == -signal.SIGKILL, "may be repeated"


def test_the_guardian_leaves_alone_what_was_dropped_and_kills_the_rest(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    kept, killed = (Child(n, sleep, tmp_path / n, service_env(1)) for n in ("kept", "killed"))
    with Guardian(grace_s=0.1) as guardian:
        guardian.add(kept.pid)
        guardian.add(killed.pid)
        guardian.drop(kept.pid)
    try:
        wait_until(lambda: killed.poll() == -signal.SIGKILL)
        assert kept.poll() is None
    finally:
        kept.kill()
        killed.kill()
    assert not alive(guardian.pid)


def test_a_redis_that_dies_again_and_again_ends_the_run(tmp_path: Path, drive: Drive) -> None:
    process = drive([], [])
    wait_until(lambda: len(pids(tmp_path)) == 3)
    dead: list[int] = []
    while process.poll() is None and len(dead) < 10:
        dead += (now := [p for p in children_named(process.pid, "valkey-server") if p not in dead])
        for pid in now:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, len(dead)) == (EXIT_FAILED, 4)
    assert "the embedded Redis died 4 times" in err
    assert_nothing_left(tmp_path, 0)


def children_named(parent: int, name: str) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = stat.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if head.partition("(")[2].startswith(name) and int(tail.split()[1]) == parent:
            found.append(int(stat.parent.name))
    return found


def test_when_the_supervisor_is_killed_the_trainer_still_saves(tmp_path: Path, drive: Drive) -> None:
    process = drive(["drain=0.5"], [])
    wait_until(lambda: len(pids(tmp_path)) == 3)
    process.kill()
    assert_nothing_left(tmp_path, 10.0)
    mine = [what for service, what, _ in events(tmp_path) if service == "trainer"]
    assert mine == ["start", "term", "drained"], "asked once: a second time would mean at once"


def test_a_dead_embedded_redis_is_started_again(tmp_path: Path, drive: Drive) -> None:
    process = drive([], [])
    wait_until(lambda: len(pids(tmp_path)) == 3)
    (first,) = children_named(process.pid, "valkey-server")
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: children_named(process.pid, "valkey-server") not in ([], [first]))
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert "the embedded Redis died and was started again (1 of 3)" in err
    assert_nothing_left(tmp_path, 0)


def test_an_unreachable_redis_is_said_before_anything_is_written(tmp_path: Path, script: Path) -> None:
    config = fake_config(tmp_path, redis={"url": "redis://127.0.0.1:1"})
    with pytest.raises(InputError, match=r"127\.0\.0\.1:1"):
        launch(config, RunOptions(plain=True), commands(script, [], []))
    assert not (tmp_path / "test").exists()


def test_a_redis_that_refuses_us_or_evicts_is_said_before_anything_is_written(tmp_path: Path, script: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis", 64, password="s3cret") as server:
        url = f"redis://127.0.0.1:{server.port}"
        config = fake_config(tmp_path, redis={"url": url})
        with pytest.raises(InputError, match="refuses the user or password") as refused:
            launch(config, RunOptions(plain=True), commands(script, [], []))
        assert "redis.password_env" in str(refused.value)
        secret = tmp_path / "password"
        secret.write_text("s3cret\n")
        config = fake_config(tmp_path, redis={"url": url, "password_file": str(secret)})
        client = open_client(config, url)
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.close()
        with pytest.raises(InputError, match="CONFIG SET maxmemory-policy noeviction"):
            launch(config, RunOptions(plain=True), commands(script, [], []))
    assert not (tmp_path / "test").exists()


def test_one_run_folder_is_for_one_run_at_a_time(tmp_path: Path) -> None:
    with open_run_folder(tmp_path / "a", "new") as folder:
        folder.config_file.write_text("")
        with (
            pytest.raises(InputError, match=f"is going on .process {os.getpid()}."),
            open_run_folder(tmp_path / "a", "overwrite"),
        ):
            pass


def test_an_earlier_run_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with open_run_folder(path, "new") as folder:
        folder.config_file.write_text("")
        folder.log_file("trainer").parent.mkdir()
    with open_run_folder(path, "new") as folder:  # it got nowhere, so the name is free
        folder.metrics.write_text('{"step": 0}\n')
        folder.summary.write_text("{}")
    with pytest.raises(InputError, match=r"--resume.*--overwrite.*--set run.name="), open_run_folder(path, "new"):
        pass
    with open_run_folder(path, "resume") as folder:
        assert folder.metrics.exists()
        assert not folder.summary.exists(), "a summary of the past must not look like this run's"
    with open_run_folder(path, "overwrite") as folder:
        assert not folder.metrics.exists()


def test_files_of_others_are_never_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("precious")
    with (
        pytest.raises(InputError, match="files that are not of a run"),
        open_run_folder(tmp_path / "thesis", "overwrite"),
    ):
        pass
    with pytest.raises(InputError, match="not the folder of a run"), open_run_folder(tmp_path / "nowhere", "resume"):
        pass
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="a file is in the way"), open_run_folder(tmp_path / "file" / "run", "new"):
        pass
