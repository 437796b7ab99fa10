"""The environment of a service is the same whether the supervisor or a person starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nbehind.config import Config
from nbehind.environment import ENTERED, environment_of
from nbehind.process import PARENT_VARIABLE

SERVICE = """
import json, os, sys
from pathlib import Path
import nbehind.__main__
from nbehind.config import Config
from nbehind.environment import enter
if sys.argv[3] == "own":
    sys.argv[0] = nbehind.__main__.__file__
os.environ["STARTS"] = os.environ.get("STARTS", "") + "x"
enter(Config.model_validate_json(sys.argv[1]), sys.argv[2], Path(sys.argv[4]))
print(json.dumps({"pid": os.getpid(), "env": dict(os.environ)}))
"""


def start(config: dict[str, Any], kind: str, env: dict[str, str], program: str = "own", file: str = __file__) -> Any:
    """What the service says of itself, and whether it kept its pid."""
    arguments = [sys.executable, "-c", SERVICE, json.dumps(config), kind, program, file]
    with subprocess.Popen(arguments, env=env, stdout=subprocess.PIPE) as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    said = json.loads(out)
    assert said["pid"] == process.pid
    return said["env"]


def test_a_service_started_by_hand_gets_its_environment_and_keeps_its_process() -> None:
    config = {"producer": {"threads": 3}, "trainer": {"threads": 2}}
    base = {**os.environ, "OMP_NUM_THREADS": "64", "PYTHONDONTWRITEBYTECODE": "1", "STARTS": ""}
    for kind, threads in (("producer", "3"), ("trainer", "2")):
        env = start(config, kind, base)
        assert env["OMP_NUM_THREADS"] == threads
        assert not {"PYTHONDONTWRITEBYTECODE", PARENT_VARIABLE, ENTERED} & set(env)
        assert env["STARTS"] == "xx"


def test_a_service_in_its_environment_is_not_started_again() -> None:
    config = {"producer": {"backend": "vllm"}}
    wanted = environment_of(Config.model_validate(config), "producer", {**os.environ, "STARTS": ""})
    del wanted[PARENT_VARIABLE]
    assert start(config, "producer", wanted) == {**wanted, "STARTS": "x"}


@pytest.mark.parametrize(("program", "file"), [("somebody's own", __file__), ("own", "/dev/null")])
def test_what_a_second_start_would_not_repeat_is_left_as_it_is(program: str, file: str) -> None:
    base = {**os.environ, "OMP_NUM_THREADS": "64", "STARTS": ""}
    env = start({}, "trainer", base, program, file)
    assert (env["OMP_NUM_THREADS"], env["STARTS"]) == ("64", "x")


def test_a_config_from_a_pipe_is_read_once(tmp_path: Path) -> None:
    text = f'run.name = "piped"\nrun.dir = "{tmp_path}"\n'
    process = subprocess.run(
        [sys.executable, "-m", "nbehind", "trainer", "/dev/stdin"],
        input=text, capture_output=True, text=True, timeout=60, env={**os.environ, "OMP_NUM_THREADS": "64"},
    )  # fmt: skip
    assert process.returncode == 2
    assert "no Redis is known for run piped" in process.stderr


def test_a_command_whose_streams_are_closed_ends_with_its_code() -> None:
    for streams, code in ((">&-", 0), (">&- 2>&-", 0)):
        command = f'"{sys.executable}" -m nbehind config examples/demo.toml {streams}'
        assert subprocess.run(["/bin/sh", "-c", command], stderr=subprocess.PIPE, timeout=60).returncode == code
