"""What publisher and members tell each other through the streams `sync_calls` and `sync_acks`.

calls  publisher ─▶ members   Started, EpochCall, TransferCall, ShareCall, DropCall, RefuseCall
acks   members ─▶ publisher   Ack: joined, received, failed, free
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgpack
import redis

from rollout_queue.keys import Keys
from weight_sync.errors import Superseded, SyncError
from weight_sync.redis_io import evaluate, last_id, read_stream, unpack_map

log = logging.getLogger(__name__)

CALLS_KEPT, ACKS_KEPT = 64, 1000


@dataclass(frozen=True, slots=True)
class Started:
    """A publisher has started: members of older incarnations join anew."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class EpochCall:
    """Meet at the store. `sessions` and `ranks` by member; who is not named leaves its group."""

    incarnation: int
    epoch: int
    host: str
    port: int
    sessions: Mapping[str, str]
    ranks: Mapping[str, int]
    timeout_s: float
    transport: str = "gloo"

    @property
    def prefix(self) -> str:
        """Of the keys in the store: a port may be reused by the store of another epoch or run."""
        return f"{self.incarnation}.{self.epoch}"


@dataclass(frozen=True, slots=True)
class TransferCall:
    """A version follows in the epoch's channel, and after it its checksum, which is summed up while the bytes move.

    `transfer` counts up through the life of the publisher.
    """

    incarnation: int
    epoch: int
    transfer: int
    number: int
    manifest_digest: str
    total_bytes: int
    bucket_bytes: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ShareCall:
    """A version lies in memory that the members named can read: `path`, with the manifest after the weights."""

    incarnation: int
    transfer: int
    number: int
    checksum: str
    manifest_digest: str
    total_bytes: int
    path: str
    sessions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DropCall:
    """The member missed a deadline and must join again."""

    incarnation: int
    member: str
    session: str
    reason: str


@dataclass(frozen=True, slots=True)
class RefuseCall:
    """The two ends do not fit; the member ends with this reason."""

    incarnation: int
    member: str
    session: str
    reason: str


Call = Started | EpochCall | TransferCall | ShareCall | DropCall | RefuseCall
_CALLS: Mapping[str, type[Any]] = {
    c.__name__: c for c in (Started, EpochCall, TransferCall, ShareCall, DropCall, RefuseCall)
}


@dataclass(frozen=True, slots=True)
class Ack:
    """What a member answers. `kind`: joined, received (and verified), failed, free (a buffer was swapped in).

    `order` counts up through the member's process: `free` (buffers that a transfer may use) of the highest one holds.
    `transfer` is −1 for what belongs to none.
    """

    member: str
    session: str
    kind: str
    order: int
    free: int
    incarnation: int = 0
    epoch: int = -1
    transfer: int = -1
    number: int = -1
    detail: str = ""


def encode(message: Call | Ack) -> bytes:
    raw: bytes = msgpack.packb({"kind_": type(message).__name__, **asdict(message)})
    return raw


def decode_call(raw: bytes) -> Call:
    """Inverse of encode() for calls; SyncError on anything else."""
    value = unpack_map(raw, "weight channel call")
    kind = _CALLS.get(str(value.pop("kind_", "")))
    if kind is None:
        raise SyncError("weight channel call of an unknown kind")
    call: Call = _build(kind, value)
    return call


def decode_ack(raw: bytes) -> Ack:
    """Inverse of encode() for acks; SyncError on anything else."""
    value = unpack_map(raw, "weight channel ack")
    if value.pop("kind_", "") != "Ack":
        raise SyncError("weight channel ack of an unknown kind")
    ack: Ack = _build(Ack, value)
    return ack


def _build(kind: type[Any], value: dict[str, Any]) -> Any:
    plain: dict[str, Any] = {"int": int, "str": str, "float": (int, float)}
    for spec in fields(kind):
        wanted = plain.get(str(spec.type), dict)
        if spec.name in value and not isinstance(value[spec.name], wanted):
            raise SyncError(f"{kind.__name__}.{spec.name} = {value[spec.name]!r} is not a {spec.type}")
    try:
        return kind(**value)
    except TypeError as error:
        raise SyncError(f"{kind.__name__}: {error}") from error


# The newest call carries the highest incarnation, so this comparison fences a publisher that was stopped and woke up.
_SEND_CALL = """
redis.call('XTRIM', KEYS[1], 'MAXLEN', tonumber(ARGV[3]) - 1)
local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if newest[1] then
  local found = newest[1][2]
  for i = 1, #found, 2 do
    if found[i] == 'i' and tonumber(found[i + 1]) > tonumber(ARGV[1]) then return tonumber(found[i + 1]) end
  end
end
redis.call('XADD', KEYS[1], '*', 'i', ARGV[1], 'c', ARGV[2])
return 0
"""
_SEND_ACK = """
redis.call('XTRIM', KEYS[1], 'MAXLEN', tonumber(ARGV[2]) - 1)
redis.call('XADD', KEYS[1], '*', 'a', ARGV[1])
"""


def send_call(client: redis.Redis, keys: Keys, call: Call) -> None:
    """Announce. Raises Superseded when a newer incarnation has announced something."""
    newer = int(evaluate(client, _SEND_CALL, [keys.sync_calls], call.incarnation, encode(call), CALLS_KEPT))
    if newer:
        raise Superseded(
            f"the publisher of incarnation {call.incarnation} must stop: incarnation {newer} has taken over the run {keys.run!r}"
        )


def send_ack(client: redis.Redis, keys: Keys, ack: Ack) -> None:
    evaluate(client, _SEND_ACK, [keys.sync_acks], encode(ack), ACKS_KEPT)


class CallReader:
    """A member's place in `sync_calls`."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client, self._key = client, keys.sync_calls
        self._after = "0"

    def skip(self) -> None:
        """Go to the end: what was called before cannot concern a member that registers now."""
        self._after = last_id(self._client, self._key)

    def read(self, block_s: float) -> list[Call]:
        calls: list[Call] = []
        for entry_id, found in read_stream(self._client, self._key, self._after, block_s):
            self._after = entry_id
            try:
                calls.append(decode_call(found.get(b"c", b"")))
            except SyncError as error:
                log.warning("entry %s of %s is passed over: %s", entry_id, self._key, error)
        return calls


class AckReader:
    """The publisher's place in `sync_acks`."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client, self._key = client, keys.sync_acks
        self._after = "0"

    def skip(self) -> None:
        self._after = last_id(self._client, self._key)

    def read(self, block_s: float) -> list[Ack]:
        acks: list[Ack] = []
        for entry_id, found in read_stream(self._client, self._key, self._after, block_s, ACKS_KEPT):
            self._after = entry_id
            try:
                acks.append(decode_ack(found.get(b"a", b"")))
            except SyncError as error:
                log.warning("entry %s of %s is passed over: %s", entry_id, self._key, error)
        return acks
