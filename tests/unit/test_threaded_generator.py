"""The shell around an engine thread, with an engine made of a few lines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from producer_svc.errors import GeneratorError, StartTimeout
from producer_svc.generation import Refused
from producer_svc.generator import Completion
from producer_svc.threaded_generator import ThreadedGenerator
from rollout_queue.messages import Finish, Request, RequestId, Sampling, Version
from weight_sync.manifest import Manifest
from weight_sync.staged import StagedWeights

WAIT_S = 20.0


def request(number: int, steps: int = 1) -> Request:
    return Request(RequestId(0, number), 1, 0, 0, np.zeros(1, np.int32), Sampling(1, steps), "")


def staged(number: int) -> StagedWeights:
    return StagedWeights(Version(1, number, ""), Manifest((), 0), Path("unused"))


class Steps:
    """An engine that counts down; `events` is what it was told, in order. A negative length fails in add()."""

    def __init__(self) -> None:
        self.tokens = 0
        self.events: list[str] = []
        self.left: dict[int, int] = {}
        self.gate = threading.Event()  # steps happen only when it is set
        self.gate.set()
        self.fail_in = ""

    def _note(self, event: str) -> None:
        self.events.append(event)
        if self.fail_in == event.split()[0]:
            raise ZeroDivisionError("deliberate")

    def open(self) -> None:
        self._note("open")

    def add(self, key: int, request: Request) -> None:
        self._note(f"add {request.id.slot}")
        if request.sampling.max_new_tokens < 0:
            raise Refused("negative")
        self.left[key] = request.sampling.max_new_tokens

    def abort(self, key: int) -> None:
        self._note("abort")
        del self.left[key]

    def busy(self) -> bool:
        return bool(self.left)

    def step(self) -> Iterable[tuple[int, list[Completion]]]:
        self.gate.wait(0.01)
        if not self.gate.is_set():
            return []
        self._note("step")
        self.tokens += len(self.left)
        self.left = {key: n - 1 for key, n in self.left.items()}
        ended = [key for key, n in self.left.items() if n <= 0]
        for key in ended:
            del self.left[key]
        done = Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), (), Finish.LENGTH)
        return [(key, [done]) for key in ended]

    def check(self, staged: StagedWeights) -> None:
        if staged.version.number < 0:
            raise Refused("negative version")

    def swap(self, staged: StagedWeights, keep_cache: bool) -> None:
        self._note(f"swap {staged.version.number}{' keeps the cache' if keep_cache else ''}")

    def close(self) -> None:
        self.events.append("close")


async def started(in_flight: str = "keep") -> tuple[Steps, ThreadedGenerator]:
    engine = Steps()
    generator = ThreadedGenerator(lambda: engine, in_flight, WAIT_S)
    await generator.start()
    await generator.load(staged(0))
    return engine, generator


async def begun(engine: Steps, number: int) -> None:
    while f"add {number}" not in engine.events:
        await asyncio.sleep(0.001)


async def test_keep_swaps_while_requests_run() -> None:
    engine, generator = await started("keep")
    engine.gate.clear()
    running = asyncio.create_task(generator.generate(request(1, 3)))
    await begun(engine, 1)
    await asyncio.wait_for(generator.load(staged(1)), WAIT_S)
    assert not running.done()
    engine.gate.set()
    await asyncio.wait_for(running, WAIT_S)
    assert engine.events == ["open", "swap 0", "add 1", "swap 1", "step", "step", "step"]
    assert generator.progress() == 3
    await generator.close()


async def test_keep_cache_is_passed_on() -> None:
    engine, generator = await started("keep_cache")
    assert engine.events == ["open", "swap 0 keeps the cache"]
    await generator.close()


async def test_abort_begins_anew_what_runs_in_its_old_order() -> None:
    engine, generator = await started("abort")
    engine.gate.clear()
    running = [asyncio.create_task(generator.generate(request(n, 2))) for n in (1, 2)]
    await begun(engine, 2)
    with pytest.raises(GeneratorError, match="negative version"):  # refused weights abort nothing
        await asyncio.wait_for(generator.load(staged(-1)), WAIT_S)
    assert "abort" not in engine.events
    swap = asyncio.create_task(generator.load(staged(1)))
    await asyncio.sleep(0)
    later = asyncio.create_task(generator.generate(request(3)))
    await asyncio.wait_for(swap, WAIT_S)
    engine.gate.set()
    await asyncio.wait_for(asyncio.gather(*running, later), WAIT_S)
    told = [e for e in engine.events if e != "step"]
    assert told == ["open", "swap 0", "add 1", "add 2", "abort", "abort", "swap 1", "add 1", "add 2", "add 3"]
    await generator.close()


async def test_a_call_cancelled_after_it_began_anew_is_aborted_in_the_engine() -> None:
    engine, generator = await started("abort")
    engine.gate.clear()
    running = asyncio.create_task(generator.generate(request(1, 100)))
    await begun(engine, 1)
    await asyncio.wait_for(generator.load(staged(1)), WAIT_S)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    while engine.left:
        await asyncio.sleep(0.001)
    assert engine.events == ["open", "swap 0", "add 1", "abort", "swap 1", "add 1", "abort"]
    await generator.close()


async def test_finish_swaps_between_what_runs_and_what_comes() -> None:
    engine, generator = await started("finish")
    engine.gate.clear()
    running = asyncio.create_task(generator.generate(request(1, 2)))
    await begun(engine, 1)
    swap = asyncio.create_task(generator.load(staged(1)))
    await asyncio.sleep(0)
    later = asyncio.create_task(generator.generate(request(2)))
    await asyncio.sleep(0.05)
    engine.gate.set()
    await asyncio.wait_for(asyncio.gather(running, swap, later), WAIT_S)
    assert engine.events == ["open", "swap 0", "add 1", "step", "step", "swap 1", "add 2", "step"]
    await generator.close()


async def test_cancelled_calls_are_aborted_wherever_they_are() -> None:
    engine, generator = await started("finish")
    engine.gate.clear()
    running = asyncio.create_task(generator.generate(request(1, 100)))
    await begun(engine, 1)
    swap = asyncio.create_task(generator.load(staged(1)))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(generator.generate(request(2)))
    await asyncio.sleep(0.02)
    waiting.cancel()
    running.cancel()
    await asyncio.wait_for(swap, WAIT_S)  # nothing runs any more
    await asyncio.wait_for(asyncio.gather(running, waiting, return_exceptions=True), WAIT_S)
    assert engine.events == ["open", "swap 0", "add 1", "abort", "swap 1"]
    await generator.close()


async def test_a_refused_call_leaves_the_engine_alone() -> None:
    _, generator = await started()
    with pytest.raises(GeneratorError, match="negative"):
        await generator.generate(request(1, -1))
    with pytest.raises(GeneratorError, match="negative version"):
        await generator.load(staged(-1))
    assert len(await generator.generate(request(2))) == 1
    await generator.close()


@pytest.mark.parametrize("place", ["add", "step", "swap"])
async def test_a_failure_reaches_every_call(place: str) -> None:
    engine, generator = await started("finish")
    engine.gate.clear()
    running = asyncio.create_task(generator.generate(request(1, 3)))
    await begun(engine, 1)
    engine.fail_in = place
    others = [asyncio.create_task(c) for c in (generator.generate(request(2)), generator.load(staged(1)))]
    await asyncio.sleep(0)
    engine.gate.set()
    outcomes = await asyncio.wait_for(asyncio.gather(running, *others, return_exceptions=True), WAIT_S)
    failed = [o for o in outcomes if isinstance(o, GeneratorError)]
    assert failed and all("deliberate" in str(o) for o in failed)
    with pytest.raises(GeneratorError, match="deliberate"):
        await generator.generate(request(3))
    await generator.close()
    assert engine.events[-1] == "close"


async def test_a_failed_start_is_raised_by_start() -> None:
    engine = Steps()
    engine.fail_in = "open"
    generator = ThreadedGenerator(lambda: engine, "keep", WAIT_S)
    with pytest.raises(GeneratorError, match="not started"):
        await generator.generate(request(1))
    with pytest.raises(GeneratorError, match="deliberate"):
        await generator.start()
    with pytest.raises(GeneratorError, match="started before"):
        await generator.start()
    await generator.close()


async def test_a_slow_start_times_out() -> None:
    hold = threading.Event()

    class Slow(Steps):
        def open(self) -> None:
            hold.wait(WAIT_S)

    generator = ThreadedGenerator(Slow, "keep", 0.05)
    with pytest.raises(StartTimeout, match=r"0\.05 s"):
        await generator.start()
    hold.set()
    await asyncio.wait_for(generator.close(), WAIT_S)


async def test_close_ends_open_calls() -> None:
    engine, generator = await started()
    engine.gate.clear()
    running = asyncio.create_task(generator.generate(request(1, 100)))
    await begun(engine, 1)
    await asyncio.wait_for(generator.close(), WAIT_S)
    with pytest.raises(GeneratorError, match="closed"):
        await asyncio.wait_for(running, WAIT_S)
    await generator.close()
