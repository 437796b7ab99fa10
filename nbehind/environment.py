"""The environment of a service: the same whether the supervisor starts it or a person does.

supervisor, chaos ─ environment_of() ─▶ child          by hand: `nbehind producer` ─ enter() ─▶ itself, once more
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from nbehind.config import Config
from nbehind.process import PARENT_VARIABLE, service_env
from producer_svc.vllm_env import vllm_environment

ENTERED = "NBEHIND_ENTERED"  # set for the second start, so that there is no third
Kind = Literal["producer", "trainer"]


def environment_of(config: Config, kind: Kind, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """All variables of a service of that kind that this process starts."""
    threads = config.producer.threads if kind == "producer" else config.trainer.threads
    env = service_env(threads, base)
    if kind == "producer" and config.producer.backend == "vllm":
        env.update(vllm_environment(config.producer, config.model, env))
    return env


def enter(config: Config, kind: Kind, config_file: Path) -> None:
    """Start this process again in its environment, unless it is in it: some variables count at the start alone.

    It keeps its number, its parent and its place in the terminal. Nothing happens where a second start would not be the
    same: in somebody's own program, and with a `config_file` that can be read only once.
    """
    if os.environ.pop(ENTERED, "") or not (_is_own_program() and config_file.is_file()):
        return
    wanted = environment_of(config, kind)
    del wanted[PARENT_VARIABLE]
    if wanted != dict(os.environ):
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**wanted, ENTERED: "1"})  # noqa: S606


def _is_own_program() -> bool:
    """Is this `nbehind`, or `python -m nbehind`?"""
    program = Path(sys.argv[0])
    own = program.name == "nbehind" or program.resolve() == Path(__file__).with_name("__main__.py")
    return own and bool(sys.executable)
