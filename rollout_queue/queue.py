"""The two sides of the queue. Implementations: redis_queue.RedisQueue, memory_queue.MemoryQueue.

    trainer: claim ─▶ issue ─▶ (producers) ─▶ poll ─▶ fetch ─▶ train ─▶ checkpoint ─▶ release
    producer: lease ─▶ generate, renew meanwhile ─▶ commit        (or give_back)

Every call is synchronous, bounded in time and safe to repeat. Both sides raise Fenced when a newer
incarnation owns the run, OutOfMemory when a write is refused, ConnectionRefused when the server stays away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

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


class TrainerQueue(Protocol):
    """What the trainer's rank 0 does with the queue."""

    malformed: int  # deliveries that this object could not decode so far

    def claim(self, at_least: int) -> int:
        """Become the run's trainer: returns the new incarnation, > the stored one and ≥ `at_least`.

        Withdraws every request still queued or leased (their commits answer FENCED); delivered groups stay.
        """
        ...

    def state(self) -> RunState: ...

    def announce(self, published: int) -> None:
        """Make `published` the newest version that requests may ask for. Fenced if the run has a newer trainer."""
        ...

    def raise_floor(self, floor: int) -> Mapping[RequestId, int]:
        """Refuse, from now on, generations that begin below `floor`.

        Returns the start versions of requests now leased or delivered, atomically with the change: no generation older than
        `floor` that is not in the answer can come into being later.
        """
        ...

    def issue(self, requests: Sequence[Request]) -> None:
        """Open the requests and queue them, in order. A repeated (id, attempt) is queued once."""
        ...

    def poll(self, block_s: float, count: int = 64) -> list[GroupHeader | DeadNotice]:
        """New deliveries in arrival order, after waiting at most `block_s` for the first.

        The first calls of a new consumer return what was delivered before and never released. Entries that cannot be decoded
        go to the dead-letter stream; their request stays open, so that reconciling reissues it.
        """
        ...

    def fetch(self, headers: Sequence[GroupHeader]) -> list[Group | None]:
        """Bodies of the headers; None where the body is lost or malformed (then it was dead-lettered)."""
        ...

    def census(self) -> Mapping[RequestId, OpenState]:
        """Every open request that the queue knows."""
        ...

    def release(self, headers: Iterable[GroupHeader | DeadNotice]) -> None:
        """Ack and delete consumed deliveries: stream entry, body and open mark. Works when memory is full."""
        ...

    def memory_full(self) -> bool:
        """Was a request or a group refused for want of memory since the last call?"""
        ...

    def withdraw(self, ids: Iterable[RequestId]) -> None:
        """Forget open requests: later commits of theirs answer GONE."""
        ...

    def finish(self, reason: str) -> None:
        """Declare the end of the run; producers leave when they see it."""
        ...

    def heartbeat(self, ttl_s: float) -> None:
        """Show that the trainer lives. Works when memory is full; Fenced if it is not the trainer any more."""
        ...

    def dead_letters(self, count: int = 100) -> list[DeadLetter]: ...

    def requeue(self, letter: DeadLetter, item_id: str) -> bool:
        """Take a dead request's letter away and have its item rolled out by a replacement; False if it is gone by now."""
        ...

    def requeued(self) -> list[str]:
        """What was re-queued and not forgotten, oldest first: `<entry of the letter> <item id>`."""
        ...

    def forget_requeued(self, marks: Iterable[str]) -> None:
        """These were taken over by replacements that are durable."""
        ...


class ProducerQueue(Protocol):
    """What a producer does with the queue."""

    def state(self) -> RunState: ...

    def lease(self, owner: str, version: int, free: int, block_s: float, incarnation: int = 0) -> list[Lease]:
        """At most `free` requests that can start now with weights `version`, waiting at most `block_s` for one.

        `incarnation` is that of the weights (0 = the one that owns the run). With weights of another one nothing can start:
        their number may be of a history that was discarded.

        Does not wait when a request is there that needs newer weights: a new version, not a new request, is what helps.
        Only requests with min_version ≤ version, and only while version ≥ floor. Abandoned leases (not renewed for
        lease_s) come first, under a new attempt, and never with older weights than they had begun with.
        """
        ...

    def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """Extend the leases. Returns those that are lost: stop working on them. Works when memory is full."""
        ...

    def commit(self, lease: Lease, group: Group) -> CommitResult:
        """Deliver the group. Raises TooLarge before anything is sent."""
        ...

    def give_back(self, lease: Lease, failure: str = "") -> None:
        """Return a lease. With `failure` it counts as a failed try, and after max_attempts as dead-lettered."""
        ...

    def heartbeat(self, owner: str, ttl_s: float, info: Mapping[str, str]) -> None:
        """Show that the producer lives, with what the live view shows of it."""
        ...

    def leave(self, owner: str) -> None:
        """Forget the producer's heartbeat."""
        ...

    def producers(self) -> Mapping[str, Mapping[str, str]]:
        """The info of every producer whose heartbeat is fresh."""
        ...
