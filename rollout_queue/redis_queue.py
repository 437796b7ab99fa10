"""Both sides of the queue on Redis. What must be atomic is in scripts.py; bodies travel apart from headers."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgpack
import redis
from redis.client import Pipeline

from rollout_queue import scripts
from rollout_queue.codec import decode_group, decode_header, decode_request, encode_group, encode_request
from rollout_queue.connection import MAX_BLOCK_S, repeat
from rollout_queue.errors import Fenced, MessageError, QueueError, TooLarge
from rollout_queue.keys import Keys
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

log = logging.getLogger(__name__)
T = TypeVar("T")

_STATES = {"q": "queued", "l": "leased", "d": "delivered", "x": "delivered"}
_ISSUE_BATCH = 128
_RELEASE_BATCH = 256
_FETCH_BYTES = 64 * 2**20  # bodies asked for in one command
_COMMIT_TRIES = 3


class RedisQueue:
    """TrainerQueue and ProducerQueue on one Redis (see queue.py for what every call promises).

    Thread-safe but for the trainer's `poll`, which one thread calls. `lease_s` and `max_body_bytes` in seconds and
    bytes; a lost connection is retried for `retry_s`, then ConnectionRefused is raised.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        lease_s: float,
        max_attempts: int,
        max_body_bytes: int,
        body_ttl_s: int = 86_400,
        retry_s: float = 60.0,
    ) -> None:
        self._client = client
        self._keys = keys
        self._lease_ms = max(1, round(lease_s * 1000))
        self._max_attempts = max_attempts
        self._max_body_bytes = max_body_bytes
        self._body_ttl_s = body_ttl_s
        self._retry_s = retry_s
        self._base_keys = [keys.run_state, keys.open, keys.requests, keys.rollouts, keys.dead]
        self._incarnation = 0
        self._published = -1
        self._floor = 0
        self._last = "0-0"  # newest rollout entry that poll has returned

    # ------------------------------------------------------------------------------------------------ trainer

    def claim(self, at_least: int) -> int:
        self._incarnation = int(self._run(scripts.CLAIM, [at_least]))
        self._published, self._floor, self._last = -1, 0, "0-0"
        return self._incarnation

    def state(self) -> RunState:
        def ask(pipe: Pipeline) -> None:
            pipe.hmget(self._keys.run_state, ["incarnation", "published", "floor", "ended"])
            pipe.exists(self._keys.trainer_alive)

        (inc, published, floor, ended), alive = self._read(ask)
        published = -1 if published is None else int(published)
        return RunState(int(inc or 0), published, int(floor or 0), _text(ended or b""), bool(alive))

    def announce(self, published: int) -> None:
        self._published = max(self._published, published)
        self._guarded(scripts.ANNOUNCE, [])

    def raise_floor(self, floor: int) -> Mapping[RequestId, int]:
        self._floor = max(self._floor, floor)
        records = _records(_paired(self._guarded(scripts.RAISE_FLOOR, [])))
        return {request_id: record.start_version for request_id, record in records if record.code in ("l", "d")}

    def issue(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.incarnation != self._incarnation:
                raise ValueError(
                    f"request {request.id} is of incarnation {request.incarnation}, not {self._incarnation}"
                )
        for batch in _batches(requests, _ISSUE_BATCH):
            args: list[Any] = [len(batch)]
            for request in batch:
                args += [
                    str(request.id),
                    request.attempt,
                    request.min_version,
                    request.failures,
                    encode_request(request),
                ]
            self._guarded(scripts.ISSUE, args)

    def poll(self, block_s: float, count: int = 64) -> list[GroupHeader | DeadNotice]:
        deadline = time.monotonic() + block_s
        while True:
            entries = self._guarded(scripts.POLL, [self._last, count])
            out = []
            for entry, fields in entries:
                self._last = _text(entry)
                delivery = self._delivery(self._last, fields)
                if delivery is not None:
                    out.append(delivery)
            left = deadline - time.monotonic()
            if out or left <= 0:
                return out
            if not entries:
                self._wait(self._keys.rollouts, self._last, left)

    def fetch(self, headers: Sequence[GroupHeader]) -> list[Group | None]:
        out: list[Group | None] = []
        for batch in _by_bytes(headers, _FETCH_BYTES):
            bodies = self._bodies([header.body_key for header in batch])
            out += [self._decode(header, body) for header, body in zip(batch, bodies, strict=True)]
        return out

    def census(self) -> Mapping[RequestId, OpenState]:
        def ask(pipe: Pipeline) -> None:
            pipe.hgetall(self._keys.open)
            pipe.xlen(self._keys.requests)
            pipe.xlen(self._keys.rollouts)

        found, requests, rollouts = self._read(ask)
        records = dict(_records(found.items()))
        waiting = sum(record.code in ("q", "l") for record in records.values())
        if self._incarnation and (requests < waiting or rollouts < len(records) - waiting):
            log.warning("open requests of run %s have lost their stream entry", self._keys.run)
            records = dict(_records(_paired(self._guarded(scripts.REPAIR, []))))
        return {request_id: record.open_state() for request_id, record in records.items()}

    def release(self, headers: Iterable[GroupHeader | DeadNotice]) -> None:
        for batch in _batches(list(headers), _RELEASE_BATCH):
            args: list[Any] = []
            bodies: list[str] = []
            for item in batch:
                attempt = item.attempt if isinstance(item, GroupHeader) else -1
                args += [str(item.id), item.incarnation, attempt, item.entry]
                if isinstance(item, GroupHeader):
                    bodies.append(self._keys.body(item.id, item.incarnation, item.attempt))
            self._guarded(scripts.RELEASE, args, bodies)

    def withdraw(self, ids: Iterable[RequestId]) -> None:
        for batch in _batches(list(ids), _RELEASE_BATCH):
            delivered = self._guarded(scripts.WITHDRAW, [str(request_id) for request_id in batch])
            self._delete(
                self._keys.body(RequestId.parse(_text(request_id)), int(inc), int(attempt))
                for request_id, inc, attempt in delivered
            )

    def finish(self, reason: str) -> None:
        self._guarded(scripts.FINISH, [reason or "ended"])

    def dead_letters(self, count: int = 100) -> list[DeadLetter]:
        """The newest `count` dead letters, newest first."""
        found: Any = self._repeat(lambda: self._client.xrevrange(self._keys.dead, count=count))
        out = []
        for entry, fields in found:
            kind, reason, request_id = (_text(fields.get(key, b"")) for key in (b"kind", b"reason", b"id"))
            out.append(DeadLetter(_text(entry), kind, reason, request_id, fields.get(b"payload", b"")))
        return out

    # ----------------------------------------------------------------------------------------------- producer

    def lease(self, owner: str, version: int, free: int, block_s: float) -> list[Lease]:
        deadline = time.monotonic() + block_s
        while free > 0:
            ended, newest, entries = self._run(scripts.LEASE, [owner, version, free, self._lease_ms])
            leases = [lease for item in entries if (lease := self._as_lease(owner, *item)) is not None]
            left = deadline - time.monotonic()
            if leases or ended or left <= 0:
                return leases
            if not entries:
                # Abandoned leases make no entry, so look for them now and then.
                self._wait(self._keys.requests, _text(newest), min(left, max(0.05, self._lease_ms / 2000)))
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
        header, body = encode_group(group)
        if len(body) > self._max_body_bytes:
            raise TooLarge(
                f"group {group.id} has {len(body)} bytes, more than redis.max_body_mb allows ({self._max_body_bytes} bytes)"
            )
        body_key = self._keys.body(group.id, group.incarnation, group.attempt)
        args = [str(group.id), group.incarnation, group.attempt, lease.owner, header]
        for _ in range(_COMMIT_TRIES):
            self._repeat(lambda: self._client.set(body_key, body, ex=self._body_ttl_s))
            answer = _text(self._run(scripts.COMMIT, args, [body_key]))
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
        alive = self._bodies([self._keys.producer_alive(_text(owner)) for owner in infos])
        stale = [owner for owner, mark in zip(infos, alive, strict=True) if mark is None]
        if stale:
            self._repeat(lambda: self._client.hdel(self._keys.producer_info, *stale))
        return {_text(owner): _info(raw) for owner, raw in infos.items() if owner not in stale}

    def heartbeat(self, *args: Any) -> None:
        """heartbeat(ttl_s) of the trainer, heartbeat(owner, ttl_s, info) of a producer."""
        if len(args) == 1:
            self._guarded(scripts.TRAINER_ALIVE, [_ms(args[0])], [self._keys.trainer_alive])
            return
        owner, ttl_s, info = args
        keys = [self._keys.producer_alive(owner), self._keys.producer_info]
        self._run(scripts.PRODUCER_ALIVE, [owner, _ms(ttl_s), msgpack.packb(dict(info))], keys)

    # ------------------------------------------------------------------------------------------------- pieces

    def _repeat(self, call: Callable[[], T]) -> T:
        return repeat(self._client, call, self._retry_s)

    def _run(self, script: scripts.Script, args: list[Any], extra_keys: Sequence[str] = ()) -> Any:
        keys = [*self._base_keys, *extra_keys]
        return self._repeat(lambda: script.run(self._client, keys, args))

    def _guarded(self, script: scripts.Script, args: list[Any], extra_keys: Sequence[str] = ()) -> Any:
        if not self._incarnation:
            raise QueueError("claim() the run first")
        guard = [self._incarnation, self._published, self._floor]
        try:
            return self._run(script, [*guard, *args], extra_keys)
        except redis.exceptions.ResponseError as error:
            if str(error).startswith("FENCED"):
                raise Fenced(
                    f"run {self._keys.run}: {error}, this trainer has {self._incarnation} and must stop"
                ) from None
            raise

    def _wait(self, stream: str, after: str, seconds: float) -> None:
        """Until the stream has an entry after `after`, at most `seconds`."""
        block_ms = max(1, round(min(seconds, MAX_BLOCK_S) * 1000))
        self._repeat(lambda: self._client.xread({stream: after}, count=1, block=block_ms))

    def _read(self, ask: Callable[[Pipeline], None]) -> list[Any]:
        """The answers to what `ask` puts into one transaction."""

        def once() -> list[Any]:
            pipe = self._client.pipeline(transaction=True)  # a failed one is empty afterwards
            ask(pipe)
            return pipe.execute()

        return self._repeat(once)

    def _bodies(self, keys: list[str]) -> list[bytes | None]:
        found: Any = self._repeat(lambda: self._client.mget(keys))
        return list(found)

    def _delete(self, keys: Iterable[str]) -> None:
        names = list(keys)
        if names:
            self._repeat(lambda: self._client.unlink(*names))

    def _delivery(self, entry: str, fields: list[bytes]) -> GroupHeader | DeadNotice | None:
        named = dict(zip(fields[::2], fields[1::2], strict=False))
        request_id = _text(named.get(b"id", b""))
        raw = named.get(b"h", b"")
        try:
            if named.get(b"kind") == b"dead":
                return DeadNotice(
                    _parsed_id(request_id), _whole(named, b"inc"), _text(named.get(b"reason", b"")), entry
                )
            header = decode_header(raw, entry)
            if (str(header.id), header.incarnation, header.attempt) != (
                request_id,
                _whole(named, b"inc"),
                _whole(named, b"att"),
            ):
                raise MessageError("the header is not of the request it was committed for", raw)
            return dataclasses.replace(header, body_key=self._keys.body(header.id, header.incarnation, header.attempt))
        except MessageError as error:
            self._reject(entry, request_id, error.reason, raw or b" ".join(fields))
            return None

    def _decode(self, header: GroupHeader, body: bytes | None) -> Group | None:
        try:
            if body is None:
                raise MessageError("the body is lost", header.raw)
            return decode_group(header.raw, body)
        except MessageError as error:
            self._reject(header.entry, str(header.id), error.reason, header.raw, [header.body_key])
            return None

    def _reject(self, entry: str, request_id: str, reason: str, payload: bytes, bodies: Sequence[str] = ()) -> None:
        log.error("rollout entry %s of request %s is malformed, to the dead letters: %s", entry, request_id, reason)
        self._guarded(scripts.REJECT, [entry, request_id, reason, payload[:256]], bodies)

    def _as_lease(self, owner: str, entry: bytes, attempt: bytes, failures: bytes, raw: bytes) -> Lease | None:
        try:
            request = decode_request(raw)
        except MessageError as error:
            self._reject_request(_text(entry), error.reason, raw)
            return None
        return Lease(request.with_attempt(int(attempt), int(failures)), owner, _text(entry))

    def _reject_request(self, entry: str, reason: str, raw: bytes) -> None:
        log.error("request entry %s is malformed, to the dead letters: %s", entry, reason)
        found: Any = self._repeat(lambda: self._client.xrange(self._keys.requests, entry, entry))
        request_id = found[0][1].get(b"id", b"") if found else b""
        self._run(scripts.REJECT_REQUEST, [request_id, entry, reason, raw[:256]])


@dataclasses.dataclass(frozen=True, slots=True)
class _Record:
    incarnation: int
    attempt: int
    code: str
    start_version: int  # the newest it ever began with
    owner: str

    def open_state(self) -> OpenState:
        queued = self.code == "q"
        return OpenState(self.attempt, _STATES[self.code], -1 if queued else self.start_version, self.owner)


def _paired(flat: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _records(pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[RequestId, _Record]]:
    """The open records of the hash `open`."""
    for raw_id, raw in pairs:
        try:
            inc, attempt, code, start, _fails, _entry, owner = _text(raw).split("|", 6)
            record = _Record(int(inc), int(attempt), code, int(start), owner)
            request_id = RequestId.parse(_text(raw_id))
            record.open_state()
        except (ValueError, KeyError):
            log.error("the open mark %r is malformed: %r", raw_id, raw[:100])
            continue
        yield request_id, record


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _by_bytes(headers: Sequence[GroupHeader], limit: int) -> Iterator[list[GroupHeader]]:
    batch: list[GroupHeader] = []
    size = 0
    for header in headers:
        if batch and size + header.body_bytes > limit:
            yield batch
            batch, size = [], 0
        batch.append(header)
        size += header.body_bytes
    if batch:
        yield batch


def _parsed_id(text: str) -> RequestId:
    try:
        return RequestId.parse(text)
    except ValueError:
        raise MessageError(f"not a request id: {text[:40]!r}") from None


def _whole(fields: Mapping[bytes, bytes], name: bytes) -> int:
    try:
        return int(fields[name])
    except (KeyError, ValueError):
        raise MessageError(f"field {name.decode()} is not a whole number") from None


def _info(raw: bytes) -> Mapping[str, str]:
    try:
        info = msgpack.unpackb(raw, raw=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):
        return {}
    return {str(key): str(value) for key, value in info.items()} if isinstance(info, dict) else {}


def _text(raw: bytes | str) -> str:
    return raw if isinstance(raw, str) else raw.decode("utf-8", "replace")


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
