"""A bfloat16 engine under a float32 trainer: cast by the sender, sent by the real channel, equal to a fresh engine.

Each test starts one engine. Before any update it is a fresh engine on the weights of its model folder, so when the same
weights come back as an update its outputs must be the same, bit for bit. Other weights are compared with float64 on the
rounded weights: there the arithmetic of bfloat16 (8 bits) differs, by BF16_TOLERANCE at most.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import redis
import torch

from nbehind.config import ModelConfig
from producer_svc.generator import Completion
from rollout_queue.keys import Keys
from rollout_queue.messages import Request
from tests.generator_rig import CONTEXT, PRODUCER, SAMPLING, check_greedy, request, tiny_model
from weight_sync.channel import SyncSettings
from weight_sync.publisher import Publisher
from weight_sync.receiver import Receiver
from weight_sync.staged import StagedWeights

# Of a logprob, or between the logits of two tokens, against float64. The test's weights are large, so that distributions
# are sharp: 0.64 is the most that was seen with them, 0.28 with a real model of 135 M parameters.
BF16_TOLERANCE = 1.0
BF16_MEAN = 0.2
WAIT_S = 120.0
HELLO = {"dtype": "bfloat16", "tokenizer": "t", "model": "m"}
ASKED = [request(1, samples=1, length=32, top_k=1), *(request(n, samples=4, length=24) for n in range(2, 5))]


@contextmanager
def channel(client: redis.Redis, keys: Keys) -> Iterator[tuple[Publisher, SimpleQueue[StagedWeights], Receiver]]:
    arrived: SimpleQueue[StagedWeights] = SimpleQueue()
    publisher = Publisher(client, keys, 1, HELLO, SyncSettings())
    receiver = Receiver(client, keys, "p", HELLO, SyncSettings(), arrived.put)
    publisher.start()
    receiver.start()
    try:
        yield publisher, arrived, receiver
    finally:
        receiver.close()
        publisher.close()


@contextmanager
def engine(folder: Path) -> Iterator[Any]:
    from producer_svc.vllm_generator import VllmBackend

    backend = VllmBackend(folder, ModelConfig(max_context=CONTEXT, dtype="bfloat16"), PRODUCER, SAMPLING)
    backend.open()
    try:
        yield backend
    finally:
        backend.close()


def answers(backend: Any, asked: Sequence[Request]) -> list[list[Completion]]:
    found: dict[int, list[Completion]] = {}
    for key, one in enumerate(asked):
        backend.add(key, one)
    while backend.busy():
        found.update(backend.step())
    return [found[key] for key in range(len(asked))]


def same(some: list[list[Completion]], others: list[list[Completion]]) -> bool:
    pairs = [pair for a, b in zip(some, others, strict=True) for pair in zip(a, b, strict=True)]
    return all(np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs) for a, b in pairs)


def errors(model: Any, groups: list[list[Completion]]) -> np.ndarray:
    """[tokens] difference of the logprobs from those of `model`."""
    out = []
    for asked, group in zip(ASKED[1:], groups[1:], strict=True):
        for c in group:
            logprobs = torch.from_numpy(logits_of(model, asked, c)).log_softmax(-1).numpy()
            out.append(np.abs(np.take_along_axis(logprobs, c.token_ids[:, None].astype(int), 1)[:, 0] - c.logprobs))
    return np.concatenate(out)


def logits_of(model: Any, asked: Request, c: Completion) -> np.ndarray:
    """[T, V]"""
    ids = np.concatenate([asked.prompt_ids, c.token_ids]).astype(np.int64)
    with torch.no_grad():
        logits: np.ndarray = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    return logits[len(asked.prompt_ids) - 1 : -1]


@pytest.mark.vllm
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_bfloat16_engine_under_a_float32_trainer(
    tied: bool, tmp_path: Path, redis_client: redis.Redis, keys: Keys
) -> None:
    models = [tiny_model(seed, tied) for seed in range(3)]  # float32
    rounded = [copy.deepcopy(model).bfloat16().double() for model in models]
    models[0].save_pretrained(tmp_path / "model")
    with engine(tmp_path / "model") as backend, channel(redis_client, keys) as (publisher, arrived, receiver):
        seen = {0: answers(backend, ASKED)}  # of a fresh engine
        for number, which in enumerate((1, 2, 0, 1)):
            publisher.publish(number, models[which].named_parameters())
            staged = arrived.get(timeout=WAIT_S)
            assert {spec.dtype for spec in staged.manifest.tensors} == {"bfloat16"}
            backend.check(staged)
            backend.swap(staged, keep_cache=False)
            receiver.swapped(staged.version)
            groups = answers(backend, ASKED)
            assert all(c.spans[0][0] == staged.version and len(c.spans) == 1 for group in groups for c in group)
            assert which not in seen or same(groups, seen[which]), (
                f"update {number} is not as it was on weights {which}"
            )
            seen[which] = groups
            check_greedy(logits_of(rounded[which], ASKED[0], groups[0][0]), groups[0][0].token_ids, BF16_TOLERANCE)
            found = errors(rounded[which], groups)
            assert found.max() < BF16_TOLERANCE and found.mean() < BF16_MEAN, (found.max(), found.mean())
            assert errors(rounded[which - 1], groups).max() > 2 * BF16_TOLERANCE, "other weights are told apart"
        publisher.check()
        receiver.check()
