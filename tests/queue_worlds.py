"""The two implementations of the queue behind one face, with a clock that tests move by hand."""

from __future__ import annotations

from abc import ABC, abstractmethod

import redis

from rollout_queue.keys import Keys
from rollout_queue.memory_broker import MemoryBroker
from rollout_queue.memory_queue import MemoryQueue
from rollout_queue.messages import GroupHeader
from rollout_queue.redis_queue import RedisQueue

LEASE_S = 600.0  # far longer than any test: leases end only by `advance`
MAX_ATTEMPTS = 3
MAX_BODY_BYTES = 20_000
Queue = RedisQueue | MemoryQueue


class World(ABC):
    """A server. `queue()` connects one more service to it."""

    @abstractmethod
    def queue(self) -> Queue: ...

    @abstractmethod
    def advance(self, seconds: float) -> None:
        """Let leases and heartbeats age."""

    @abstractmethod
    def flush(self) -> None:
        """Lose everything of the run."""

    @abstractmethod
    def set_body(self, header: GroupHeader, body: bytes | None) -> None:
        """Replace the body of a delivered group, or lose it."""

    @abstractmethod
    def set_header(self, entry: str, raw: bytes) -> None:
        """Replace the header of the delivery `entry`, before it is polled."""

    @abstractmethod
    def leftovers(self) -> int:
        """Entries, bodies and open marks that are still held."""


class RedisWorld(World):
    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self.client, self.keys = client, keys

    def queue(self) -> RedisQueue:
        return RedisQueue(self.client, self.keys, LEASE_S, MAX_ATTEMPTS, MAX_BODY_BYTES)

    def advance(self, seconds: float) -> None:
        for item in self.client.xpending_range(self.keys.requests, "producers", "-", "+", 10_000):
            idle = item["time_since_delivered"] + round(seconds * 1000)
            self.client.xclaim(
                self.keys.requests, "producers", item["consumer"], 0, [item["message_id"]], idle=idle, justid=True
            )
        for key in self.client.scan_iter(match=f"nbehind:{{{self.keys.run}}}:alive:*"):
            left = self.client.pttl(key) - round(seconds * 1000)
            self.client.pexpire(key, left)

    def flush(self) -> None:
        self.client.delete(*self.client.scan_iter(match=f"nbehind:{{{self.keys.run}}}:*"))

    def set_body(self, header: GroupHeader, body: bytes | None) -> None:
        if body is None:
            self.client.delete(header.body_key)
        else:
            self.client.set(header.body_key, body)

    def set_header(self, entry: str, raw: bytes) -> None:
        # An entry of a stream cannot be changed, so the stream is written again.
        entries = self.client.xrange(self.keys.rollouts)
        self.client.delete(self.keys.rollouts)
        self.client.xgroup_create(self.keys.rollouts, "trainer", "0", mkstream=True)
        for name, fields in entries:
            if name.decode() == entry:
                fields[b"header"] = raw
            self.client.xadd(self.keys.rollouts, fields, id=name)

    def leftovers(self) -> int:
        bodies = len(list(self.client.scan_iter(match=f"nbehind:{{{self.keys.run}}}:body:*")))
        streams = self.client.xlen(self.keys.requests) + self.client.xlen(self.keys.rollouts)
        pending = 0
        for stream, name in ((self.keys.requests, "producers"), (self.keys.rollouts, "trainer")):
            if self.client.exists(stream):
                pending += self.client.xpending(stream, name)["pending"]
        return bodies + streams + pending + self.client.hlen(self.keys.open)


class MemoryWorld(World):
    def __init__(self) -> None:
        self.now = 1000.0
        self.broker = MemoryBroker(clock=lambda: self.now)

    def queue(self) -> MemoryQueue:
        return MemoryQueue(self.broker, LEASE_S, MAX_ATTEMPTS, MAX_BODY_BYTES)

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def flush(self) -> None:
        self.broker.flush()

    def set_body(self, header: GroupHeader, body: bytes | None) -> None:
        if body is None:
            del self.broker.bodies[header.body_key]
        else:
            self.broker.bodies[header.body_key] = body

    def set_header(self, entry: str, raw: bytes) -> None:
        self.broker.rollouts[int(entry)].data = raw

    def leftovers(self) -> int:
        broker = self.broker
        return len(broker.bodies) + len(broker.requests) + len(broker.rollouts) + len(broker.open)
