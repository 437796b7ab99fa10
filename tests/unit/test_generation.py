"""What real generators accept and how they draw, without an engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from nbehind.config import ModelConfig, ProducerConfig
from producer_svc.errors import GeneratorError
from producer_svc.generation import check_spans, end_ids, max_new_tokens
from producer_svc.sampling import draw, sampled_logprobs, uniforms
from producer_svc.vllm_env import preloads, tunables, vllm_environment
from rollout_queue.messages import Request, RequestId, Sampling, Version

A, B = Version(1, 0, "a"), Version(1, 1, "b")


def request(seed: int = 0, samples: int = 2, prompt: int = 3) -> Request:
    return Request(RequestId(0, 0), 1, 0, seed, np.zeros(prompt, np.int32), Sampling(samples, 10), "")


def test_spans_must_cover_every_token_once() -> None:
    assert check_spans([(A, 0, 2), (B, 2, 5)], 5) == ((A, 0, 2), (B, 2, 5))
    for spans in ([], [(A, 0, 4)], [(A, 1, 5)], [(A, 0, 3), (B, 2, 5)], [(A, 0, 0), (B, 0, 5)], [(A, 0, 6)]):
        with pytest.raises(GeneratorError, match="cover"):
            check_spans(spans, 5)


def test_the_context_caps_what_was_asked_for() -> None:
    assert [max_new_tokens(request(prompt=p), 16) for p in (3, 6, 7, 15)] == [10, 10, 9, 1]


def test_end_ids_of_a_folder(tmp_path: Path) -> None:
    assert end_ids(tmp_path) == frozenset()
    path = tmp_path / "generation_config.json"
    for text, ids in (('{"eos_token_id": 7}', {7}), ('{"eos_token_id": [7, 9]}', {7, 9}), ("{}", set())):
        path.write_text(text)
        assert end_ids(tmp_path) == ids
    path.write_text("{")
    with pytest.raises(GeneratorError, match=r"generation_config\.json"):
        end_ids(tmp_path)


def test_top_k_comes_before_top_p() -> None:
    # p = .4 .3 .2 .1; top-k 3 leaves .444 .333 .222; top-p .5 keeps the first two: .571 .429
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    out = sampled_logprobs(logits, Sampling(1, 1, top_k=3, top_p=0.5)).exp()[0].tolist()
    assert out == pytest.approx([4 / 7, 3 / 7, 0, 0])
    cold = sampled_logprobs(logits, Sampling(1, 1, temperature=0.5)).exp()[0].tolist()
    assert cold == pytest.approx([16 / 30, 9 / 30, 4 / 30, 1 / 30])


def test_draw_inverts_the_distribution_and_never_takes_what_is_cut_off() -> None:
    logprobs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).log().expand(5, -1)
    edges = torch.tensor([0.0, 0.2499, 0.2501, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(logprobs, edges).tolist() == [1, 1, 3, 3, 3]


def test_random_numbers_belong_to_request_and_sample() -> None:
    assert torch.equal(uniforms(request(), 5)[1], uniforms(request(samples=4), 5)[1])
    assert torch.equal(uniforms(request(), 5), uniforms(request(), 9)[:, :5])
    assert not torch.equal(uniforms(request(0), 5)[1], uniforms(request(1), 5)[0])


def test_environment_keeps_what_the_user_set() -> None:
    env = vllm_environment(ProducerConfig(threads=3), ModelConfig(), {"VLLM_LOGGING_LEVEL": "DEBUG"})
    assert env["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert preloads("/some/lib.so", 1).split(":")[-1] == "/some/lib.so"
    once = preloads("", 2)
    assert preloads(once, 2) == once


def test_large_pages_are_added_to_the_tunables_of_the_c_library() -> None:
    assert tunables("") == "glibc.malloc.hugetlb=1"
    assert tunables("glibc.malloc.arena_max=2") == "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"
    assert tunables("glibc.malloc.hugetlb=0:glibc.malloc.perturb=1") == "glibc.malloc.hugetlb=0:glibc.malloc.perturb=1"
    assert tunables(tunables("")) == tunables("")
