"""The environment of a service is the same whether the supervisor or a person starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from nbehind.config import Config
from nbehind.environment import ENTERED, environment_of
from nbehind.process import PARENT_VARIABLE

SERVICE = """
import json, os, sys
from nbehind.config import Config
from nbehind.environment import enter
before = os.environ.get("STARTS", "")
os.environ["STARTS"] = before + "x"
enter(Config.model_validate(json.loads(sys.argv[1])), sys.argv[2])
print(json.dumps({"pid": os.getpid(), "env": dict(os.environ)}))
"""


def start(config: dict[str, object], kind: str, env: dict[str, str]) -> tuple[int, dict[str, object]]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVICE, json.dumps(config), kind], env=env, stdout=subprocess.PIPE
    ) as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return process.pid, json.loads(out)


def test_a_service_started_by_hand_gets_its_environment_and_keeps_its_process() -> None:
    config: dict[str, object] = {"producer": {"threads": 3}, "trainer": {"threads": 2}}
    base = {**os.environ, "OMP_NUM_THREADS": "64", "PYTHONDONTWRITEBYTECODE": "1", "STARTS": ""}
    for kind, threads in (("producer", "3"), ("trainer", "2")):
        pid, said = start(config, kind, base)
        env = said["env"]
        assert isinstance(env, dict)
        assert said["pid"] == pid
        assert env["OMP_NUM_THREADS"] == threads
        assert "PYTHONDONTWRITEBYTECODE" not in env
        assert PARENT_VARIABLE not in env
        assert ENTERED not in env
        assert env["STARTS"] == "xx"


def test_a_service_in_its_environment_is_not_started_again() -> None:
    config: dict[str, object] = {"producer": {"backend": "vllm"}}
    wanted = environment_of(Config.model_validate(config), "producer", {**os.environ, "STARTS": ""})
    del wanted[PARENT_VARIABLE]
    _, said = start(config, "producer", wanted)
    assert said["env"] == {**wanted, "STARTS": "x"}
