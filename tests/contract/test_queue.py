"""What rollout_queue/queue.py promises, for every implementation of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import redis
from queue_samples import group, request, same_group
from queue_worlds import LEASE_S, MAX_ATTEMPTS, MAX_BODY_BYTES, MemoryWorld, Queue, RedisWorld, World

from rollout_queue.errors import Fenced, QueueError, TooLarge
from rollout_queue.keys import Keys
from rollout_queue.messages import CommitResult, DeadNotice, GroupHeader, Lease, RequestId

LONG_S = 30.0  # an upper bound; nothing waits for it to pass


@pytest.fixture(params=["redis", "memory"])
def world(request: pytest.FixtureRequest) -> World:
    if request.param == "memory":
        return MemoryWorld()
    client: redis.Redis = request.getfixturevalue("redis_client")
    keys: Keys = request.getfixturevalue("keys")
    return RedisWorld(client, keys)


@pytest.fixture
def trainer(world: World) -> Queue:
    queue = world.queue()
    queue.claim(0)
    queue.announce(0)
    return queue


@pytest.fixture
def producer(world: World) -> Queue:
    return world.queue()


def issue(trainer: Queue, count: int = 1, **options: int) -> None:
    incarnation = trainer.state().incarnation
    trainer.issue([request(slot, incarnation, **options) for slot in range(count)])


def lease_one(producer: Queue, owner: str = "p1", version: int = 0) -> Lease:
    (lease,) = producer.lease(owner, version, 1, 0.0)
    return lease


def deliver(trainer: Queue, producer: Queue) -> tuple[Lease, GroupHeader]:
    """One request, answered and polled."""
    issue(trainer)
    lease = lease_one(producer)
    assert producer.commit(lease, group(lease)) is CommitResult.OK
    (header,) = trainer.poll(0.0)
    assert isinstance(header, GroupHeader)
    return lease, header


class TestClaim:
    def test_incarnations_grow_and_respect_the_run_folder(self, world: World) -> None:
        first, second, third = world.queue(), world.queue(), world.queue()
        assert first.claim(0) == 1
        assert second.claim(0) == 2
        assert third.claim(7) == 7
        assert world.queue().claim(3) == 8

    def test_state_of_a_new_life(self, trainer: Queue, world: World) -> None:
        trainer.announce(5)
        trainer.raise_floor(4)
        trainer.finish("done")
        world.queue().claim(0)
        state = world.queue().state()
        assert (state.incarnation, state.published, state.floor, state.ended) == (2, -1, 0, "")

    def test_state_before_any_claim(self, producer: Queue) -> None:
        state = producer.state()
        assert (state.incarnation, state.published, state.floor, state.ended) == (0, -1, 0, "")
        assert not state.trainer_alive
        assert producer.lease("p1", 0, 1, 0.0) == []

    def test_nothing_goes_without_a_claim(self, producer: Queue) -> None:
        for call in (lambda: producer.poll(0.0), lambda: producer.announce(0), lambda: producer.heartbeat(1.0)):
            with pytest.raises(QueueError, match="claim"):
                call()

    def test_withdraws_queued_and_leased_and_keeps_delivered(
        self, trainer: Queue, producer: Queue, world: World
    ) -> None:
        issue(trainer, 3)
        leased, delivered = producer.lease("p1", 0, 2, 0.0)
        assert producer.commit(delivered, group(delivered)) is CommitResult.OK
        heir = world.queue()
        heir.claim(0)
        assert list(heir.census()) == [delivered.request.id]
        assert producer.commit(leased, group(leased)) is CommitResult.FENCED
        assert producer.renew([leased]) == [leased]
        assert producer.lease("p1", 0, 8, 0.0) == []
        (header,) = heir.poll(0.0)
        assert (header.id, header.incarnation) == (delivered.request.id, 1)
        (answer,) = heir.fetch([header])
        assert answer is not None and same_group(answer, group(delivered))

    def test_an_older_trainer_is_fenced_from_everything(self, trainer: Queue, producer: Queue, world: World) -> None:
        _lease, header = deliver(trainer, producer)
        heir = world.queue()
        heir.claim(0)
        before = heir.state()
        calls: list[Callable[[], object]] = [
            lambda: trainer.announce(9),
            lambda: trainer.raise_floor(9),
            lambda: trainer.issue([request(9, 1)]),
            lambda: trainer.poll(0.0),
            lambda: trainer.release([header]),
            lambda: trainer.withdraw([header.id]),
            lambda: trainer.finish("zombie"),
            lambda: trainer.heartbeat(60.0),
        ]
        for call in calls:
            with pytest.raises(Fenced):
                call()
        assert heir.state() == before
        assert list(heir.census()) == [header.id]

    def test_a_fenced_poll_takes_nothing_from_the_heir(self, trainer: Queue, producer: Queue, world: World) -> None:
        heir = world.queue()
        heir.claim(0)
        issue(heir, 2)
        for lease in producer.lease("p1", 0, 2, 0.0):
            producer.commit(lease, group(lease))
        with pytest.raises(Fenced):
            trainer.poll(0.0)
        assert [header.id.slot for header in heir.poll(0.0)] == [0, 1]


class TestIssueAndLease:
    def test_order_content_and_number(self, trainer: Queue, producer: Queue) -> None:
        issue(trainer, 5)
        leases = producer.lease("p1", 0, 3, 0.0)
        assert [lease.request.id.slot for lease in leases] == [0, 1, 2]
        assert [lease.request.id.slot for lease in producer.lease("p2", 0, 9, 0.0)] == [3, 4]
        got, sent = leases[2].request, request(2, 1)
        assert got.prompt_ids.tolist() == sent.prompt_ids.tolist()
        assert (got.sampling, got.payload, got.seed, got.item_id) == (
            sent.sampling,
            sent.payload,
            sent.seed,
            sent.item_id,
        )

    def test_none_free_asks_for_none(self, trainer: Queue, producer: Queue) -> None:
        issue(trainer, 1)
        assert producer.lease("p1", 0, 0, LONG_S) == []

    def test_only_what_the_version_may_begin(self, trainer: Queue, producer: Queue) -> None:
        issue(trainer, 1, min_version=2)
        assert producer.lease("p1", 1, 1, 0.0) == []
        assert lease_one(producer, version=2).request.min_version == 2

    def test_only_at_the_floor_or_above(self, trainer: Queue, producer: Queue) -> None:
        issue(trainer, 1)
        trainer.raise_floor(3)
        assert producer.lease("p1", 2, 1, 0.0) == []
        assert lease_one(producer, version=3)

    def test_a_repeated_issue_is_queued_once(self, trainer: Queue, producer: Queue) -> None:
        issue(trainer, 2)
        issue(trainer, 2)
        assert len(producer.lease("p1", 0, 9, 0.0)) == 2
        issue(trainer, 2)
        assert producer.lease("p1", 0, 9, 0.0) == []

    def test_a_higher_attempt_replaces_and_fences(self, trainer: Queue, producer: Queue) -> None:
        issue(trainer)
        old = lease_one(producer)
        issue(trainer, attempt=1)
        assert producer.commit(old, group(old)) is CommitResult.FENCED
        assert producer.renew([old]) == [old]
        new = lease_one(producer, "p2")
        assert new.request.attempt == 1
        issue(trainer, attempt=1)
        assert producer.lease("p3", 0, 9, 0.0) == []
        assert producer.commit(new, group(new)) is CommitResult.OK

    def test_a_reissue_never_begins_with_older_weights(self, trainer: Queue, producer: Queue) -> None:
        issue(trainer)
        lease_one(producer, version=4)
        issue(trainer, attempt=1)
        assert producer.lease("p2", 3, 1, 0.0) == []
        assert lease_one(producer, "p2", version=4)

    def test_a_request_of_another_incarnation_is_a_mistake(self, trainer: Queue) -> None:
        with pytest.raises(ValueError, match="incarnation"):
            trainer.issue([request(0, 5)])

    def test_an_empty_issue_is_fine(self, trainer: Queue) -> None:
        trainer.issue([])
        assert trainer.census() == {}

    def test_weights_of_a_discarded_history_begin_nothing(self, trainer: Queue, world: World) -> None:
        old, successor = trainer.state().incarnation, world.queue()
        new = successor.claim(old + 1)
        issue(successor, min_version=3)
        producer = world.queue()
        assert producer.lease("p1", 9, 1, LONG_S, old) == []
        assert producer.lease("p1", 2, 1, LONG_S, new) == []
        (lease,) = producer.lease("p1", 3, 1, 0.0, new)
        assert lease.request.incarnation == new

    def test_a_waiting_lease_wakes_when_a_request_comes(self, trainer: Queue, world: World) -> None:
        waiting = world.queue()
        found: list[Lease] = []
        thread = threading.Thread(target=lambda: found.extend(waiting.lease("p1", 0, 1, LONG_S)))
        thread.start()
        issue(trainer)
        thread.join(LONG_S)
        assert len(found) == 1

    def test_a_short_wait_ends(self, trainer: Queue, producer: Queue) -> None:
        assert producer.lease("p1", 0, 1, 0.1) == []
        assert trainer.poll(0.1) == []

    def test_who_needs_newer_weights_is_not_kept_waiting(self, trainer: Queue, producer: Queue, world: World) -> None:
        issue(trainer, min_version=1)
        assert producer.lease("p1", 0, 1, LONG_S * 10) == []
        lease_one(producer, "p2", version=1)
        world.advance(LEASE_S + 1)
        assert producer.lease("p1", 0, 1, LONG_S * 10) == []
        trainer.withdraw([RequestId(0, 0)])
        issue(trainer, 2)
        assert len(producer.lease("p1", 0, 1, 0.0)) == 1
        trainer.raise_floor(1)
        assert producer.lease("p1", 0, 1, LONG_S * 10) == []

    def test_more_requests_than_one_batch(self, trainer: Queue, producer: Queue) -> None:
        issue(trainer, 700)
        assert len(trainer.census()) == 700
        slots = [lease.request.id.slot for lease in producer.lease("p1", 0, 700, 0.0)]
        assert slots == list(range(700))


class TestLease:
    def test_an_abandoned_lease_is_taken_over_under_a_new_attempt(
        self, trainer: Queue, producer: Queue, world: World
    ) -> None:
        issue(trainer, 2)
        old = lease_one(producer)
        assert [lease.request.id.slot for lease in producer.lease("p2", 0, 1, 0.0)] == [1]
        world.advance(LEASE_S / 2)
        assert producer.lease("p2", 0, 9, 0.0) == []
        world.advance(LEASE_S)
        taken = {lease.request.id.slot: lease for lease in producer.lease("p3", 0, 9, 0.0)}
        assert sorted(taken) == [0, 1]
        assert taken[0].request.attempt == 1
        assert producer.commit(old, group(old)) is CommitResult.FENCED
        assert producer.commit(taken[0], group(taken[0])) is CommitResult.OK
        assert producer.commit(old, group(old)) is CommitResult.FENCED

    def test_abandoned_ones_come_before_new_ones(self, trainer: Queue, producer: Queue, world: World) -> None:
        issue(trainer, 3)
        lease_one(producer)
        world.advance(LEASE_S + 1)
        assert [lease.request.id.slot for lease in producer.lease("p2", 0, 2, 0.0)] == [0, 1]

    def test_renewing_keeps_a_lease(self, trainer: Queue, producer: Queue, world: World) -> None:
        issue(trainer)
        lease = lease_one(producer)
        for _ in range(3):
            world.advance(LEASE_S * 0.75)
            assert producer.renew([lease]) == []
            assert producer.lease("p2", 0, 1, 0.0) == []
        assert producer.commit(lease, group(lease)) is CommitResult.OK

    def test_a_late_renewal_keeps_what_nobody_took(self, trainer: Queue, producer: Queue, world: World) -> None:
        issue(trainer)
        lease = lease_one(producer)
        world.advance(LEASE_S * 3)
        assert producer.renew([lease]) == []
        assert producer.lease("p2", 0, 1, 0.0) == []

    def test_a_woken_zombie_does_not_steal_its_lease_back(self, trainer: Queue, producer: Queue, world: World) -> None:
        issue(trainer)
        zombie = lease_one(producer)
        world.advance(LEASE_S + 1)
        heir = lease_one(producer, "p2")
        assert producer.renew([zombie]) == [zombie]
        producer.give_back(zombie)
        producer.give_back(zombie, "failed")
        assert producer.renew([heir]) == []
        assert producer.commit(heir, group(heir)) is CommitResult.OK

    def test_the_same_producer_after_a_pause_is_no_exception(
        self, trainer: Queue, producer: Queue, world: World
    ) -> None:
        issue(trainer)
        old = lease_one(producer)
        world.advance(LEASE_S + 1)
        new = lease_one(producer)
        assert new.request.attempt == old.request.attempt + 1
        assert producer.renew([old, new]) == [old]
        assert producer.commit(old, group(old)) is CommitResult.FENCED
        assert producer.commit(new, group(new)) is CommitResult.OK

    def test_a_takeover_never_begins_with_older_weights(self, trainer: Queue, producer: Queue, world: World) -> None:
        issue(trainer)
        lease_one(producer, version=2)
        world.advance(LEASE_S + 1)
        assert producer.lease("p2", 1, 1, 0.0) == []
        assert trainer.census()[RequestId(0, 0)].start_version == 2
        assert lease_one(producer, "p2", version=2).request.attempt == 1

    def test_a_takeover_respects_the_floor(self, trainer: Queue, producer: Queue, world: World) -> None:
        issue(trainer)
        lease_one(producer)
        world.advance(LEASE_S + 1)
        trainer.raise_floor(1)
        assert producer.lease("p2", 0, 1, 0.0) == []
        assert lease_one(producer, "p2", version=1)

    def test_renewing_nothing(self, producer: Queue) -> None:
        assert producer.renew([]) == []

    def test_a_committed_lease_is_not_lost(self, trainer: Queue, producer: Queue) -> None:
        issue(trainer)
        lease = lease_one(producer)
        producer.commit(lease, group(lease))
        assert producer.renew([lease]) == []

    @pytest.mark.parametrize("owner", ["a|b|c", "näme with spaces", "x" * 300, "line\nbreak", "-", "0|0|l"])
    def test_odd_names(self, trainer: Queue, producer: Queue, owner: str) -> None:
        issue(trainer)
        lease = lease_one(producer, owner)
        assert trainer.census()[lease.request.id].owner == owner
        producer.heartbeat(owner, 60.0, {"a": owner})
        assert producer.producers() == {owner: {"a": owner}}
        assert producer.renew([lease]) == []
        assert producer.commit(lease, group(lease)) is CommitResult.OK
        (header,) = trainer.poll(0.0)
        assert isinstance(header, GroupHeader) and header.producer == owner


class TestCommit:
    def test_ok_then_dup(self, trainer: Queue, producer: Queue) -> None:
        issue(trainer)
        lease = lease_one(producer)
        assert producer.commit(lease, group(lease)) is CommitResult.OK
        assert producer.commit(lease, group(lease)) is CommitResult.DUP
        headers = trainer.poll(0.0)
        assert len(headers) == 1
        assert trainer.fetch(headers) != [None]

    def test_gone_once_released(self, trainer: Queue, producer: Queue, world: World) -> None:
        lease, header = deliver(trainer, producer)
        trainer.release([header])
        assert producer.commit(lease, group(lease)) is CommitResult.GONE
        assert world.leftovers() == 0

    def test_gone_once_withdrawn(self, trainer: Queue, producer: Queue, world: World) -> None:
        issue(trainer)
        lease = lease_one(producer)
        trainer.withdraw([lease.request.id])
        assert producer.renew([lease]) == [lease]
        assert producer.commit(lease, group(lease)) is CommitResult.GONE
        assert world.leftovers() == 0

    def test_too_large_sends_nothing(self, trainer: Queue, producer: Queue, world: World) -> None:
        issue(trainer)
        lease = lease_one(producer)
        held = world.leftovers()
        with pytest.raises(TooLarge, match="max_body_mb"):
            producer.commit(lease, group(lease, lengths=(MAX_BODY_BYTES // 8, 1)))
        assert world.leftovers() == held
        assert producer.commit(lease, group(lease)) is CommitResult.OK

    def test_an_answer_to_something_else_is_a_mistake(self, trainer: Queue, producer: Queue) -> None:
        issue(trainer, 2)
        one, other = producer.lease("p1", 0, 2, 0.0)
        with pytest.raises(ValueError, match="no answer"):
            producer.commit(one, group(other))

    def test_empty_completions(self, trainer: Queue, producer: Queue) -> None:
        issue(trainer)
        lease = lease_one(producer)
        sent = group(lease, lengths=(0, 0))
        assert producer.commit(lease, sent) is CommitResult.OK
        (got,) = trainer.fetch([h for h in trainer.poll(0.0) if isinstance(h, GroupHeader)])
        assert got is not None and same_group(got, sent)


class TestGiveBack:
    def test_without_failure_it_is_free_at_once(self, trainer: Queue, producer: Queue) -> None:
        issue(trainer)
        lease = lease_one(producer)
        producer.give_back(lease)
        state = trainer.census()[lease.request.id]
        assert (state.state, state.owner, state.start_version) == ("queued", "", -1)
        assert producer.renew([lease]) == [lease]
        assert producer.commit(lease, group(lease)) is CommitResult.FENCED
        again = lease_one(producer, "p2")
        assert (again.request.attempt, again.request.failures) == (1, 0)

    def test_what_was_begun_never_begins_older(self, trainer: Queue, producer: Queue) -> None:
        issue(trainer)
        producer.give_back(lease_one(producer, version=2))
        assert producer.lease("p2", 1, 1, 0.0) == []
        assert lease_one(producer, version=2)

    def test_failures_lead_to_the_dead_letters(self, trainer: Queue, producer: Queue, world: World) -> None:
        issue(trainer)
        for failures in range(MAX_ATTEMPTS):
            lease = lease_one(producer)
            assert lease.request.failures == failures
            producer.give_back(lease, f"boom {failures}")
            producer.give_back(lease, f"boom {failures}")  # a repeat counts once
        assert producer.lease("p1", 0, 1, 0.0) == []
        assert producer.commit(lease, group(lease)) is CommitResult.GONE
        (letter,) = trainer.dead_letters()
        assert (letter.kind, letter.reason, letter.request_id) == ("request", "boom 2", "0.0.0")
        assert letter.payload
        assert trainer.census()[lease.request.id].state == "delivered"
        (notice,) = trainer.poll(0.0)
        assert isinstance(notice, DeadNotice)
        assert (notice.id, notice.incarnation, notice.reason) == (lease.request.id, 1, "boom 2")
        issue(trainer)  # a repeated issue does not raise the dead
        assert producer.lease("p1", 0, 1, 0.0) == []
        trainer.release([notice])
        assert trainer.census() == {}
        assert world.leftovers() == 0

    def test_a_reason_in_any_characters(self, trainer: Queue, producer: Queue) -> None:
        issue(trainer)
        for _ in range(MAX_ATTEMPTS):
            producer.give_back(lease_one(producer), "no: \udcff | ü\n\x00" + "x" * 10_000)
        (notice,) = trainer.poll(0.0)
        assert isinstance(notice, DeadNotice) and notice.reason.startswith("no: ")
        assert trainer.dead_letters()[0].reason == notice.reason

    def test_deaths_of_producers_are_no_failures(self, trainer: Queue, producer: Queue, world: World) -> None:
        issue(trainer)
        for number in range(MAX_ATTEMPTS + 2):
            lease = lease_one(producer, f"p{number}")
            assert (lease.request.attempt, lease.request.failures) == (number, 0)
            world.advance(LEASE_S + 1)


class TestPollAndFetch:
    def test_arrival_order_and_only_once(self, trainer: Queue, producer: Queue) -> None:
        issue(trainer, 5)
        leases = producer.lease("p1", 0, 5, 0.0)
        for lease in reversed(leases):
            producer.commit(lease, group(lease))
        assert [header.id.slot for header in trainer.poll(0.0, count=2)] == [4, 3]
        assert [header.id.slot for header in trainer.poll(0.0)] == [2, 1, 0]
        assert trainer.poll(0.0) == []

    def test_header_and_bodies(self, trainer: Queue, producer: Queue) -> None:
        issue(trainer, 2)
        sent = []
        for rewards, lease in zip(((1.0, 1.0), (0.0, 1.0)), producer.lease("p1", 3, 2, 0.0), strict=True):
            sent.append(group(lease, version=3, rewards=rewards))
            producer.commit(lease, sent[-1])
        headers = [header for header in trainer.poll(0.0) if isinstance(header, GroupHeader)]
        assert [header.equal_rewards for header in headers] == [True, False]
        assert [header.oldest_version for header in headers] == [3, 3]
        assert headers[0].num_tokens == 2 * len(sent[0].prompt_ids) + 5
        got = trainer.fetch(headers[::-1])
        assert [same_group(a, b) for a, b in zip(got, sent[::-1], strict=True) if a] == [True, True]
        assert trainer.fetch([]) == []

    def test_a_new_trainer_gets_all_that_was_never_released(
        self, trainer: Queue, producer: Queue, world: World
    ) -> None:
        issue(trainer, 4)
        leases = producer.lease("p1", 0, 4, 0.0)
        for lease in leases[:3]:
            producer.commit(lease, group(lease))
        trainer.release(trainer.poll(0.0, count=1))
        assert len(trainer.poll(0.0)) == 2
        heir = world.queue()
        heir.claim(0)
        assert [header.id.slot for header in heir.poll(0.0)] == [1, 2]
        assert heir.poll(0.0) == []
        heir.claim(0)
        assert [header.id.slot for header in heir.poll(0.0, count=1)] == [1]

    def test_a_waiting_poll_wakes(self, trainer: Queue, producer: Queue) -> None:
        issue(trainer)
        lease = lease_one(producer)
        thread = threading.Timer(0.05, lambda: producer.commit(lease, group(lease)))
        thread.start()
        assert len(trainer.poll(LONG_S)) == 1
        thread.join()

    def test_a_lost_body_is_reported_and_can_be_issued_again(
        self, trainer: Queue, producer: Queue, world: World
    ) -> None:
        lease, header = deliver(trainer, producer)
        world.set_body(header, None)
        assert trainer.fetch([header]) == [None]
        assert trainer.census() == {}
        (letter,) = trainer.dead_letters()
        assert (letter.kind, letter.request_id) == ("rollout", "0.0.0")
        assert "lost" in letter.reason
        assert producer.commit(lease, group(lease)) is CommitResult.GONE
        issue(trainer, attempt=1)
        again = lease_one(producer)
        assert producer.commit(again, group(again)) is CommitResult.OK
        trainer.release([header])  # of the old attempt: the new one stays
        assert list(trainer.census()) == [header.id]
        assert len(trainer.poll(0.0)) == 1

    @pytest.mark.parametrize("body", [b"", b"short", b"\xff" * 50_000])
    def test_a_malformed_body(self, trainer: Queue, producer: Queue, world: World, body: bytes) -> None:
        _lease, header = deliver(trainer, producer)
        world.set_body(header, body)
        assert trainer.fetch([header]) == [None]
        assert trainer.census() == {}
        assert len(trainer.dead_letters()) == 1
        assert world.leftovers() == 0

    def test_a_body_of_the_right_size_with_wrong_bytes(self, trainer: Queue, producer: Queue, world: World) -> None:
        _lease, header = deliver(trainer, producer)
        world.set_body(header, b"\xff" * header.body_bytes)
        assert trainer.fetch([header]) == [None]

    @pytest.mark.parametrize("raw", [b"\xc1", b"\x80", b"\x81\xa1v\x63", b"\x93\x01\x02\x03"])
    def test_a_malformed_header_goes_to_the_dead_letters(
        self, trainer: Queue, producer: Queue, world: World, raw: bytes
    ) -> None:
        probe = world.queue()
        issue(trainer, 2)
        for lease in producer.lease("p1", 0, 2, 0.0):
            producer.commit(lease, group(lease))
        probe.claim(0)
        first, _second = probe.poll(0.0)
        world.set_header(first.entry, raw)
        heir = world.queue()
        heir.claim(0)
        (healthy,) = heir.poll(0.0)
        assert healthy.id.slot == 1
        assert list(heir.census()) == [healthy.id]
        assert heir.malformed == 1
        (letter,) = heir.dead_letters()
        assert (letter.kind, letter.payload) == ("rollout", raw)


class TestFloor:
    def test_returns_what_has_begun(self, trainer: Queue, producer: Queue, world: World) -> None:
        issue(trainer, 4)
        (first,) = producer.lease("p1", 1, 1, 0.0)
        (second,) = producer.lease("p2", 2, 1, 0.0)
        (third,) = producer.lease("p3", 0, 1, 0.0)
        producer.commit(second, group(second, version=2))
        producer.give_back(third)
        assert trainer.raise_floor(3) == {first.request.id: 1, second.request.id: 2}
        assert producer.state().floor == 3
        assert producer.commit(first, group(first, version=1)) is CommitResult.OK

    def test_never_sinks(self, trainer: Queue, producer: Queue) -> None:
        trainer.raise_floor(3)
        trainer.raise_floor(1)
        trainer.announce(4)
        trainer.announce(2)
        state = producer.state()
        assert (state.floor, state.published) == (3, 4)


class TestReleaseAndWithdraw:
    def test_release_frees_everything_and_may_be_repeated(self, trainer: Queue, producer: Queue, world: World) -> None:
        _lease, header = deliver(trainer, producer)
        trainer.release([header])
        trainer.release([header])
        trainer.release([])
        assert trainer.census() == {}
        assert world.leftovers() == 0

    def test_withdraw_in_every_state(self, trainer: Queue, producer: Queue, world: World) -> None:
        issue(trainer, 3)
        delivered, _leased = producer.lease("p1", 0, 2, 0.0)
        producer.commit(delivered, group(delivered))
        trainer.withdraw([RequestId(0, slot) for slot in range(4)])
        trainer.withdraw([RequestId(0, 0)])
        assert trainer.census() == {}
        assert trainer.poll(0.0) == []
        assert producer.lease("p2", 0, 9, 0.0) == []
        assert world.leftovers() == 0

    def test_long_runs_leave_nothing(self, trainer: Queue, producer: Queue, world: World) -> None:
        for step in range(20):
            issue(trainer, 8, step=step)
            for lease in producer.lease("p1", 0, 8, 0.0):
                producer.commit(lease, group(lease))
            trainer.release(trainer.poll(0.0))
        assert world.leftovers() == 0


class TestEndAndLife:
    def test_the_end_is_seen_at_once(self, trainer: Queue, producer: Queue) -> None:
        issue(trainer)
        trainer.finish("done")
        assert producer.state().ended == "done"
        assert producer.lease("p1", 0, 1, LONG_S * 10) == []

    def test_an_end_without_reason_is_an_end(self, trainer: Queue, producer: Queue) -> None:
        trainer.finish("")
        assert producer.state().ended

    def test_heartbeats_fade(self, trainer: Queue, producer: Queue, world: World) -> None:
        trainer.heartbeat(60.0)
        producer.heartbeat("p1", 60.0, {"version": "3", "name": "ü"})
        producer.heartbeat("p2", 600.0, {})
        assert producer.state().trainer_alive
        assert producer.producers() == {"p1": {"version": "3", "name": "ü"}, "p2": {}}
        world.advance(61)
        assert not producer.state().trainer_alive
        assert producer.producers() == {"p2": {}}
        trainer.heartbeat(ttl_s=60.0)
        producer.heartbeat(owner="p1", ttl_s=60.0, info={"version": "4"})
        assert producer.state().trainer_alive
        assert producer.producers()["p1"] == {"version": "4"}

    def test_leaving_frees_the_leases(self, trainer: Queue, producer: Queue) -> None:
        issue(trainer, 2)
        leases = producer.lease("p1", 0, 2, 0.0)
        producer.heartbeat("p1", 60.0, {})
        producer.leave("p1")
        producer.leave("p1")
        assert producer.producers() == {}
        assert producer.renew(leases) == leases
        assert len(producer.lease("p2", 0, 2, 0.0)) == 2

    def test_a_flushed_queue_is_filled_again(self, trainer: Queue, producer: Queue, world: World) -> None:
        trainer.announce(3)
        trainer.raise_floor(2)
        issue(trainer, 2)
        lease, _other = producer.lease("p1", 3, 2, 0.0)
        world.flush()
        assert producer.lease("p1", 3, 2, 0.0) == []
        assert producer.renew([lease]) == [lease]
        assert producer.commit(lease, group(lease, version=3)) is CommitResult.GONE
        trainer.heartbeat(60.0)
        state = producer.state()
        assert (state.incarnation, state.published, state.floor) == (1, 3, 2)
        assert trainer.census() == {}
        assert trainer.poll(0.0) == []
        issue(trainer, 2, attempt=1)
        for lease in producer.lease("p1", 3, 2, 0.0):
            assert producer.commit(lease, group(lease, version=3)) is CommitResult.OK
        assert len(trainer.poll(0.0)) == 2


class Worker(threading.Thread):
    """A producer that gives some back, until the run ends."""

    def __init__(self, queue: Queue, number: int) -> None:
        super().__init__()
        self._queue, self._number = queue, number
        self.errors: list[BaseException] = []

    def run(self) -> None:
        try:
            while not self._queue.state().ended:
                for lease in self._queue.lease(f"p{self._number}", 0, 3, 0.2):
                    self._work(lease)
        except BaseException as error:  # noqa: BLE001 - told to the test
            self.errors.append(error)

    def _work(self, lease: Lease) -> None:
        if (lease.request.id.slot + lease.request.attempt) % 5 == self._number:
            self._queue.give_back(lease)
        elif not self._queue.renew([lease]):
            self._queue.commit(lease, group(lease))


def test_many_producers_answer_every_request_once(trainer: Queue, world: World) -> None:
    steps, per_step = 4, 30
    workers = [Worker(world.queue(), number) for number in range(4)]
    for worker in workers:
        worker.start()
    seen: list[tuple[int, int]] = []
    for step in range(steps):
        issue(trainer, per_step, step=step)
        arrived: list[GroupHeader | DeadNotice] = []
        while len(arrived) < per_step and not any(worker.errors for worker in workers):
            arrived += trainer.poll(1.0)
        seen += [(header.id.step, header.id.slot) for header in arrived]
        trainer.release(arrived)
    trainer.finish("done")
    for worker in workers:
        worker.join(LONG_S)
    assert [worker.errors for worker in workers] == [[], [], [], []]
    assert sorted(seen) == [(step, slot) for step in range(steps) for slot in range(per_step)]
    assert world.leftovers() == 0
