"""What the fake generator does with running generations at a weight update."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from producer_svc.fake_generator import FakeGenerator
from producer_svc.generator import Completion
from rollout_queue.messages import Request, RequestId, Sampling, Version
from trainer_svc.fake_engine import WEIGHT_NAME, initial_weights, token_logprobs
from weight_sync.manifest import Manifest
from weight_sync.staged import StagedWeights

LENGTH = 16
WAIT_S = 30.0


def weights(folder: Path, number: int) -> StagedWeights:
    values = torch.from_numpy(initial_weights(number))
    path = folder / f"v{number}"
    path.write_bytes(values.numpy().tobytes())
    return StagedWeights(Version(1, number, f"c{number}"), Manifest.of([(WEIGHT_NAME, values)]), path)


def request(seed: int) -> Request:
    return Request(
        RequestId(0, 0), 1, 0, seed, np.zeros(1, np.int32), Sampling(4, LENGTH), "", {"gt_answer": "x" * LENGTH}
    )


def spans_of(group: list[Completion]) -> set[tuple[int, ...]]:
    return {tuple(version.number for version, _, _ in c.spans) for c in group}


async def one_swap(folder: Path, in_flight: str) -> tuple[list[Completion], list[Completion], int]:
    """Groups begun before and after load(1) was called, and the tokens drawn in all."""
    generator = FakeGenerator(base_s=1.5, in_flight=in_flight)
    await generator.load(weights(folder, 0))
    first = asyncio.create_task(generator.generate(request(1)))
    while not generator.progress():
        await asyncio.sleep(0.01)
    load = asyncio.create_task(generator.load(weights(folder, 1)))
    await asyncio.sleep(0)
    second = asyncio.create_task(generator.generate(request(2)))
    groups = await asyncio.wait_for(asyncio.gather(first, second), WAIT_S)
    await load
    return *groups, generator.progress()


@pytest.mark.parametrize(
    ("in_flight", "first"), [("keep", {(0, 1)}), ("keep_cache", {(0, 1)}), ("finish", {(0,)}), ("abort", {(1,)})]
)
async def test_spans_and_logprobs(tmp_path: Path, in_flight: str, first: set[tuple[int, ...]]) -> None:
    before, after, drawn = await one_swap(tmp_path, in_flight)
    assert spans_of(before) == first
    assert spans_of(after) == {(1,)}
    for completion in [*before, *after]:
        edges = [0, *(end for _, _, end in completion.spans)]
        assert edges[-1] == len(completion.token_ids)
        for (version, start, end), edge in zip(completion.spans, edges, strict=False):
            assert start == edge
            expected = token_logprobs(initial_weights(version.number), completion.token_ids[start:end])
            assert np.array_equal(completion.logprobs[start:end], expected)
    kept = sum(len(c.token_ids) for c in [*before, *after])
    assert drawn > kept if in_flight == "abort" else drawn == kept


async def test_a_load_that_waits_for_the_end_can_be_cancelled(tmp_path: Path) -> None:
    generator = FakeGenerator(base_s=0.4, in_flight="finish")
    await generator.load(weights(tmp_path, 0))
    running = asyncio.create_task(generator.generate(request(1)))
    await asyncio.sleep(0)
    load = asyncio.create_task(generator.load(weights(tmp_path, 1)))
    await asyncio.sleep(0)
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    group = await asyncio.wait_for(generator.generate(request(2)), WAIT_S)
    assert spans_of([*await running, *group]) == {(0,)}
