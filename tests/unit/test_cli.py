"""The command line as people meet it: exit codes, and one line for every failure."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbehind.cli import build_parser, describe, main
from nbehind.commands import what_to_run
from nbehind.errors import ConfigError, ServiceDied, exit_code_of
from nbehind.logs import setup_logging
from nbehind.process import PARENT_VARIABLE, describe_exit, last_lines, service_env
from producer_svc.errors import RewardError
from rollout_queue.errors import ConnectionRefused
from trainer_svc.errors import CheckpointError, DataError

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("run", "demo", "producer", "trainer", "model", "config", "report", "status", "dead")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(argv)
    out = capsys.readouterr()
    assert out.out == ""
    return code, out.err


def write(folder: Path, text: str) -> str:
    path = folder / "a.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    "argv", [[], ["dance"], ["run", "--nope"], ["producer"], ["producer", "x", "--index", "-1"], ["report"]]
)
def test_bad_usage_is_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_one_line_a_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    options = capsys.readouterr().out.partition("options:")[2].strip("\n").splitlines()
    assert len(options) >= 1
    assert all(re.match(r"  -\S", line) and len(line) <= 130 for line in options), options


def test_config_prints_what_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--set", "run.seed=5"]) == 0
    first = capsys.readouterr().out
    assert "seed = 5" in first
    assert main(["config", write(tmp_path, first)]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize("command", ["run", "trainer", "producer", "model", "config"])
def test_a_bad_config_is_2_with_a_line_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    file = write(tmp_path, "[run]\nmax_step = 3\nseed = -1\n")
    code, err = error_of(capsys, command, file)
    assert code == 2
    assert err.splitlines() == [
        f"nbehind {command}: error: {file}: unknown key run.max_step; did you mean run.max_steps?",
        f"nbehind {command}: error: {file}: run.seed = -1: must be a whole number ≥ 0 and < 2147483648",
    ]


def test_a_missing_config_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = error_of(capsys, "run", str(tmp_path / "none.toml"))
    assert (code, err.count("\n")) == (2, 1)
    assert "no such file" in err
    code, err = error_of(capsys, "run")
    assert (code, "give the config file" in err) == (2, True)


@pytest.mark.parametrize("command", ["run", "trainer", "producer"])
def test_a_password_on_the_command_line_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    code, err = error_of(capsys, command, write(tmp_path, ""), "--redis", "redis://:hunter2@127.0.0.1:1")
    assert code == 2
    assert "NBEHIND_REDIS_PASSWORD" in err
    assert "hunter2" not in err


@pytest.mark.parametrize("command", ["run", "trainer", "producer"])
def test_a_redis_that_is_not_there_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, err = error_of(
        capsys, command, write(tmp_path, f'[run]\ndir = "{tmp_path}"\n'), "--redis", "redis://127.0.0.1:1"
    )
    assert code == 2
    assert err.splitlines()[-1].startswith(f"nbehind {command}: error: Redis at 127.0.0.1:1 cannot be used")


def test_a_service_without_a_redis_says_what_to_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = error_of(capsys, "producer", write(tmp_path, f'[run]\nname = "x"\ndir = "{tmp_path}"\n'))
    assert code == 2
    assert "no Redis is known for run x: give --redis URL" in err


def test_report_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = error_of(capsys, "report", str(tmp_path / "none"))
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("argv", "file", "overrides", "mode"),
    [
        (["a.toml"], "a.toml", [], "new"),
        (["a.toml", "--overwrite"], "a.toml", [], "overwrite"),
        (["a.toml", "--resume"], "a.toml", [], "resume"),
        (["--resume", "a.toml"], "a.toml", [], "resume"),
        (["a.toml", "--resume", "first"], "a.toml", ["run.name=first"], "resume"),
        (["a.toml", "--resume", "out/first"], "a.toml", ["run.name=first", "run.dir=out"], "resume"),
        (["--resume", "first"], "runs/first/config.toml", ["run.name=first", "run.dir=runs"], "resume"),
        (["--resume", "out/first/"], "out/first/config.toml", ["run.name=first", "run.dir=out"], "resume"),
    ],
)
def test_what_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], file: str, overrides: list[str], mode: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/first", "out/first"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.toml").write_text("")
    found = what_to_run(build_parser().parse_args(["run", *argv]))
    assert found == (Path(file), overrides, mode)


def test_resume_that_makes_no_sense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text("")
    assert error_of(capsys, "run", "a.toml", "--resume", "--overwrite")[0] == 2
    assert error_of(capsys, "run", "--resume")[0] == 2
    assert error_of(capsys, "run", "--resume", "never") == (
        2,
        "nbehind run: error: --resume never: runs/never is not the folder of a run\n",
    )
    code, err = error_of(capsys, "run", "a.toml", "--resume")
    assert (code, "leave --resume out" in err) == (2, True)
    assert not (tmp_path / "runs").exists()


def test_exit_codes_of_the_packages_errors() -> None:
    assert exit_code_of(ConfigError("x")) == 2
    assert exit_code_of(DataError("x")) == 2
    assert exit_code_of(RewardError("x")) == 2
    assert exit_code_of(CheckpointError("x")) == 1
    assert exit_code_of(ConnectionRefused("x")) == 1
    assert exit_code_of(ServiceDied("x", bad_input=True)) == 2
    assert exit_code_of(KeyboardInterrupt()) == 130


def test_errors_are_shown_as_one_line_each() -> None:
    assert (
        describe(OSError(28, "No space left on device", "/x"), "run")
        == "nbehind run: error: No space left on device: /x\n"
    )
    assert describe(CheckpointError("a\n  b"), "trainer") == "nbehind trainer: error: a b\n"
    assert describe(DataError(""), "trainer") == "nbehind trainer: error: DataError\n"
    died = ServiceDied("the trainer ended the run", ["first", "last"])
    assert describe(died, "run") == "    first\n    last\nnbehind run: error: the trainer ended the run\n"


def test_a_reader_that_leaves_is_no_traceback() -> None:
    command = f"{sys.executable} -m nbehind config --markdown | head -c 10"
    done = subprocess.run(["/bin/sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "| key | de"
    assert done.stderr == ""


def test_parsing_a_config_imports_nothing_heavy() -> None:
    code = (
        "import sys, nbehind.cli, nbehind.launch; nbehind.cli.main(['config']); "
        "print([m for m in ('torch', 'vllm', 'transformers', 'ray', 'matplotlib') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == "[]\n"


def test_log_lines_have_time_level_service(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("producer-0")
    logging.getLogger("producer_svc.service").info("hello %d", 3)
    logging.getLogger("somebody.else").info("not shown")
    logging.getLogger("somebody.else").warning("shown")
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", "", line) for line in lines] == [
        "INFO producer-0: hello 3",
        "WARNING producer-0: shown",
    ]


def test_the_environment_of_a_service() -> None:
    env = service_env(3, {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "64", "HF_HUB_OFFLINE": "0", "HOME": "/x"})
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "3"
    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert (env["HF_HUB_OFFLINE"], env["HOME"]) == ("0", "/x")
    assert env[PARENT_VARIABLE] == str(os.getpid())


def test_exits_in_words() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-15) == "killed by SIGTERM"
    assert describe_exit(-9).startswith("killed by SIGKILL (often the kernel's out-of-memory killer")
    assert describe_exit(-99) == "killed by signal 99"


def test_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert last_lines(path, 3) == []
    path.write_bytes(b"")
    assert last_lines(path, 3) == []
    path.write_bytes(b"one\r\n\x1b[31mred\x1b[0m\n\n  0%\r 50%\r100%\n\xff\xfe bad\nlast without end")
    assert last_lines(path, 3) == ["100%", "\ufffd\ufffd bad", "last without end"]
    assert last_lines(path, 9)[:2] == ["one", "red"]
    assert last_lines(path, 9, start=path.stat().st_size - 3) == ["end"]
    path.write_bytes(b"x" * 1_000_000 + b"\nend\n")
    assert last_lines(path, 1) == ["end"]
