"""The trainer's side of the queue on Redis. What must be atomic is in lua_trainer.py."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import redis
from redis.client import Pipeline

from rollout_queue import scripts
from rollout_queue.codec import Buffer, decode_group, decode_header, encode_request
from rollout_queue.errors import Fenced, MessageError, OutOfMemory, QueueError
from rollout_queue.exchange import Command
from rollout_queue.messages import DeadLetter, DeadNotice, Group, GroupHeader, OpenState, Request, RequestId
from rollout_queue.redis_base import RedisSide, milliseconds, text

log = logging.getLogger(__name__)
T = TypeVar("T")

_STATES = {"q": "queued", "l": "leased", "d": "delivered", "x": "delivered"}
_ISSUE_BATCH = 128
_RELEASE_BATCH = 256
_FETCH_BYTES = 64 * 2**20  # bodies asked for in one command


class RedisTrainerSide(RedisSide):
    """TrainerQueue on Redis. One thread calls `poll`; the rest is thread-safe."""

    _incarnation = 0
    _published = -1
    _floor = 0
    _last = "0-0"  # newest rollout entry that poll has returned
    _refused_seen = 0
    _issue_refused = False
    malformed = 0

    def claim(self, at_least: int) -> int:
        self._incarnation = int(self._run(scripts.CLAIM, [at_least]))
        self._published, self._floor, self._last = -1, 0, "0-0"
        return self._incarnation

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
            try:
                self._guarded(scripts.ISSUE, args)
            except OutOfMemory:
                self._issue_refused = True
                raise

    def poll(self, block_s: float, count: int = 64) -> list[GroupHeader | DeadNotice]:
        deadline = time.monotonic() + block_s
        while True:
            left = deadline - time.monotonic()
            wait = self._waiting(self._keys.rollouts, self._last, left) if left > 0 else None
            out = []
            for entry, fields in self._guarded(scripts.POLL, [self._last, count], first=wait):
                self._last = text(entry)
                delivery = self._delivery(self._last, fields)
                if delivery is not None:
                    out.append(delivery)
            if out or left <= 0:
                return out

    def fetch(self, headers: Sequence[GroupHeader]) -> list[Group | None]:
        out: list[Group | None] = []
        for batch in _by_bytes(headers, _FETCH_BYTES):
            bodies = self._values([header.body_key for header in batch])
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

    def memory_full(self) -> bool:
        found: Any = self._repeat(lambda: self._client.hget(self._keys.run_state, "refused"))
        before, self._refused_seen = self._refused_seen, int(found or 0)
        full = self._issue_refused or self._refused_seen > before
        self._issue_refused = False
        return full

    def withdraw(self, ids: Iterable[RequestId]) -> None:
        for batch in _batches(list(ids), _RELEASE_BATCH):
            delivered = self._guarded(scripts.WITHDRAW, [str(request_id) for request_id in batch])
            self._delete(
                self._keys.body(RequestId.parse(text(request_id)), int(inc), int(attempt))
                for request_id, inc, attempt in delivered
            )

    def finish(self, reason: str) -> None:
        self._guarded(scripts.FINISH, [reason or "ended"])

    def dead_letters(self, count: int = 100) -> list[DeadLetter]:
        """The newest `count` dead letters, newest first."""
        found: Any = self._repeat(lambda: self._client.xrevrange(self._keys.dead, count=count))
        out = []
        for entry, fields in found:
            kind, reason, request_id = (text(fields.get(key, b"")) for key in (b"kind", b"reason", b"id"))
            out.append(DeadLetter(text(entry), kind, reason, request_id, fields.get(b"payload", b"")))
        return out

    def requeue(self, letter: DeadLetter, item_id: str) -> bool:
        mark = f"{letter.entry} {item_id}"
        return bool(self._run(scripts.REQUEUE, [letter.entry, mark], [self._keys.requeued]))

    def requeued(self) -> list[str]:
        found: Any = self._repeat(lambda: self._client.lrange(self._keys.requeued, 0, -1))
        return [text(mark) for mark in found]

    def forget_requeued(self, marks: Iterable[str]) -> None:
        names = list(marks)

        def ask(pipe: Pipeline) -> None:
            for mark in names:
                pipe.lrem(self._keys.requeued, 0, mark)

        if names:
            self._read(ask)

    def _trainer_heartbeat(self, ttl_s: float) -> None:
        self._guarded(scripts.TRAINER_ALIVE, [milliseconds(ttl_s)], [self._keys.trainer_alive])

    def _guarded(
        self,
        script: scripts.Script,
        args: list[Any],
        extra_keys: Sequence[str] = (),
        first: Command | None = None,
    ) -> Any:
        if not self._incarnation:
            raise QueueError("claim() the run first")
        guard = [self._incarnation, self._published, self._floor]
        try:
            return self._run(script, [*guard, *args], extra_keys, first)
        except redis.exceptions.ResponseError as error:
            if str(error).startswith("FENCED"):
                raise Fenced(
                    f"run {self._keys.run}: {error}, this trainer has {self._incarnation} and must stop"
                ) from None
            raise

    def _delivery(self, entry: str, fields: list[bytes]) -> GroupHeader | DeadNotice | None:
        """An entry of the rollouts is `group` id|incarnation|attempt, `header`, or `dead` id|incarnation, `reason` (`forged` when the poll script
        finds that nothing has given the request up)."""
        request_id = ""
        try:
            if len(fields) != 4:
                raise MessageError("not an entry of this queue")
            kind, about, _, content = fields
            if kind == b"forged":
                raise MessageError("a notice of death that the queue has not given")
            name, *numbers = text(about).split("|")
            parsed = _parsed_id(name)
            request_id = str(parsed)  # only what is an id goes into logs and dead letters
            if kind == b"dead":
                return DeadNotice(parsed, _whole(numbers, 1)[0], text(content), entry)
            header = decode_header(content, entry)
            if (str(header.id), [header.incarnation, header.attempt]) != (request_id, _whole(numbers, 2)):
                raise MessageError("the header is not of the request it was committed for", content)
            return dataclasses.replace(header, body_key=self._keys.body(header.id, header.incarnation, header.attempt))
        except MessageError as error:
            self._reject(entry, request_id, error.reason, error.payload_head or b" ".join(fields))
            return None

    def _decode(self, header: GroupHeader, body: Buffer | None) -> Group | None:
        try:
            if body is None:
                raise MessageError("the body is lost", header.raw)
            return decode_group(header.raw, body)
        except MessageError as error:
            self._reject(header.entry, str(header.id), error.reason, header.raw, [header.body_key])
            return None

    def _reject(self, entry: str, request_id: str, reason: str, payload: bytes, bodies: Sequence[str] = ()) -> None:
        log.error("rollout entry %s of request %s is malformed, to the dead letters: %s", entry, request_id, reason)
        self.malformed += 1
        self._guarded(scripts.REJECT, [entry, request_id, reason, payload[:256]], bodies)


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
            inc, attempt, code, start, _fails, _entry, owner = text(raw).split("|", 6)
            record = _Record(int(inc), int(attempt), code, int(start), owner)
            request_id = RequestId.parse(text(raw_id))
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


def _whole(numbers: list[str], count: int) -> list[int]:
    try:
        out = [int(number) for number in numbers]
    except ValueError:
        out = []
    if len(out) != count:
        raise MessageError(f"not {count} whole numbers: {numbers}")
    return out
