"""What the live view shows, gathered from the run folder and from Redis. Nothing here waits or draws."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from redis.exceptions import RedisError

from rollout_queue.errors import QueueError
from rollout_queue.messages import RunState

log = logging.getLogger(__name__)

KEPT_ROWS = 512
ETA_STEPS = 20  # newest steps that the ETA is taken from
PROBE_S = 1.0
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ServiceLine:
    """One service of the run: `state` in words, and the last line of its log."""

    name: str
    state: str
    last_line: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """Everything that is drawn at one moment."""

    run: str
    phase: str
    total_steps: int  # 0 = not known
    rows: Sequence[Row] = ()  # newest last
    producers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    services: Sequence[ServiceLine] = ()
    problem: str = ""


class MetricsTail:
    """The newest rows of metrics.jsonl, read piece by piece. A replaced or shortened file is read again from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0
        self._partial = b""
        self.rows: deque[Row] = deque(maxlen=KEPT_ROWS)
        self.bad_lines = 0

    def read(self) -> None:
        """Take in what was added since the last call."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._restart(status.st_ino)
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        self._offset += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._take(line)

    def _restart(self, inode: int) -> None:
        self._inode, self._offset, self._partial = inode, 0, b""
        self.rows.clear()

    def _take(self, line: bytes) -> None:
        row = parse_row(line)
        if row is not None:
            self.rows.append(row)
        elif line.strip():
            self.bad_lines += 1


def parse_row(line: bytes | str) -> Row | None:
    """A line of metrics.jsonl, None if it is not one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and number(row, "step") is not None else None


def number(row: Row, *path: str) -> float | None:
    """row[path[0]][path[1]]… if it is a finite or infinite number, None if it is missing or anything else."""
    value: Any = row
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    try:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    except OverflowError:  # JSON allows whole numbers of any length
        return None


def eta_s(rows: Sequence[Row], total_steps: int) -> float | None:
    """Seconds to the end by the pace of the newest steps; None if it cannot be told."""
    recent = [
        (t, s)
        for r in list(rows)[-ETA_STEPS:]
        if (t := number(r, "t")) is not None and (s := number(r, "step")) is not None
    ]
    if total_steps <= 0 or len(recent) < 2:
        return None
    (t_first, first), (t_last, last) = recent[0], recent[-1]
    if last <= first or t_last < t_first:
        return None
    return (t_last - t_first) / (last - first) * max(0.0, total_steps - 1 - last)


def tokens_per_s(rows: Sequence[Row]) -> float | None:
    """Completion tokens trained per second over the newest steps."""
    recent = list(rows)[-ETA_STEPS:]
    tokens = sum(number(r, "tokens") or 0 for r in recent)
    seconds = sum(number(r, "seconds", "total") or 0 for r in recent)
    return tokens / seconds if seconds > 0 else None


class RunQueue(Protocol):
    """What the probe asks of the queue."""

    def state(self) -> RunState: ...

    def producers(self) -> Mapping[str, Mapping[str, str]]: ...


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The newest answer of Redis. `error` is set while it does not answer."""

    producers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    ended: str = ""
    error: str = ""


class Probe:
    """Asks Redis once a second, in a thread of its own, so that a slow server never holds up the supervisor."""

    def __init__(self, connect: Callable[[], RunQueue], period_s: float = PROBE_S) -> None:
        self._connect = connect
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="probe", daemon=True)
        self.result = ProbeResult()

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """End the thread; one that hangs in a call is left behind as a daemon."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def current(self) -> ProbeResult:
        """The newest answer; says so if the thread has died, which only a bug can cause."""
        if self._thread.ident is not None and not self._thread.is_alive() and not self._stop.is_set():
            return ProbeResult(
                ended=self.result.ended, error="the live view no longer hears from Redis (its thread died)"
            )
        return self.result

    def run_ended(self) -> bool:
        """Has the trainer declared the end, as far as is known?"""
        return bool(self.result.ended)

    def _loop(self) -> None:
        queue: RunQueue | None = None
        while not self._stop.wait(self._period_s):
            try:
                queue = queue or self._connect()
                self.result = ProbeResult(queue.producers(), queue.state().ended)
            except (QueueError, RedisError) as error:
                queue = None
                if not self.result.error:
                    log.warning("live view: %s", error)
                self.result = ProbeResult(ended=self.result.ended, error=str(error))
