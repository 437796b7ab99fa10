"""The producers' side of the queue on Redis. What must be atomic is in lua_producer.py."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from rollout_queue import scripts
from rollout_queue.codec import decode_request, encode_group_parts
from rollout_queue.errors import MessageError, QueueError, TooLarge
from rollout_queue.messages import CommitResult, Group, Lease
from rollout_queue.redis_base import RedisSide, milliseconds, text

log = logging.getLogger(__name__)

_COMMIT_TRIES = 3


class RedisProducerSide(RedisSide):
    """ProducerQueue on Redis. Thread-safe."""

    def lease(self, owner: str, version: int, free: int, block_s: float, incarnation: int = 0) -> list[Lease]:
        if not owner:
            raise ValueError("a lease needs an owner")
        deadline = time.monotonic() + block_s
        wait = None
        while free > 0:
            args = [owner, version, free, self._lease_ms, incarnation]
            over, newest, entries = self._run(scripts.LEASE, args, first=wait)
            leases = [lease for item in entries if (lease := self._as_lease(owner, *item)) is not None]
            left = deadline - time.monotonic()
            if leases or over or left <= 0:
                return leases
            # Abandoned leases make no entry, so look for them now and then.
            wait = self._waiting(self._keys.requests, text(newest), min(left, max(0.05, self._lease_ms / 2000)))
        return []

    def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        lost = []
        for owner, group in itertools.groupby(leases, key=lambda lease: lease.owner):
            mine = list(group)
            args: list[Any] = [owner]
            for lease in mine:
                request = lease.request
                args += [str(request.id), request.incarnation, request.attempt, lease.entry]
            lost += [mine[int(index)] for index in self._run(scripts.RENEW, args)]
        return lost

    def commit(self, lease: Lease, group: Group) -> CommitResult:
        request = lease.request
        if (group.id, group.incarnation, group.attempt) != (request.id, request.incarnation, request.attempt):
            raise ValueError(
                f"group {group.id} of attempt {group.attempt} is no answer to {request.id} of {request.attempt}"
            )
        header, parts = encode_group_parts(group)
        size = sum(map(len, parts))
        if size > self._max_body_bytes:
            raise TooLarge(
                f"group {group.id} has {size} bytes, more than redis.max_body_mb allows ({self._max_body_bytes} bytes)"
            )
        body_key = self._keys.body(group.id, group.incarnation, group.attempt)
        args = [str(group.id), group.incarnation, group.attempt, lease.owner, header]
        set_body = ("SET", body_key, parts, "EX", self._body_ttl_s)
        for _ in range(_COMMIT_TRIES):
            answer = text(self._run(scripts.COMMIT, args, [body_key], first=set_body))
            if answer != "NOBODY":
                break
        else:
            raise QueueError(
                f"the body of group {group.id} vanishes from Redis as soon as it is set; does something delete keys?"
            )
        result = CommitResult(answer)
        if result in (CommitResult.GONE, CommitResult.FENCED):
            self._delete([body_key])
        return result

    def give_back(self, lease: Lease, failure: str = "") -> None:
        request = lease.request
        args = [str(request.id), request.incarnation, request.attempt, lease.owner, failure, self._max_attempts]
        self._run(scripts.GIVE_BACK, args)

    def leave(self, owner: str) -> None:
        self._run(scripts.LEAVE, [owner], [self._keys.producer_alive(owner), self._keys.producer_info])

    def producers(self) -> Mapping[str, Mapping[str, str]]:
        infos: Any = self._repeat(lambda: self._client.hgetall(self._keys.producer_info))
        if not infos:
            return {}
        alive = self._values([self._keys.producer_alive(text(owner)) for owner in infos])
        stale = [owner for owner, mark in zip(infos, alive, strict=True) if mark is None]
        if stale:
            self._repeat(lambda: self._client.hdel(self._keys.producer_info, *stale))
        return {text(owner): _info(raw) for owner, raw in infos.items() if owner not in stale}

    def _producer_heartbeat(self, owner: str, ttl_s: float, info: Mapping[str, str]) -> None:
        keys = [self._keys.producer_alive(owner), self._keys.producer_info]
        self._run(scripts.PRODUCER_ALIVE, [owner, milliseconds(ttl_s), msgpack.packb(dict(info))], keys)

    def _as_lease(self, owner: str, entry: bytes, attempt: bytes, failures: bytes, raw: bytes) -> Lease | None:
        try:
            request = decode_request(raw)
        except MessageError as error:
            self._reject_request(text(entry), error.reason, raw)
            return None
        return Lease(request.with_attempt(int(attempt), int(failures)), owner, text(entry))

    def _reject_request(self, entry: str, reason: str, raw: bytes) -> None:
        log.error("request entry %s is malformed, to the dead letters: %s", entry, reason)
        found: Any = self._repeat(lambda: self._client.xrange(self._keys.requests, entry, entry))
        request_id = found[0][1].get(b"id", b"") if found else b""
        self._run(scripts.REJECT_REQUEST, [request_id, entry, reason, raw[:256]])


def _info(raw: bytes) -> Mapping[str, str]:
    try:
        info = msgpack.unpackb(raw, raw=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):
        return {}
    return {str(key): str(value) for key, value in info.items()} if isinstance(info, dict) else {}
