"""The queue in one process, with the meaning of redis_queue.py: for tests, and for a trainer and producers in threads.

`MemoryBroker` (memory_broker.py) stands for the server, `MemoryQueue` for one service's connection to it. Messages pass through the same
codec as on Redis, so what cannot travel fails here too.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence

from rollout_queue.codec import decode_group, decode_header, encode_group, encode_request
from rollout_queue.errors import Fenced, MessageError, OutOfMemory, QueueError, TooLarge
from rollout_queue.heartbeat import HeartbeatArguments
from rollout_queue.keys import Keys
from rollout_queue.memory_broker import Entry, MemoryBroker, OpenMark
from rollout_queue.messages import (
    CommitResult,
    DeadLetter,
    DeadNotice,
    Group,
    GroupHeader,
    Lease,
    OpenState,
    Request,
    RequestId,
    RunState,
)


class MemoryQueue(HeartbeatArguments):
    """TrainerQueue and ProducerQueue on a MemoryBroker; thread-safe (see queue.py for what every call promises)."""

    def __init__(
        self,
        broker: MemoryBroker | None = None,
        lease_s: float = 10.0,
        max_attempts: int = 3,
        max_body_bytes: int = 256 * 2**20,
    ) -> None:
        self.broker = broker or MemoryBroker()
        self._lease_s = lease_s
        self._max_attempts = max_attempts
        self._max_body_bytes = max_body_bytes
        self._keys = Keys("memory")
        self._incarnation, self._published, self._floor, self._last = 0, -1, 0, 0
        self._refused_seen = 0
        self.malformed = 0

    # ------------------------------------------------------------------------------------------------ trainer

    def claim(self, at_least: int) -> int:
        broker = self.broker
        with broker.changed:
            self._incarnation = broker.incarnation = max(broker.incarnation + 1, at_least)
            self._published, self._floor, self._last = -1, 0, 0
            broker.published, broker.floor, broker.ended = -1, 0, ""
            broker.open = {key: known for key, known in broker.open.items() if known.state in ("delivered", "dead")}
            broker.requests.clear()
            broker.changed.notify_all()
            return self._incarnation

    def state(self) -> RunState:
        broker = self.broker
        with broker.changed:
            alive = broker.is_alive(self._keys.trainer_alive)
            return RunState(broker.incarnation, broker.published, broker.floor, broker.ended, alive)

    def announce(self, published: int) -> None:
        with self.broker.changed:
            self._published = max(self._published, published)
            self._guard()

    def raise_floor(self, floor: int) -> Mapping[RequestId, int]:
        with self.broker.changed:
            self._floor = max(self._floor, floor)
            self._guard()
            begun = ("leased", "delivered")
            return {key: known.start_version for key, known in self.broker.open.items() if known.state in begun}

    def issue(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.incarnation != self._incarnation:
                raise ValueError(
                    f"request {request.id} is of incarnation {request.incarnation}, not {self._incarnation}"
                )
        encoded = [(request, encode_request(request)) for request in requests]
        broker = self.broker
        with broker.changed:
            self._guard()
            for request, data in encoded:
                broker.issue(request, data)
            broker.changed.notify_all()

    def poll(self, block_s: float, count: int = 64) -> list[GroupHeader | DeadNotice]:
        deadline = time.monotonic() + block_s
        with self.broker.changed:
            while True:
                self._guard()
                fresh = [entry for entry in sorted(self.broker.rollouts) if entry > self._last][:count]
                out = []
                for entry in fresh:
                    self._last = entry
                    delivery = self._delivery(entry)
                    if delivery is not None:
                        out.append(delivery)
                left = deadline - time.monotonic()
                if out or left <= 0:
                    return out
                self.broker.changed.wait(left)

    def fetch(self, headers: Sequence[GroupHeader]) -> list[Group | None]:
        return [self._fetch_one(header) for header in headers]

    def census(self) -> Mapping[RequestId, OpenState]:
        with self.broker.changed:
            return {key: _open_state(known) for key, known in self.broker.open.items()}

    def release(self, headers: Iterable[GroupHeader | DeadNotice]) -> None:
        broker = self.broker
        with broker.changed:
            self._guard()
            for item in headers:
                entry = int(item.entry)
                attempt = -1
                broker.rollouts.pop(entry, None)
                if isinstance(item, GroupHeader):
                    attempt = item.attempt
                    broker.bodies.pop(item.body_key, None)
                known = broker.open.get(item.id)
                resolved = known and known.incarnation == item.incarnation and known.state in ("delivered", "dead")
                if known and resolved and (known.attempt == attempt or known.entry == entry):
                    del broker.open[item.id]

    def memory_full(self) -> bool:
        with self.broker.changed:
            before, self._refused_seen = self._refused_seen, self.broker.refused
            return self._refused_seen > before

    def withdraw(self, ids: Iterable[RequestId]) -> None:
        broker = self.broker
        with broker.changed:
            self._guard()
            for request_id in ids:
                known = broker.open.get(request_id)
                if known:
                    broker.forget(request_id)
                    broker.bodies.pop(self._keys.body(request_id, known.incarnation, known.attempt), None)

    def finish(self, reason: str) -> None:
        with self.broker.changed:
            self._guard()
            self.broker.ended = reason or "ended"
            self.broker.changed.notify_all()

    def dead_letters(self, count: int = 100) -> list[DeadLetter]:
        """The newest `count` dead letters, newest first."""
        with self.broker.changed:
            return list(self.broker.dead)[::-1][:count]

    def requeue(self, letter: DeadLetter, item_id: str) -> bool:
        with self.broker.changed:
            found = [known for known in self.broker.dead if known.entry == letter.entry]
            for known in found:
                self.broker.dead.remove(known)
                self.broker.requeued.append(f"{letter.entry} {item_id}")
            return bool(found)

    def requeued(self) -> list[str]:
        with self.broker.changed:
            return list(self.broker.requeued)

    def forget_requeued(self, marks: Iterable[str]) -> None:
        gone = set(marks)
        with self.broker.changed:
            self.broker.requeued = [mark for mark in self.broker.requeued if mark not in gone]

    # ----------------------------------------------------------------------------------------------- producer

    def lease(self, owner: str, version: int, free: int, block_s: float, incarnation: int = 0) -> list[Lease]:
        deadline = time.monotonic() + block_s
        broker = self.broker
        with broker.changed:
            while free > 0:
                if incarnation and broker.requests and incarnation != broker.incarnation:
                    return []
                leases = [] if broker.ended else broker.take(owner, version, free, self._lease_s)
                left = deadline - time.monotonic()
                if leases or broker.ended or left <= 0 or broker.needs_newer(version, self._lease_s):
                    return leases
                broker.changed.wait(left)
        return []

    def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        with self.broker.changed:
            lost = []
            for lease in leases:
                known = self._held(lease)
                if known is None or known.state not in ("leased", "delivered"):
                    lost.append(lease)
                else:
                    known.renewed_at = self.broker.clock()
            return lost

    def commit(self, lease: Lease, group: Group) -> CommitResult:
        request = lease.request
        if (group.id, group.incarnation, group.attempt) != (request.id, request.incarnation, request.attempt):
            raise ValueError(
                f"group {group.id} of attempt {group.attempt} is no answer to {request.id} of {request.attempt}"
            )
        header, body = encode_group(group)
        if len(body) > self._max_body_bytes:
            raise TooLarge(
                f"group {group.id} has {len(body)} bytes, more than redis.max_body_mb allows ({self._max_body_bytes} bytes)"
            )
        broker = self.broker
        with broker.changed:
            known = self._held(lease)
            if known and known.state == "delivered":
                return CommitResult.DUP
            if broker.incarnation > group.incarnation:
                return CommitResult.FENCED
            anyone = broker.open.get(group.id)
            if anyone is None or anyone.state == "dead":
                return CommitResult.GONE
            if known is None or known.state != "leased":
                return CommitResult.FENCED
            if broker.max_bytes is not None and sum(map(len, broker.bodies.values())) + len(body) > broker.max_bytes:
                broker.refused += 1
                raise OutOfMemory(f"the queue is full ({broker.max_bytes} bytes)")
            broker.bodies[self._keys.body(group.id, group.incarnation, group.attempt)] = body
            broker.deliver(known, Entry(group.id, group.incarnation, group.attempt, data=header))
            known.state = "delivered"
            return CommitResult.OK

    def give_back(self, lease: Lease, failure: str = "") -> None:
        broker = self.broker
        with broker.changed:
            known = self._held(lease)
            if known is None or known.state != "leased":
                return
            known.failures += bool(failure)
            if failure and known.failures >= self._max_attempts:
                request = lease.request
                broker.bury("request", failure, str(request.id), broker.requests[known.entry].data)
                broker.deliver(known, Entry(request.id, request.incarnation, request.attempt, reason=failure))
                known.state = "dead"
            else:
                broker.give_back(known)
            broker.changed.notify_all()

    def leave(self, owner: str) -> None:
        broker = self.broker
        with broker.changed:
            broker.alive.pop(self._keys.producer_alive(owner), None)
            broker.infos.pop(owner, None)
            for known in broker.open.values():
                if known.state == "leased" and known.owner == owner:
                    broker.give_back(known)
            broker.changed.notify_all()

    def producers(self) -> Mapping[str, Mapping[str, str]]:
        broker = self.broker
        with broker.changed:
            alive = {o: dict(i) for o, i in broker.infos.items() if broker.is_alive(self._keys.producer_alive(o))}
            broker.infos = {owner: broker.infos[owner] for owner in alive}
            return alive

    # ------------------------------------------------------------------------------------------------- pieces

    def _trainer_heartbeat(self, ttl_s: float) -> None:
        with self.broker.changed:
            self._guard()
            self.broker.alive[self._keys.trainer_alive] = self.broker.clock() + ttl_s

    def _producer_heartbeat(self, owner: str, ttl_s: float, info: Mapping[str, str]) -> None:
        with self.broker.changed:
            self.broker.alive[self._keys.producer_alive(owner)] = self.broker.clock() + ttl_s
            self.broker.infos[owner] = dict(info)

    def _guard(self) -> None:
        """Fenced if a newer trainer owns the run; restores what a flush has lost."""
        broker = self.broker
        if not self._incarnation:
            raise QueueError("claim() the run first")
        if broker.incarnation > self._incarnation:
            raise Fenced(
                f"incarnation {broker.incarnation} owns the run, this trainer has {self._incarnation} and must stop"
            )
        broker.incarnation = self._incarnation
        broker.published = max(broker.published, self._published)
        broker.floor = max(broker.floor, self._floor)

    def _held(self, lease: Lease) -> OpenMark | None:
        known = self.broker.open.get(lease.request.id)
        if known is None:
            return None
        mine = (known.owner, known.incarnation, known.attempt) == (
            lease.owner,
            lease.request.incarnation,
            lease.request.attempt,
        )
        return known if mine else None

    def _delivery(self, entry: int) -> GroupHeader | DeadNotice | None:
        item = self.broker.rollouts[entry]
        if not item.data:
            return DeadNotice(item.id, item.incarnation, item.reason, str(entry))
        try:
            header = decode_header(item.data, str(entry))
        except MessageError as error:
            self._reject(entry, item.id, error.reason, item.data)
            return None
        return dataclasses.replace(header, body_key=self._keys.body(item.id, item.incarnation, item.attempt))

    def _fetch_one(self, header: GroupHeader) -> Group | None:
        with self.broker.changed:
            body = self.broker.bodies.get(header.body_key)
        try:
            if body is None:
                raise MessageError("the body is lost", header.raw)
            return decode_group(header.raw, body)
        except MessageError as error:
            with self.broker.changed:
                self._guard()
                self._reject(int(header.entry), header.id, error.reason, header.raw)
                self.broker.bodies.pop(header.body_key, None)
            return None

    def _reject(self, entry: int, request_id: RequestId, reason: str, payload: bytes) -> None:
        if self.broker.rollouts.pop(entry, None) is not None:
            self.malformed += 1
            self.broker.bury("rollout", reason, str(request_id), payload[:256])
        known = self.broker.open.get(request_id)
        if known and known.entry == entry:
            del self.broker.open[request_id]


def _open_state(known: OpenMark) -> OpenState:
    queued = known.state == "queued"
    state = "delivered" if known.state == "dead" else known.state
    return OpenState(known.attempt, state, -1 if queued else known.start_version, known.owner)
