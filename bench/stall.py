"""What weight updates cost a producer: `python -m bench.stall [--models demo smollm2] [--modes keep] [--json FILE]`.

A real vLLM engine, pinned to the last core, generates without a pause; the process that publishes is pinned to the first
core. Periods without and with an update at their beginning take turns, so that both see the same machine. A version goes
through the real weight channel: staged, sent, verified, swapped in between two engine steps. Then, with nothing running,
our swap takes turns with the engine's own load of the same weights from its model folder.

Figures of a row, medians: generated tokens/s without and with updates, and the ratio of neighbouring periods; the CPU
seconds that an update costs the engine's process (swap, KV caches computed again, verification), and the ratio that this
gives when the engine has its core for itself: other load on the machine hardly changes it. The swap while generating is
the time that no step of the engine can run. The swap and the engine's own load while idle, and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nbehind.config import ModelConfig, ProducerConfig, SamplingConfig
from nbehind.embedded import EmbeddedRedis
from nbehind.models import prepare_model
from producer_svc.vllm_env import vllm_environment
from rollout_queue.connection import connect
from rollout_queue.keys import Keys
from rollout_queue.messages import Request, RequestId, Sampling
from weight_sync.channel import SyncSettings
from weight_sync.staged import StagedWeights

HELLO = {"dtype": "float32"}
DEADLINE_S = 300.0
LOADS = 6  # idle swaps and local loads, taken in turn


@dataclass(frozen=True, slots=True)
class Load:
    """What is generated: requests of `samples` completions each, drawn without end. Lengths in tokens."""

    every_s: float  # a period
    requests: int  # in flight
    samples: int
    prompt: int
    shortest: int
    longest: int


LOADS_OF = {
    "demo": Load(5.0, requests=16, samples=8, prompt=12, shortest=2, longest=8),
    "smollm2": Load(15.0, requests=4, samples=8, prompt=48, shortest=8, longest=64),
}


# --- the engine's process
def engine_process(pipe: Connection, folder: Path, url: str, load: Load, mode: str) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    asyncio.run(Engine(pipe, folder, url, load, mode).run())


class Engine:
    """Generates all the time, takes what the channel brings, and answers the parent's questions."""

    def __init__(self, pipe: Connection, folder: Path, url: str, load: Load, mode: str) -> None:
        from producer_svc.threaded_generator import ThreadedGenerator
        from producer_svc.vllm_generator import VllmBackend
        from weight_sync.receiver import Receiver

        samples = SamplingConfig(num_generations=load.samples, max_new_tokens=load.longest)
        model, producer = ModelConfig(path=str(folder), max_context=256), producer_config(load, mode)
        swaps = self.swaps = list[float]()

        class Timed(VllmBackend):
            def swap(self, staged: StagedWeights, keep_cache: bool) -> None:
                began = time.perf_counter()
                super().swap(staged, keep_cache)
                swaps.append(time.perf_counter() - began)

        self.backend = Timed(folder, model, producer, samples)
        self.generator = ThreadedGenerator(lambda: self.backend, mode, DEADLINE_S)
        self.pipe, self.load, self.vocabulary = pipe, load, vocabulary_of(folder)
        self.arrived: asyncio.Queue[StagedWeights] = asyncio.Queue()
        self.client = connect(url)
        self.receiver = Receiver(
            self.client, Keys("bench"), "engine", HELLO, SyncSettings(),
            self.stage,
        )  # fmt: skip

    async def run(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.generator.start()
        self.receiver.start()
        swapping = asyncio.create_task(self.take_weights())
        working: list[asyncio.Task[None]] = []
        while (question := await asyncio.to_thread(self.pipe.recv)) != "close":
            for task in (swapping, *working):
                if task.done():
                    task.result()
            if question == "work":
                working = [asyncio.create_task(self.work(i)) for i in range(self.load.requests)]
            elif question == "rest":
                for task in working:
                    task.cancel()
                await asyncio.gather(*working, return_exceptions=True)
                working = []
            elif question == "local":
                began = time.perf_counter()  # nothing runs, so the engine's thread waits for a command
                self.backend._engine.collective_rpc("reload_weights")
                self.pipe.send(time.perf_counter() - began)
                continue
            self.pipe.send((self.generator.progress(), time.perf_counter(), time.process_time(), list(self.swaps)))
        for task in (swapping, *working):
            task.cancel()
        self.receiver.close()
        await self.generator.close()
        self.client.close()

    def stage(self, staged: StagedWeights) -> None:
        self.loop.call_soon_threadsafe(self.arrived.put_nowait, staged)

    async def take_weights(self) -> None:
        while True:
            staged = await self.arrived.get()
            await self.generator.load(staged)
            await asyncio.to_thread(self.receiver.swapped, staged.version)

    async def work(self, number: int) -> None:
        rng, load = np.random.default_rng(number), self.load
        while True:
            ids = rng.integers(10, self.vocabulary, load.prompt).astype(np.int32)
            sampling = Sampling(load.samples, int(rng.integers(load.shortest, load.longest + 1)))
            await self.generator.generate(
                Request(RequestId(0, number), 1, 0, int(rng.integers(2**31)), ids, sampling, "")
            )


def producer_config(load: Load, mode: str) -> ProducerConfig:
    return ProducerConfig(max_requests=load.requests, threads=1, kv_cache_gb=0.5, in_flight=mode)  # type: ignore[arg-type]


def vocabulary_of(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"]) - 10


# --- the publishing process
class Count(NamedTuple):
    """The engine's answer: tokens so far, its clock, CPU seconds of its process, seconds of every swap."""

    tokens: int
    at: float
    cpu_s: float
    swaps: list[float]


class Period(NamedTuple):
    """Generated tokens per second, and per CPU second."""

    per_s: float
    per_cpu_s: float
    cpu_s: float


class Bench:
    """One engine process, and a publisher that gives it versions."""

    def __init__(self, pipe: Connection, publisher: Any, named: list[tuple[str, Any]], load: Load) -> None:
        self.pipe, self.publisher, self.named, self.load = pipe, publisher, named, load
        self.number = -1

    def ask(self, question: str) -> Any:
        self.pipe.send(question)
        if not self.pipe.poll(DEADLINE_S):
            raise SystemExit(f"bench: the engine did not answer {question!r} within {DEADLINE_S:g} s")
        return self.pipe.recv()

    def update(self, wait: bool) -> None:
        """Publish the next version; with `wait` until the engine has swapped it in."""
        swaps = len(Count(*self.ask("count")).swaps) if wait else 0
        self.number += 1
        self.publisher.publish(self.number, self.named)
        end = time.monotonic() + DEADLINE_S
        while wait and len(Count(*self.ask("count")).swaps) <= swaps:
            self.publisher.check()
            if time.monotonic() > end:
                raise SystemExit(f"bench: no swap; {self.publisher.status()}")
            time.sleep(0.05)

    def period(self, update: bool) -> Period:
        """One period, with an update at its beginning or without."""
        before = Count(*self.ask("count"))
        if update:
            self.update(wait=False)
        time.sleep(max(0.0, self.load.every_s - (time.perf_counter() - before.at)))
        after = Count(*self.ask("count"))
        tokens = after.tokens - before.tokens
        cpu_s = after.cpu_s - before.cpu_s
        return Period(tokens / (after.at - before.at), tokens / cpu_s, cpu_s)

    def measure(self, rounds: int) -> dict[str, Any]:
        self.update(wait=True)
        self.ask("work")
        time.sleep(self.load.every_s)
        seen = len(Count(*self.ask("count")).swaps)
        pairs = [(self.period(False), self.period(True)) for _ in range(rounds)]
        busy = Count(*self.ask("rest")).swaps[seen:]
        idle, local = [], []
        for _ in range(LOADS):
            self.update(wait=True)
            idle.append(Count(*self.ask("count")).swaps[-1])
            local.append(self.ask("local"))
        return {
            "tokens_per_s_without": statistics.median(a.per_s for a, _ in pairs),
            "tokens_per_s_with": statistics.median(b.per_s for _, b in pairs),
            "ratio": statistics.median(b.per_s / a.per_s for a, b in pairs),
            "update_cpu_s": (cost := statistics.median(b.cpu_s * (1 - b.per_cpu_s / a.per_cpu_s) for a, b in pairs)),
            "ratio_on_an_idle_core": 1 - cost / self.load.every_s,
            "updates": len(busy),
            "swap_busy_s": statistics.median(busy),
            "swap_idle_s": statistics.median(idle[1:]),
            "local_load_s": statistics.median(local[1:]),
            "swap_over_local_load": statistics.median(idle[1:]) / statistics.median(local[1:]),
        }


@contextlib.contextmanager
def started(folder: Path, load: Load, mode: str) -> Iterator[Bench]:
    import torch

    from weight_sync.publisher import Publisher

    torch.set_num_threads(1)
    os.environ.update(vllm_environment(producer_config(load, mode), ModelConfig(path=str(folder))))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place, EmbeddedRedis(place, max_mb=64) as server:
        client = connect(server.url)
        publisher = Publisher(client, Keys("bench"), 1, HELLO, SyncSettings())
        publisher.start()
        ours, theirs = context.Pipe()
        process = context.Process(target=engine_process, args=(theirs, folder, server.url, load, mode), daemon=True)
        process.start()
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        try:
            yield Bench(ours, publisher, weights_of(folder), load)
            ours.send("close")
            process.join(60)
        finally:
            process.kill()
            publisher.close()
            client.close()


def weights_of(folder: Path) -> list[tuple[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return list(model.named_parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(LOADS_OF), choices=list(LOADS_OF), help="what generates")
    parser.add_argument("--modes", nargs="+", default=["keep"], help="producer.in_flight")
    parser.add_argument("--rounds", type=int, default=6, help="periods without, and as many with updates")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    arguments = parser.parse_args()
    cores = os.sched_getaffinity(0)
    rows = []
    for name in arguments.models:
        for mode in arguments.modes:
            load = LOADS_OF[name]
            os.sched_setaffinity(0, cores)
            with started(prepare_model(name), load, mode) as bench:
                row = {"model": name, "in_flight": mode, "every_s": load.every_s, **bench.measure(arguments.rounds)}
            rows.append(rounded(row))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
