"""A small process beside the supervisor: if the supervisor dies without a word, it ends the sessions of the run.

    supervisor ── pipe: "add PID", "drop PID" ──▶ guardian: at the end of the pipe, wait GRACE_S, then kill -9 what is registered

The services themselves hear of it from the kernel (process.die_with_parent) and drain, so GRACE_S is their time to save; the guardian also reaches hung or stopped ones and the processes of engines. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from types import TracebackType

GRACE_S = 5.0
CLOSE_TIMEOUT_S = 2.0


class Guardian:
    """The supervisor's end. As a context manager: started on entry, ended on exit."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(grace_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = self._popen.pid

    def add(self, session: int) -> None:
        """End this session (the pid of its leader) should the supervisor die."""
        self._say(f"add {session}\n")

    def drop(self, session: int) -> None:
        """The session has ended."""
        self._say(f"drop {session}\n")

    def close(self) -> None:
        """End the guardian. What is still registered is killed after the grace time."""
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):
            self._popen.stdin.close()
        try:
            self._popen.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def _say(self, line: str) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # someone killed it; the supervisor's own ending still holds
            self._popen.stdin.write(line.encode())
            self._popen.stdin.flush()

    def __enter__(self) -> Guardian:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def watch(lines: Iterable[str]) -> set[int]:
    """The sessions registered when the lines end."""
    sessions: set[int] = set()
    for line in lines:
        word, _, number = line.strip().partition(" ")
        if number.isdigit():
            (sessions.add if word == "add" else sessions.discard)(int(number))
    return sessions


def alive(sessions: Iterable[int]) -> list[int]:
    """Those with a process left."""
    return [s for s in sessions if _signal(s, 0)]


def _signal(session: int, number: int) -> bool:
    try:
        os.killpg(session, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def main(grace_s: float) -> None:
    """Read standard input to its end, then end what is registered."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    left = alive(watch(sys.stdin))
    deadline = time.monotonic() + grace_s
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = alive(left)
    for session in left:
        _signal(session, signal.SIGKILL)


if __name__ == "__main__":
    main(float(sys.argv[1]))
