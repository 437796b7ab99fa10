"""Checkpoints in the background: the step goes on while a copy of the state is written.

trainer thread: begin(copy of the state) ─▶ … steps … ─▶ finished() ─▶ what the checkpoint covers is released
own thread:                └▶ write ─▶ fsync ─▶ guard ─▶ rename ─▶ prune
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_svc import checkpoint

log = logging.getLogger(__name__)

TELL_S = 60.0  # between two lines about checkpoints that were saved, so that logs stay small


@dataclass(slots=True)
class _Job:
    step: int
    thread: threading.Thread
    error: BaseException | None = None


class Saver:
    """At most one checkpoint at a time. `guard` raises when this trainer may not write any more (fencing)."""

    def __init__(self, root: Path, keep: int, guard: Callable[[], None]) -> None:
        self.root = root
        self._keep = keep
        self._guard = guard
        self._job: _Job | None = None
        self._told_at = float("-inf")
        self.protected: set[int] = set()  # steps that pruning leaves alone

    @property
    def busy(self) -> bool:
        return self._job is not None

    def begin(self, step: int, write: Callable[[Path], None], meta: Mapping[str, Any]) -> None:
        """Start to write root/step-<step>; `write` must not look at anything that changes."""
        assert self._job is None, "one checkpoint at a time: ask finished() first"
        job = _Job(step, threading.Thread(target=lambda: self._save(job, write, meta), name=f"checkpoint {step}"))
        self._job = job
        job.thread.start()

    def finished(self, wait: bool = False) -> int | None:
        """The step of a checkpoint that has become durable since the last call, if any. Raises what kept it from that."""
        job = self._job
        if job is None or (job.thread.is_alive() and not wait):
            return None
        job.thread.join()
        self._job = None
        if job.error is not None:
            raise job.error
        return job.step

    def prune(self) -> None:
        """Delete what is neither among the newest nor protected. Not while a save runs in another thread."""
        checkpoint.prune(self.root, self._keep, self.protected)

    def close(self) -> None:
        """Let a running save end; its error is only logged."""
        try:
            self.finished(wait=True)
        except Exception as error:  # noqa: BLE001 - the caller is already on its way out
            log.error("the last checkpoint failed: %s", error)

    def _save(self, job: _Job, write: Callable[[Path], None], meta: Mapping[str, Any]) -> None:
        start = time.monotonic()
        try:
            checkpoint.save(self.root, job.step, write, meta, self._guard)
            self.prune()
            self._tell(job.step, time.monotonic() - start)
        except BaseException as error:  # noqa: BLE001 - raised again in the trainer's thread by finished()
            job.error = error

    def _tell(self, step: int, seconds: float) -> None:
        due = time.monotonic() - self._told_at >= TELL_S
        self._told_at = time.monotonic() if due else self._told_at
        log.log(logging.INFO if due else logging.DEBUG, "checkpoint of step %d saved in %.2f s", step, seconds)
