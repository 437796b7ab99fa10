"""Random histories: Redis and the queue in memory answer alike, and no request is lost or answered twice."""

from __future__ import annotations

import random
from typing import Any

import pytest
import redis
from queue_samples import group, request
from queue_worlds import LEASE_S, MemoryWorld, RedisWorld, World

from rollout_queue.errors import Fenced
from rollout_queue.keys import Keys
from rollout_queue.messages import GroupHeader, Lease

OWNERS = ("p1", "p2", "p3")
CALLS = ("issue", "lease", "lease", "commit", "commit", "renew", "give_back", "fail", "advance", "poll", "release")
RARE = ("floor", "withdraw", "claim", "zombie", "census", "leave", "lose_body")


class History:
    """Plays one random history on one world; `step` returns what it answered, without entry ids."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.random = world, random.Random(seed)
        self.trainers = [world.queue()]
        self.trainers[0].claim(0)
        self.producer = world.queue()
        self.leases: list[Lease] = []
        self.arrived: list[Any] = []
        self.version = 0
        self.issued = 0

    @property
    def trainer(self) -> Any:
        return self.trainers[-1]

    def step(self) -> object:
        name = self.random.choice(CALLS if self.random.random() < 0.85 else RARE)
        return name, getattr(self, "do_" + name)()

    def pick(self, items: list[Any]) -> Any:
        return self.random.choice(items) if items else None

    def do_issue(self) -> object:
        incarnation = self.trainer.state().incarnation
        known = {request_id.slot: state.attempt for request_id, state in self.trainer.census().items()}
        slots = [self.random.randrange(12) for _ in range(3)]
        attempts = [known.get(slot, 0) + self.random.randrange(2) for slot in slots]
        least = [self.random.randrange(self.version + 1) for _ in slots]
        self.trainer.issue(
            [request(s, incarnation, min_version=m, attempt=a) for s, m, a in zip(slots, least, attempts, strict=True)]
        )
        return slots, attempts

    def do_lease(self) -> object:
        self.version += self.random.random() < 0.1
        version = max(0, self.version - self.random.randrange(2))
        got = self.producer.lease(self.pick(list(OWNERS)), version, self.random.randrange(1, 4), 0.0)
        self.leases = [*self.leases, *got][-40:]
        return [(lease.request.id, lease.request.attempt, lease.request.failures) for lease in got]

    def do_commit(self) -> object:
        lease = self.pick(self.leases)
        return lease and self.producer.commit(lease, group(lease))

    def do_renew(self) -> object:
        some = self.random.sample(self.leases, min(5, len(self.leases)))
        return [(lease.request.id, lease.request.attempt) for lease in self.producer.renew(some)]

    def do_give_back(self) -> object:
        lease = self.pick(self.leases)
        return lease and self.producer.give_back(lease)

    def do_fail(self) -> object:
        lease = self.pick(self.leases)
        return lease and self.producer.give_back(lease, "boom")

    def do_advance(self) -> object:
        self.world.advance(self.random.choice([LEASE_S * 0.4, LEASE_S * 1.1]))
        return None

    def do_poll(self) -> object:
        got = self.trainer.poll(0.0, self.random.choice([1, 64]))
        self.arrived += got
        return [(type(item).__name__, item.id, item.incarnation) for item in got]

    def do_release(self) -> object:
        some = self.random.sample(self.arrived, min(2, len(self.arrived)))
        self.trainer.release(some)
        self.arrived = [item for item in self.arrived if item not in some]
        return [item.id for item in some]

    def do_floor(self) -> object:
        return dict(self.trainer.raise_floor(self.random.randrange(self.version + 1)))

    def do_withdraw(self) -> object:
        return self.trainer.withdraw([request(self.random.randrange(12), 1).id])

    def do_claim(self) -> object:
        self.trainers.append(self.world.queue())
        self.arrived = []
        return self.trainer.claim(0)

    def do_zombie(self) -> object:
        if len(self.trainers) < 2:
            return None
        try:
            return self.trainers[0].poll(0.0)
        except Fenced:
            return "fenced"

    def do_census(self) -> object:
        return dict(self.trainer.census())

    def do_leave(self) -> object:
        return self.producer.leave(self.pick(list(OWNERS)))

    def do_lose_body(self) -> object:
        header = self.pick([item for item in self.arrived if isinstance(item, GroupHeader)])
        if header is None:
            return None
        (before,) = self.trainer.fetch([header])
        if before is None:
            return "lost before"
        self.world.set_body(header, None)
        return self.trainer.fetch([header])


@pytest.mark.parametrize("seed", range(12))
def test_random_histories(seed: int, redis_client: redis.Redis, keys: Keys) -> None:
    one, other = History(RedisWorld(redis_client, keys), seed), History(MemoryWorld(), seed)
    for number in range(250):
        ours, theirs = one.step(), other.step()
        assert ours == theirs, f"call {number}"
        if number % 10 == 0:
            assert one.trainer.census() == other.trainer.census(), f"after call {number}"
    for history in (one, other):  # whatever happened: withdrawing all that is open and releasing all leaves nothing
        history.trainer.withdraw(list(history.trainer.census()))
        history.trainer.claim(0)
        history.trainer.release(history.trainer.poll(0.0, 1000))
    assert one.trainer.census() == other.trainer.census() == {}
    streams = redis_client.xlen(keys.requests) + redis_client.xlen(keys.rollouts)
    assert (streams, len(other.world.broker.rollouts)) == (0, 0)  # type: ignore[attr-defined]
