"""The producer's loops over the queue in memory and the fake generator."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch

from nbehind.config import Config
from producer_svc.errors import GeneratorError, RewardError
from producer_svc.fake_generator import FakeGenerator
from producer_svc.generation import Refused
from producer_svc.generator import Completion
from producer_svc.keeper import Keeper
from producer_svc.service import ProducerService
from producer_svc.telemetry import Telemetry
from rollout_queue.memory_broker import MemoryBroker
from rollout_queue.memory_queue import MemoryQueue
from rollout_queue.messages import CommitResult, DeadNotice, GroupHeader, Lease, Request, RequestId, Sampling, Version
from trainer_svc.fake_engine import WEIGHT_NAME, initial_weights, token_logprobs
from weight_sync.manifest import Manifest
from weight_sync.staged import StagedWeights

DEADLINE_S = 20.0


class LengthScorer:
    async def score(self, request: Request, completions: list[Completion]):
        return np.asarray([len(c.token_ids) for c in completions], dtype=np.float32), {}


class BrokenScorer:
    async def score(self, request: Request, completions: list[Completion]):
        raise RewardError("no such answer")


class DeadGenerator(FakeGenerator):
    async def generate(self, request: Request) -> list[Completion]:
        raise GeneratorError("the engine died")


class RefusingGenerator(FakeGenerator):
    async def generate(self, request: Request) -> list[Completion]:
        raise Refused("the prompt is too long")


class NoReceiver:
    """Stands where the weight channel is; the tests stage by hand."""

    def __init__(self) -> None:
        self.versions: list[Version] = []

    def swapped(self, version: Version) -> None:
        self.versions.append(version)

    def check(self) -> None:
        """Never fails."""


def config(**producer: object) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "fake"}, "trainer": {"engine": "fake"}, "run": {"drain_s": 5.0, "give_up_s": 600.0},
            "producer": {"backend": "fake", "lease_s": 1.0, **producer},
        }
    )  # fmt: skip


def weights(folder: Path, number: int, incarnation: int = 1) -> StagedWeights:
    values = torch.from_numpy(initial_weights(number))
    path = folder / f"v{number}"
    path.write_bytes(values.numpy().tobytes())
    return StagedWeights(Version(incarnation, number, f"c{number}"), Manifest.of([(WEIGHT_NAME, values)]), path)


def request(step: int, slot: int = 0, incarnation: int = 1) -> Request:
    return Request(
        id=RequestId(step, slot), incarnation=incarnation, min_version=step, seed=step * 100 + slot,
        prompt_ids=np.arange(3, dtype=np.int32), sampling=Sampling(4, 16), item_id="x", payload={"gt_answer": "7"},
    )  # fmt: skip


@asynccontextmanager
async def running(
    queue: MemoryQueue, cfg: Config, generator: FakeGenerator, scorer: object = None
) -> AsyncIterator[tuple[ProducerService, NoReceiver, asyncio.Task]]:
    service = ProducerService("p", cfg, queue, generator, scorer or LengthScorer(), Telemetry("p"))
    receiver = NoReceiver()
    keeper = Keeper(queue, "p", cfg.producer.lease_s, cfg.run.give_up_s, lambda: {"version": "0"})
    keeper.start()
    task = asyncio.create_task(service.run(receiver, keeper))
    try:
        yield service, receiver, task
    finally:
        if not task.done():
            service.leave("interrupted")
            await asyncio.wait_for(task, DEADLINE_S)
        await asyncio.to_thread(keeper.close)


async def deliveries(queue: MemoryQueue, count: int) -> list[GroupHeader | DeadNotice]:
    found: list[GroupHeader | DeadNotice] = []
    async with asyncio.timeout(DEADLINE_S):
        while len(found) < count:
            found += await asyncio.to_thread(queue.poll, 0.2)
    return found


def queues(max_attempts: int = 3) -> tuple[MemoryQueue, MemoryQueue]:
    broker = MemoryBroker()
    trainer = MemoryQueue(broker, 1.0, max_attempts)
    trainer.claim(1)
    trainer.announce(0)
    return trainer, MemoryQueue(broker, 1.0, max_attempts)


async def test_a_request_becomes_a_group_whose_logprobs_are_of_the_given_weights(tmp_path):
    trainer, producer = queues()
    trainer.issue([request(0)])
    async with running(producer, config(), FakeGenerator()) as (service, receiver, _):
        service.stage(weights(tmp_path, 0))
        (header,) = await deliveries(trainer, 1)
        (group,) = trainer.fetch([header])
    assert receiver.versions == [Version(1, 0, "c0")]
    assert group is not None and group.num_samples == 4
    assert group.rewards.tolist() == group.lengths.tolist()
    np.testing.assert_array_equal(group.logprobs, token_logprobs(initial_weights(0), group.token_ids))
    assert set(group.token_versions().tolist()) == {0}


async def test_a_request_of_a_newer_version_waits_for_the_swap(tmp_path):
    trainer, producer = queues()
    async with running(producer, config(), FakeGenerator()) as (service, _, _task):
        service.stage(weights(tmp_path, 0))
        trainer.announce(1)
        trainer.issue([request(1)])
        await asyncio.sleep(0.5)
        assert trainer.poll(0.0) == []
        service.stage(weights(tmp_path, 1))
        (header,) = await deliveries(trainer, 1)
    assert header.oldest_version == 1


async def test_weights_that_change_during_a_generation_are_stamped_token_by_token(tmp_path):
    trainer, producer = queues()
    trainer.issue([request(0)])
    async with running(producer, config(), FakeGenerator(base_s=1.0)) as (service, _, _task):
        service.stage(weights(tmp_path, 0))
        await asyncio.sleep(0.6)
        service.stage(weights(tmp_path, 1))
        (header,) = await deliveries(trainer, 1)
        (group,) = trainer.fetch([header])
    assert group is not None
    versions = group.token_versions()
    assert set(versions.tolist()) == {0, 1}
    for number in (0, 1):
        mask = versions == number
        np.testing.assert_array_equal(
            group.logprobs[mask], token_logprobs(initial_weights(number), group.token_ids[mask])
        )


async def test_long_generations_keep_their_lease(tmp_path):
    trainer, producer = queues()
    trainer.issue([request(0)])
    async with running(producer, config(), FakeGenerator(base_s=2.5)) as (service, _, _task):  # lease_s = 1
        service.stage(weights(tmp_path, 0))
        await asyncio.sleep(1.8)
        assert MemoryQueue(trainer.broker, 1.0).lease("thief", 0, 1, 0.0) == []
        (header,) = await deliveries(trainer, 1)
    assert header.attempt == 0


async def test_a_generation_that_takes_too_long_is_retried_and_dead_lettered(tmp_path):
    trainer, producer = queues(max_attempts=2)
    trainer.issue([request(0)])
    cfg = config(request_timeout_s=1.1, max_attempts=2)
    async with running(producer, cfg, FakeGenerator(base_s=30.0)) as (service, _, _task):
        service.stage(weights(tmp_path, 0))
        (notice,) = await deliveries(trainer, 1)
    assert isinstance(notice, DeadNotice) and "request_timeout_s" in notice.reason


async def test_a_reward_that_fails_counts_as_a_failed_try(tmp_path):
    trainer, producer = queues(max_attempts=2)
    trainer.issue([request(0)])
    async with running(producer, config(), FakeGenerator(), BrokenScorer()) as (service, _, _task):
        service.stage(weights(tmp_path, 0))
        (notice,) = await deliveries(trainer, 1)
    assert isinstance(notice, DeadNotice) and "no such answer" in notice.reason


async def test_a_request_that_the_engine_refuses_is_dead_lettered_and_the_producer_goes_on(tmp_path):
    trainer, producer = queues(max_attempts=1)
    trainer.issue([request(0)])
    async with running(producer, config(), RefusingGenerator()) as (service, _, task):
        service.stage(weights(tmp_path, 0))
        (notice,) = await deliveries(trainer, 1)
        assert isinstance(notice, DeadNotice) and "too long" in notice.reason
        assert not task.done()


async def test_a_dead_engine_ends_the_producer_and_gives_its_requests_back(tmp_path):
    trainer, producer = queues()
    trainer.issue([request(0)])
    async with running(producer, config(), DeadGenerator()) as (service, _, task):
        service.stage(weights(tmp_path, 0))
        done, _ = await asyncio.wait([task], timeout=DEADLINE_S)
    assert done and isinstance(task.exception(), GeneratorError)
    (lease,) = MemoryQueue(trainer.broker, 1.0).lease("other", 0, 1, 0.0)
    assert lease.request.failures == 0


async def test_a_new_trainer_takes_the_requests_away(tmp_path):
    trainer, producer = queues()
    trainer.issue([request(0)])
    async with running(producer, config(), FakeGenerator(base_s=30.0)) as (service, _, _task):
        service.stage(weights(tmp_path, 0))
        async with asyncio.timeout(DEADLINE_S):
            while not service.leases():
                await asyncio.sleep(0.05)
            MemoryQueue(trainer.broker, 1.0).claim(2)
            while service.leases():
                await asyncio.sleep(0.05)


async def test_sigterm_drains_what_is_running(tmp_path):
    trainer, producer = queues()
    trainer.issue([request(0)])
    async with running(producer, config(), FakeGenerator(base_s=1.0)) as (service, _, task):
        service.stage(weights(tmp_path, 0))
        async with asyncio.timeout(DEADLINE_S):
            while not service.leases():
                await asyncio.sleep(0.05)
        service.leave("interrupted")
        assert await asyncio.wait_for(task, DEADLINE_S) == "interrupted"
    assert len(trainer.poll(0.0)) == 1


async def test_the_producer_leaves_when_the_trainer_declares_the_end(tmp_path):
    trainer, producer = queues()
    async with running(producer, config(), FakeGenerator()) as (service, _, task):
        service.stage(weights(tmp_path, 0))
        trainer.finish("done")
        assert await asyncio.wait_for(task, DEADLINE_S) == "done"


async def test_full_memory_is_waited_for(tmp_path):
    broker = MemoryBroker(max_bytes=600)
    trainer = MemoryQueue(broker, 1.0)
    trainer.claim(1)
    trainer.announce(0)
    trainer.issue([request(0, i) for i in range(6)])
    seen = 0
    async with running(MemoryQueue(broker, 1.0), config(max_requests=6), FakeGenerator()) as (service, _, _task):
        service.stage(weights(tmp_path, 0))
        async with asyncio.timeout(DEADLINE_S):
            while seen < 6:
                arrived = await asyncio.to_thread(trainer.poll, 0.2)
                seen += len(arrived)
                trainer.release(arrived)
    assert seen == 6


async def test_a_group_above_the_size_limit_is_a_failed_try_with_its_size(tmp_path):
    broker = MemoryBroker()
    trainer = MemoryQueue(broker, 1.0, 2)
    trainer.claim(1)
    trainer.announce(0)
    trainer.issue([request(0, i) for i in range(2)])
    small = MemoryQueue(broker, 1.0, 2, max_body_bytes=50)
    async with running(small, config(), FakeGenerator()) as (service, _, task):
        service.stage(weights(tmp_path, 0))
        notices = await deliveries(trainer, 2)
        assert not task.done(), "the producer goes on"
    for notice in notices:
        assert isinstance(notice, DeadNotice)
        assert "bytes, more than redis.max_body_mb allows (50 bytes)" in notice.reason


class BlockingGenerator(FakeGenerator):
    """Holds the whole event loop up, as a bug in a library would."""

    async def generate(self, request: Request) -> list[Completion]:
        await asyncio.sleep(0.5)  # so that the keeper knows of the lease
        time.sleep(4.0)  # noqa: ASYNC251
        return await super().generate(request)


async def test_a_blocked_event_loop_loses_its_leases(tmp_path):
    broker = MemoryBroker()
    trainer, other = MemoryQueue(broker, 1.0), MemoryQueue(broker, 1.0)
    trainer.claim(1)
    trainer.announce(0)
    trainer.issue([request(0)])
    taken: list[Lease] = []
    results: list[CommitResult] = []

    def take_over() -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not taken and time.monotonic() < deadline:
            time.sleep(0.1)
            if any(known.state == "leased" for known in list(broker.open.values())):
                taken.extend(other.lease("other", 0, 1, 0.0))

    queue = MemoryQueue(broker, 1.0)
    commit = queue.commit
    queue.commit = lambda lease, group: results.append(commit(lease, group)) or results[-1]  # type: ignore[method-assign]
    thread = threading.Thread(target=take_over)
    async with running(queue, config(), BlockingGenerator()) as (service, _, task):
        thread.start()
        service.stage(weights(tmp_path, 0))
        async with asyncio.timeout(DEADLINE_S):
            while not taken or not results:
                await asyncio.sleep(0.1)
        assert taken[0].request.attempt >= 1 and taken[0].request.failures == 0
        assert results[0] is CommitResult.FENCED
        assert not task.done(), "the producer goes on"
    thread.join(DEADLINE_S)
