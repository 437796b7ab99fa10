"""The producer's clockwork thread: renews leases and the heartbeat, and watches the state of the run.

It renews only while the event loop moves: `beat` is called from the loop, and a loop that is silent for longer than
half a lease lets its leases run out, so that another producer takes over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from redis.exceptions import RedisError

from rollout_queue.errors import QueueError
from rollout_queue.messages import Lease
from rollout_queue.queue import ProducerQueue

log = logging.getLogger(__name__)

HEARTBEAT_TTL_S = 10.0
OVER_GRACE_S = 20.0  # a run that was over at our start may be about to get a new trainer


class Keeper:
    """Owns one thread. Everything that the event loop reads from it is handed over under one lock."""

    def __init__(
        self, queue: ProducerQueue, name: str, lease_s: float, give_up_s: float, info: Callable[[], Mapping[str, str]]
    ) -> None:
        self._queue = queue
        self._name = name
        self._lease_s = lease_s
        self._give_up_s = give_up_s
        self._info = info
        self._lock = threading.Lock()
        self._leases: Sequence[Lease] = ()
        self._lost: list[Lease] = []
        self._beat_at = time.monotonic()
        self._ended = ""
        self._error: QueueError | RedisError | None = None
        self._stop = threading.Event()
        self._first = queue.state()
        self._began_at = self._trainer_seen_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        if self._first.ended:
            log.info("the run has ended: waiting %g s for a trainer that takes it up again", OVER_GRACE_S)

    def start(self) -> None:
        self._thread.start()

    # --- called from the event loop
    def beat(self, leases: Sequence[Lease]) -> None:
        """The loop moves, and these are the leases to renew."""
        with self._lock:
            self._leases = list(leases)
            self._beat_at = time.monotonic()

    def take_lost(self) -> list[Lease]:
        with self._lock:
            lost, self._lost = self._lost, []
        return lost

    def ended(self) -> str:
        """Why the run is over for this producer; '' while it goes on."""
        return self._ended

    def check(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._thread.is_alive() and not self._stop.is_set():
            raise RuntimeError("the keeper thread ended without an error")

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=HEARTBEAT_TTL_S)
        if self._error is not None:
            return  # Redis is away or refuses us: leases and heartbeat run out by themselves
        try:
            self._queue.leave(self._name)
        except (QueueError, RedisError) as error:
            log.warning("could not sign off: %s", error)

    # --- the thread
    def _run(self) -> None:
        while not self._stop.wait(min(2.0, self._lease_s / 4)):
            try:
                self._round()
            except (QueueError, RedisError) as error:
                self._error = error
                return

    def _round(self) -> None:
        self._queue.heartbeat(self._name, HEARTBEAT_TTL_S, self._info())
        with self._lock:
            leases = list(self._leases)
            moving = time.monotonic() - self._beat_at < self._lease_s / 2
        if leases and moving:
            lost = self._queue.renew(leases)
            with self._lock:
                self._lost += lost
        self._watch_run()

    def _watch_run(self) -> None:
        state = self._queue.state()
        now = time.monotonic()
        if state.trainer_alive:
            self._trainer_seen_at = now
        over_before = bool(self._first.ended) and state.incarnation == self._first.incarnation
        if state.ended and (not over_before or now - self._began_at > OVER_GRACE_S):
            self._ended = "done"
        elif now - self._trainer_seen_at > self._give_up_s:
            self._ended = f"no trainer for {self._give_up_s:.0f} s (run.give_up_s)"
