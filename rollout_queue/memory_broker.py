"""What a Redis server holds for one run, in one process: the state behind memory_queue.py. Callers hold `changed`."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable

from rollout_queue.codec import decode_request
from rollout_queue.lua_common import DEAD_LETTERS_KEPT
from rollout_queue.messages import DeadLetter, Lease, Request, RequestId


@dataclasses.dataclass(slots=True)
class OpenMark:
    incarnation: int
    attempt: int
    state: str  # "queued" | "leased" | "delivered" | "dead"
    start_version: int  # the newest it ever began with
    failures: int
    entry: int
    owner: str = ""
    renewed_at: float = 0.0  # broker's clock; -inf once given back
    fresh: bool = True  # never leased: in the queue, not among the abandoned


@dataclasses.dataclass(slots=True)
class Entry:
    id: RequestId
    incarnation: int
    attempt: int
    min_version: int = 0
    data: bytes = b""  # request, or header of a group; b"" for a dead notice
    reason: str = ""


class MemoryBroker:
    """What a Redis server would hold for one run. `clock` (seconds) drives leases and heartbeats."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_bytes: int | None = None) -> None:
        self.clock = clock
        self.max_bytes = max_bytes
        self.changed = threading.Condition(threading.RLock())
        self.entries = itertools.count(1)
        self.dead: deque[DeadLetter] = deque(maxlen=DEAD_LETTERS_KEPT)
        self.flush()

    def flush(self) -> None:
        """Lose everything, as a flushed server does."""
        with self.changed:
            self.incarnation, self.published, self.floor, self.ended = 0, -1, 0, ""
            self.open: dict[RequestId, OpenMark] = {}
            self.requests: dict[int, Entry] = {}
            self.rollouts: dict[int, Entry] = {}
            self.bodies: dict[str, bytes] = {}
            self.alive: dict[str, float] = {}
            self.infos: dict[str, dict[str, str]] = {}
            self.refused = 0  # groups, for want of memory
            self.dead.clear()
            self.requeued: list[str] = []

    def is_alive(self, name: str) -> bool:
        return self.alive.get(name, float("-inf")) > self.clock()

    def bury(self, kind: str, reason: str, request_id: str, payload: bytes) -> None:
        self.dead.append(DeadLetter(str(next(self.entries)), kind, reason, request_id, payload))

    def forget(self, request_id: RequestId) -> None:
        """Drop the open mark and the entry that it points to."""
        known = self.open.pop(request_id)
        self.requests.pop(known.entry, None)
        self.rollouts.pop(known.entry, None)

    def issue(self, request: Request, data: bytes) -> None:
        known = self.open.get(request.id)
        start_version = -1
        if known is not None:
            if (known.incarnation, known.attempt) >= (request.incarnation, request.attempt):
                return
            if known.incarnation == request.incarnation:
                start_version = known.start_version
            self.forget(request.id)
        entry = next(self.entries)
        self.requests[entry] = Entry(request.id, request.incarnation, request.attempt, request.min_version, data)
        self.open[request.id] = OpenMark(
            request.incarnation, request.attempt, "queued", start_version, request.failures, entry
        )

    def take(self, owner: str, version: int, free: int, lease_s: float) -> list[Lease]:
        """What can start now: abandoned leases first, then new requests in order up to the first that must wait."""
        abandoned, fresh = self._free(lease_s)
        chosen = [known for known in abandoned if self.may_begin(known, version)]
        chosen += itertools.takewhile(lambda known: self.may_begin(known, version), fresh)
        return [self._lease_one(known, owner, version) for known in chosen[:free]]

    def needs_newer(self, version: int, lease_s: float) -> bool:
        """Would newer weights have given `take` more?"""
        abandoned, fresh = self._free(lease_s)
        return not all(self.may_begin(known, version) for known in [*abandoned, *fresh[:1]])

    def _free(self, lease_s: float) -> tuple[list[OpenMark], list[OpenMark]]:
        """Abandoned and fresh requests, in order."""
        abandoned, fresh = [], []
        for entry in sorted(self.requests):
            known = self.open[self.requests[entry].id]
            if known.fresh:
                fresh.append(known)
            elif known.renewed_at + lease_s <= self.clock():
                abandoned.append(known)
        return abandoned, fresh

    def may_begin(self, known: OpenMark, version: int) -> bool:
        return version >= max(self.floor, known.start_version, self.requests[known.entry].min_version)

    def _lease_one(self, known: OpenMark, owner: str, version: int) -> Lease:
        known.attempt += known.state == "leased"
        known.state, known.fresh, known.owner, known.start_version = "leased", False, owner, version
        known.renewed_at = self.clock()
        request = decode_request(self.requests[known.entry].data)
        return Lease(request.with_attempt(known.attempt, known.failures), owner, str(known.entry))

    def give_back(self, known: OpenMark) -> None:
        known.attempt += 1
        known.state, known.owner, known.renewed_at = "queued", "", float("-inf")

    def deliver(self, known: OpenMark, item: Entry) -> None:
        del self.requests[known.entry]
        known.entry = next(self.entries)
        self.rollouts[known.entry] = item
        self.changed.notify_all()
