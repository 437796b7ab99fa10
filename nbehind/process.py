"""Child processes: each in a session of its own, its output in a bounded log file, ended together with all it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

PARENT_VARIABLE = "NBEHIND_PARENT_PID"
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)
QUIET = {
    "HF_HUB_OFFLINE": "1",  # models are folders here; nothing is looked up
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
}
LOG_MAX_BYTES = 16 * 2**20
TAIL_BYTES = 64 * 1024
PR_SET_PDEATHSIG = 1
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
HINTS = {
    signal.SIGKILL: "often the kernel's out-of-memory killer: try a lower producer.count or producer.kv_cache_gb",
    signal.SIGILL: "a library needs processor features that this machine lacks",
    signal.SIGBUS: "often a full /dev/shm",
}


def service_env(threads: int, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a service: thread counts pinned before any library reads them, byte code cached."""
    env = dict(os.environ if base is None else base)
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # costs every start of a service some 40 s of compiling
    env.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    for name, value in QUIET.items():
        env.setdefault(name, value)
    env[PARENT_VARIABLE] = str(os.getpid())
    return env


def die_with_parent() -> bool:
    """SIGTERM this process, once, when the supervisor that started it dies; without one, do nothing and return False.

    To be called first thing in the child, in its main thread. The kernel repeats the parent's death signal for every
    thread of the parent, and a second SIGTERM means "at once" here: so it sends SIGHUP, of which one becomes SIGTERM.
    The guardian ends what does not leave by itself.
    """
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if not parent.isdecimal():
        return False
    passed_on = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal passed_on
        if not passed_on:
            passed_on = True
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGHUP, pass_on)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGHUP), 0, 0, 0)
    if os.getppid() != int(parent):  # it died before the line above
        sys.exit(128 + signal.SIGTERM)
    return True


def describe_exit(code: int) -> str:
    """`exit code 1` or `killed by SIGKILL (hint)`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"killed by signal {-code}"
    hint = HINTS.get(number)
    return f"killed by {number.name}" + (f" ({hint})" if hint else "")


def last_lines(path: Path, count: int, start: int = 0) -> list[str]:
    """The last `count` lines with text in them from byte `start` on, without colour codes; [] if there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(min(start, size), size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = (
        CONTROL.sub("", line.rpartition("\r")[2] or line).rstrip() for line in text.replace("\r\n", "\n").split("\n")
    )
    return [line for line in lines if line][-count:]


class Child:
    """One process of the run. Its session (and process group) has its pid as number, so what it started ends with it."""

    def __init__(self, name: str, command: Sequence[str], log_file: Path, env: Mapping[str, str]) -> None:
        """Start it. OSError if the program cannot be started."""
        self.name = name
        self.log_file = log_file
        self.code: int | None = None
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as log:
            self._log_start = log.tell()
            self._popen = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )
        self.pid = self._popen.pid

    def poll(self) -> int | None:
        """None while it runs. When it has ended: kill what is left of its session, reap it, return the code."""
        if self.code is None and self._has_ended():
            self._signal_group(signal.SIGKILL)  # before reaping: until then the number cannot be another group's
            self.code = self._popen.wait()
        return self.code

    def ask_to_leave(self) -> None:
        """SIGTERM: drain and leave."""
        if self.poll() is None:
            self._popen.send_signal(signal.SIGTERM)

    def kill(self) -> int:
        """End it and everything of its session now; returns the exit code."""
        if self.poll() is None:
            self._signal_group(signal.SIGKILL)
            self.code = self._popen.wait()
        assert self.code is not None
        return self.code

    def last_lines(self, count: int) -> list[str]:
        """The newest lines of this process (not of an earlier one of that name)."""
        return last_lines(self.log_file, count, self._log_start)

    def trim_log(self, max_bytes: int = LOG_MAX_BYTES) -> None:
        """Past `max_bytes` the log becomes NAME.log.1 and begins anew; the process goes on appending to the same file."""
        with contextlib.suppress(FileNotFoundError):
            if self.log_file.stat().st_size > max_bytes:
                shutil.copyfile(self.log_file, self.log_file.with_name(self.log_file.name + ".1"))
                os.truncate(self.log_file, 0)
                self._log_start = 0

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody left (macOS says EPERM for zombies)
            os.killpg(self.pid, number)
