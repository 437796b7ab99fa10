"""Who receives weights: the register in Redis, and the publisher's view of it.

member:    register ─▶ refresh every ttl/3 ─▶ leave            (a member that is silent for the ttl has left)
publisher: fresh ─▶ Roster.update ─▶ Roster.targets(version)   (pure)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
import redis

from rollout_queue.keys import Keys
from rollout_queue.messages import Version
from weight_sync.calls import ACKS_KEPT, Ack, encode
from weight_sync.errors import SyncError
from weight_sync.redis_io import evaluate, unpack_map

MAX_FAILURES = 3  # failures in a row after which a member has to join again

# HDEL first: see redis_io.py.
_REGISTER = """
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
redis.call('XTRIM', KEYS[3], 'MAXLEN', tonumber(ARGV[6]) - 1)
redis.call('XADD', KEYS[3], '*', 'a', ARGV[5])
"""
_REFRESH = """
local held = redis.call('GET', KEYS[1])
if held == ARGV[1] then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return held
"""
_REPORT = """
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
"""
_LEAVE = """
if redis.call('GET', KEYS[1]) ~= ARGV[2] then return end
redis.call('DEL', KEYS[1])
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
"""
_FORGET = """
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('HDEL', KEYS[2], ARGV[1])
  redis.call('HDEL', KEYS[3], ARGV[1])
end
"""


@dataclass(frozen=True, slots=True)
class Record:
    """A registration: one session of a member. `have` is the newest version it received, `free` its free buffers."""

    session: str
    hello: Mapping[str, str]
    where: str  # host and pid, for messages
    have: Version | None
    free: int

    def encode(self) -> bytes:
        have = list(self.have) if self.have else None
        raw: bytes = msgpack.packb([self.session, dict(self.hello), self.where, have, self.free])
        return raw

    @classmethod
    def decode(cls, raw: bytes) -> Record:
        """Inverse of encode(); SyncError on anything else."""
        try:
            session, hello, where, have, free = msgpack.unpackb(raw)
            version = Version(int(have[0]), int(have[1]), str(have[2])) if have else None
            return cls(str(session), {str(k): str(v) for k, v in hello.items()}, str(where), version, int(free))
        except (ValueError, TypeError, AttributeError, IndexError, msgpack.UnpackException) as error:
            raise SyncError(f"not a registration ({error})") from error


class Register:
    """The register in Redis. Every write works on a full server."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client, self._keys = client, keys

    def register(self, member: str, record: Record, joined: Ack, ttl_s: float) -> None:
        """Enter, or replace the session; the publisher sees it at once."""
        keys = [self._keys.members, self._keys.member_alive(member), self._keys.sync_acks]
        evaluate(
            self._client,
            _REGISTER,
            keys,
            member,
            record.encode(),
            record.session,
            _ms(ttl_s),
            encode(joined),
            ACKS_KEPT,
        )

    def refresh(self, member: str, session: str, ttl_s: float) -> str:
        """Stay fresh. Returns the session that holds the name: this one, another process's, or "" when it was lost."""
        held = evaluate(self._client, _REFRESH, [self._keys.member_alive(member)], session, _ms(ttl_s))
        return held.decode() if held else ""

    def report(self, member: str, status: Mapping[str, Any]) -> None:
        """Status for the live view, and for a publisher that missed an ack."""
        evaluate(self._client, _REPORT, [self._keys.member_status], member, msgpack.packb(dict(status)))

    def leave(self, member: str, session: str) -> None:
        keys = [self._keys.member_alive(member), self._keys.members, self._keys.member_status]
        evaluate(self._client, _LEAVE, keys, member, session)

    def fresh(self) -> dict[str, Record]:
        """Every fresh member. Those whose mark has expired are forgotten."""
        entries: dict[bytes, bytes] = self._client.hgetall(self._keys.members)  # type: ignore[assignment]
        if not entries:
            return {}
        names = sorted(name.decode() for name in entries)
        marks: list[bytes | None] = self._client.mget([self._keys.member_alive(n) for n in names])  # type: ignore[assignment]
        found: dict[str, Record] = {}
        for name, mark in zip(names, marks, strict=True):
            if mark is None:
                keys = [self._keys.member_alive(name), self._keys.members, self._keys.member_status]
                evaluate(self._client, _FORGET, keys, name)
                continue
            record = Record.decode(entries[name.encode()])
            if record.session == mark.decode():
                found[name] = record
        return found

    def gone(self, sessions: Mapping[str, str]) -> set[str]:
        """Members of `sessions` (member -> session) whose mark has expired or is another session's by now."""
        names = sorted(sessions)
        marks: list[bytes | None] = self._client.mget([self._keys.member_alive(n) for n in names])  # type: ignore[assignment]
        return {n for n, mark in zip(names, marks, strict=True) if mark is None or mark.decode() != sessions[n]}

    def statuses(self) -> dict[str, dict[str, Any]]:
        """What every member reported last."""
        entries: dict[bytes, bytes] = self._client.hgetall(self._keys.member_status)  # type: ignore[assignment]
        return {name.decode(): unpack_map(raw, "member status") for name, raw in entries.items()}


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


_REMEDIES: Mapping[str, str] = {
    "schema": "install the same version of nbehind on both",
    "dtype": "give both the same model.dtype",
    "tokenizer": "give both the same model.path (the tokenizers differ)",
    "model": "give both the same model.path (the architectures differ)",
    "adapters": "give both the same model.path, lora.rank and lora.alpha",
    "transport": "give both the same sync.transport",
}
_INFORMATIVE = frozenset({"torch", "host", "quantization"})  # not compared: gloo works between torch versions
PLAIN = "none"  # quantization of an engine that keeps weights as they come


def mismatch(ours: Mapping[str, str], member: str, record: Record) -> str:
    """Why the member cannot receive from us: both sides and the remedy; '' when it can.

    Every value of the publisher's hello must be equal, except those of `_INFORMATIVE`. A member whose engine quantizes
    must say (`requantize` = yes) that it can do so again with every version.
    """
    kind = record.hello.get("quantization", PLAIN)
    if kind != PLAIN and record.hello.get("requantize") != "yes":
        return (
            f"producer {member} ({record.where}) keeps its weights quantized ({kind}) and cannot quantize new ones, while "
            f"the trainer sends {ours.get('dtype', 'plain')}: use a model.path without quantization_config"
        )
    wrong = [k for k in ours if k not in _INFORMATIVE and record.hello.get(k) != ours[k]]
    if not wrong:
        return ""
    parts = ", ".join(f"{k} = {record.hello.get(k, 'missing')} where the trainer has {ours[k]}" for k in wrong)
    remedy = "; ".join(_REMEDIES.get(k, f"make {k} the same on both") for k in wrong)
    return f"producer {member} ({record.where}) has {parts}: {remedy}"


@dataclass(slots=True)
class MemberView:
    """One session of a member, as the publisher sees it."""

    record: Record
    transports: list[str] = field(default_factory=lambda: ["gloo"])  # that it can use, the best first
    acked: int = -1  # newest version number of this incarnation that it received
    free: int = 2
    order: int = -1  # of the newest ack that was taken in
    failures: int = 0  # in a row
    refused: str = ""
    dropped: str = ""
    dropped_at: float = 0.0  # monotonic seconds

    @property
    def usable(self) -> bool:
        return not self.refused and not self.dropped


@dataclass(slots=True)
class Roster:
    """Every fresh member. No I/O, no clock."""

    incarnation: int
    members: dict[str, MemberView] = field(default_factory=dict)

    def update(self, fresh: Mapping[str, Record], history: Mapping[int, str]) -> list[str]:
        """Take in the register: new sessions replace old ones, absent members go. Returns the names of new sessions."""
        for name in [n for n in self.members if n not in fresh]:
            del self.members[name]
        new = [n for n, r in fresh.items() if n not in self.members or self.members[n].record.session != r.session]
        for name in new:
            record = fresh[name]
            view = MemberView(record, free=record.free)
            have = record.have
            if have and have.incarnation == self.incarnation and history.get(have.number) == have.checksum:
                view.acked = have.number
            self.members[name] = view
        return new

    def take_ack(self, ack: Ack) -> bool:
        """Take in what a member said of its buffers and version; False when it is of an older session or life."""
        view = self.members.get(ack.member)
        if view is None or view.record.session != ack.session:
            return False
        if ack.order > view.order:
            view.order, view.free = ack.order, ack.free
        if ack.kind == "received" and ack.incarnation == self.incarnation:
            view.acked, view.failures = max(view.acked, ack.number), 0
        return True

    def take_status(self, member: str, status: Mapping[str, Any]) -> None:
        """The same from the member's status, in case its ack was lost."""
        view = self.members.get(member)
        if view is None or status.get("session") != view.record.session:
            return
        if int(status.get("order", -1)) > view.order:
            view.order, view.free = int(status["order"]), int(status.get("free", 0))
        incarnation, number = (*status.get("version", ()), -1, -1)[:2]
        if incarnation == self.incarnation:
            view.acked = max(view.acked, int(number))

    def targets(self, number: int) -> dict[str, str]:
        """Member -> session of those that lack version `number` and have a buffer for it, in the order of names."""
        return {
            name: view.record.session
            for name, view in sorted(self.members.items())
            if view.usable and view.acked < number and view.free > 0
        }
