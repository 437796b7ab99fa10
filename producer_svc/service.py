"""A producer: leases requests, generates, scores and pushes groups, while weights change under it.

                 ┌──────────── weights: receiver thread ─▶ swap loop ─▶ generator.load ─▶ new version
                 ▼
    lease loop ─▶ serve (one task a request): generate ─▶ score ─▶ commit ─▶ next lease
        ▲                                        │
        └── free slot or new version             └── failed, hung, lost: give back or drop

consumes: requests it can start now.  produces: groups.
waits for: a request (blocking, in a worker thread), a free slot, the first weights.
beside it: the keeper thread renews leases only while the event loop moves; the watch loop sees the end of the run.
ends: when the trainer declared the end, when no trainer lives for give_up_s, on SIGTERM (drained), on a dead engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, Protocol

from nbehind.config import Config
from producer_svc.assemble import build_group
from producer_svc.errors import GeneratorError, ProducerError, RewardError, StartTimeout
from producer_svc.generation import Refused
from producer_svc.generator import Completion, Generator
from producer_svc.keeper import Keeper
from producer_svc.telemetry import Telemetry
from rollout_queue.errors import OutOfMemory, QueueError, TooLarge
from rollout_queue.messages import CommitResult, Group, Lease, Version
from rollout_queue.queue import ProducerQueue
from weight_sync.staged import StagedWeights

log = logging.getLogger(__name__)

LEASE_BLOCK_S = 1.0
WATCH_S = 1.0
FULL_RETRY_S = 0.5


class Scorer(Protocol):
    async def score(self, request: Any, completions: list[Completion]) -> tuple[Any, Any]: ...


class Swapped(Protocol):
    """What the service tells the receiver."""

    def swapped(self, version: Version) -> None: ...

    def check(self) -> None: ...


class ProducerService:
    """The loops over their collaborators; see the picture above. Lives in one event loop."""

    def __init__(
        self,
        name: str,
        config: Config,
        queue: ProducerQueue,
        generator: Generator,
        scorer: Scorer,
        telemetry: Telemetry,
    ) -> None:
        self.name = name
        self._config = config
        self._queue = queue
        self._generator = generator
        self._scorer = scorer
        self._telemetry = telemetry
        self.version: Version | None = None
        self._staged: asyncio.Queue[StagedWeights] = asyncio.Queue()
        self._serving: dict[asyncio.Task[None], Lease] = {}
        self._changed = asyncio.Event()  # a slot became free, or the version changed
        self._leaving = asyncio.Event()
        self._failure: BaseException | None = None
        self.exit_reason = ""

    # --- the flow
    async def run(self, receiver: Swapped, keeper: Keeper) -> str:
        """Serve until the end; returns the reason. Raises what killed a loop."""
        leasing = asyncio.create_task(self._lease_loop())
        others = [asyncio.create_task(loop) for loop in (self._swap_loop(receiver), self._watch_loop(receiver, keeper))]
        leaving = asyncio.create_task(self._leaving.wait())
        try:
            done, _ = await asyncio.wait([leaving, leasing, *others], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {leaving}:
                task.result()
                if not self._leaving.is_set():
                    raise ProducerError("a loop of the producer ended early")
            self._changed.set()
            await asyncio.wait([leasing], timeout=2 * LEASE_BLOCK_S)  # a call under way may still bring a lease
            await self._drain()
        finally:
            await self._cancel([leaving, leasing, *others, *self._serving])
        return self.exit_reason

    def leave(self, reason: str) -> None:
        """Stop leasing, drain, and end."""
        self.exit_reason = self.exit_reason or reason
        self._leaving.set()

    def stage(self, staged: StagedWeights) -> None:
        """New weights are here (called in the event loop)."""
        self._telemetry.received(staged.manifest.total_bytes, staged.transfer_s)
        self._staged.put_nowait(staged)

    def leases(self) -> list[Lease]:
        return list(self._serving.values())

    async def _lease_loop(self) -> None:
        behind = False  # newer weights are on their way, and the queued requests may need them
        while not self._leaving.is_set():
            self._changed.clear()
            free = self._config.producer.max_requests - len(self._serving)
            if free <= 0 or self.version is None:
                await self._changed.wait()
                continue
            block_s = 0.0 if behind else LEASE_BLOCK_S
            inc, number, _ = self.version
            leases = await asyncio.to_thread(self._queue.lease, self.name, number, free, block_s, inc)
            for lease in leases:
                await self._begin(lease)
            if not leases:
                behind = await self._wait_if_behind()

    async def _begin(self, lease: Lease) -> None:
        if self._leaving.is_set():
            await self._return(lease)
            return
        task = asyncio.create_task(self._serve(lease), name=f"serve {lease.request.id}")
        self._serving[task] = lease
        task.add_done_callback(self._served)

    async def _wait_if_behind(self) -> bool:
        """Nothing to lease: is it because of our version? Then a swap, not a new request, is what unblocks us."""
        state = await asyncio.to_thread(self._queue.state)
        if self.version is None or self.version[:2] >= (state.incarnation, state.published):
            return False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), LEASE_BLOCK_S)
        return True

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.pop(task, None)
        self._changed.set()
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
            self.leave("error")

    async def _swap_loop(self, receiver: Swapped) -> None:
        while True:
            staged = await self._staged.get()
            while not self._staged.empty():
                staged = self._staged.get_nowait()
            start = time.monotonic()
            await self._generator.load(staged)
            self.version = staged.version
            await asyncio.to_thread(receiver.swapped, staged.version)
            self._telemetry.swapped(staged.version, time.monotonic() - start)
            self._changed.set()

    async def _watch_loop(self, receiver: Swapped, keeper: Keeper) -> None:
        """Sees the end of the run, lost leases, and threads that died."""
        while True:
            keeper.beat(self.leases())
            receiver.check()
            keeper.check()
            self._drop(keeper.take_lost())
            if keeper.ended():
                self.leave(keeper.ended())
            await asyncio.sleep(min(WATCH_S, self._config.producer.lease_s / 10))

    def _drop(self, lost: list[Lease]) -> None:
        for task, lease in list(self._serving.items()):
            if lease in lost:
                log.info(
                    "request %s is not ours any more (attempt %d); dropped", lease.request.id, lease.request.attempt
                )
                self._telemetry.lost()
                task.cancel()

    # --- one request
    async def _serve(self, lease: Lease) -> None:
        timeout_s = self._config.producer.request_timeout_s
        started_at = time.time()
        try:
            completions = await asyncio.wait_for(self._generator.generate(lease.request), timeout_s)
            generated_at = time.time()
            rewards, parts = await self._scorer.score(lease.request, completions)
            group = build_group(lease, self.name, completions, rewards, parts, (started_at, generated_at, time.time()))
            start = time.monotonic()
            result = await self._commit(lease, group)
            self._telemetry.committed(result, group, time.monotonic() - start)
        except TimeoutError:
            await self._give_back(lease, f"generation took longer than producer.request_timeout_s = {timeout_s:g} s")
        except (RewardError, Refused, TooLarge) as error:
            await self._give_back(lease, str(error))
        except GeneratorError:  # ends this producer; not the request's fault
            await self._return(lease)
            raise

    async def _commit(self, lease: Lease, group: Group) -> CommitResult:
        """Push; while Redis is full, wait: the lease is renewed meanwhile and the trainer frees memory."""
        while True:
            try:
                return await asyncio.to_thread(self._queue.commit, lease, group)
            except OutOfMemory as error:
                self._telemetry.full(str(error))
                await asyncio.sleep(FULL_RETRY_S)

    async def _give_back(self, lease: Lease, failure: str) -> None:
        log.warning("request %s failed: %s", lease.request.id, failure)
        self._telemetry.failed()
        await asyncio.to_thread(self._queue.give_back, lease, failure)

    # --- the end
    async def _drain(self) -> None:
        """Let running requests finish within drain_s, unless the run is over or the engine is dead; then give back the rest."""
        if self._serving and self.exit_reason == "interrupted":
            await asyncio.wait(list(self._serving), timeout=self._config.run.drain_s)
        rest = self.leases()
        await self._cancel(list(self._serving))
        for lease in rest:
            await self._return(lease)
        if self._failure is not None:
            raise self._failure

    async def _return(self, lease: Lease) -> None:
        """Give a lease back that did not fail, so that another producer can begin at once."""
        try:
            await asyncio.to_thread(self._queue.give_back, lease)
        except QueueError as error:
            log.warning("request %s could not be given back: %s", lease.request.id, error)

    @staticmethod
    async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def start_in_time(generator: Generator, timeout_s: float) -> None:
    """Start the engine within `timeout_s`."""
    try:
        await asyncio.wait_for(generator.start(), timeout_s)
    except TimeoutError as error:
        raise StartTimeout(f"the engine did not start within producer.start_timeout_s = {timeout_s:g} s") from error
