"""The trainer's sign of life, in a thread of its own, which also learns first that the run has a newer trainer."""

from __future__ import annotations

import logging
import threading

from redis.exceptions import RedisError

from rollout_queue.errors import QueueError
from rollout_queue.queue import TrainerQueue

log = logging.getLogger(__name__)

EVERY_S = 2.0
TTL_S = 10.0


class Heartbeat:
    """Beats until closed; `check` raises what ended it (Fenced, ConnectionRefused) in the caller's thread."""

    def __init__(self, queue: TrainerQueue) -> None:
        self._queue = queue
        self._stop = threading.Event()
        self._error: QueueError | RedisError | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self.beat()
        self._thread.start()

    def beat(self) -> None:
        """Beat now, in the caller's thread: raises Fenced at once when the run has a newer trainer."""
        self._queue.heartbeat(TTL_S)

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            try:
                self.beat()
            except (QueueError, RedisError) as error:
                self._error = error
                return

    def check(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._thread.is_alive() and not self._stop.is_set():
            raise RuntimeError("the heartbeat thread ended without an error")

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=TTL_S)
