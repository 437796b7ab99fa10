"""A generator with tiny models whose logprobs are recomputed with transformers in float64; used by several test files."""

from __future__ import annotations

import asyncio
import copy
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nbehind.config import ModelConfig, ProducerConfig, SamplingConfig
from producer_svc.engines import make_generator
from producer_svc.generator import Completion, Generator
from rollout_queue.messages import Request, RequestId, Sampling, Version
from trainer_svc.fake_engine import WEIGHT_NAME, initial_weights
from weight_sync.manifest import Manifest
from weight_sync.staged import StagedWeights

VOCABULARY = 96
CONTEXT = 256
WAIT_S = 120.0
MODEL = ModelConfig(max_context=CONTEXT)
PRODUCER = ProducerConfig(kv_cache_gb=0.1, max_requests=8)
SAMPLING = SamplingConfig()
FP32_TOLERANCE = 1e-3  # of a logprob, against float64; 6e-5 is the most that was seen with a real model


def tiny_model(seed: int, tied: bool) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        initializer_range=0.3,  # large enough for distributions that are far from uniform
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = Qwen2ForCausalLM
    return model(config).eval()


def write_staged(named: list[tuple[str, torch.Tensor]], version: Version, path: Path) -> StagedWeights:
    manifest = Manifest.of(named)
    flat = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    views = manifest.views(flat)
    for name, tensor in named:
        views[name].copy_(tensor.detach())
    path.write_bytes(flat.numpy().tobytes())
    return StagedWeights(version, manifest, path)


def request(
    number: int, samples: int = 4, length: int = 24, prompt: int = 12, seed: int | None = None, **sampling: Any
) -> Request:
    ids = np.asarray([(number * 7 + 5 * i) % VOCABULARY for i in range(prompt)], dtype=np.int32)
    return Request(
        RequestId(0, number),
        1,
        0,
        number if seed is None else seed,
        ids,
        Sampling(samples, length, **sampling),
        str(number),
    )


class Rig:
    """A started generator, and weights for it by version number."""

    def __init__(self, kind: str, tied: bool, folder: Path) -> None:
        self.kind, self.tied, self.folder = kind, tied, folder
        self.models = [tiny_model(seed, tied) for seed in (1, 2)] if kind != "fake" else []
        self.exact = [copy.deepcopy(model).double() for model in self.models]
        self.model_folder = folder / "model"
        if self.models:
            tiny_model(0, tied).save_pretrained(self.model_folder)
        self.generator = self.make()
        asyncio.run(asyncio.wait_for(self.generator.start(), WAIT_S))

    def make(self, **producer: Any) -> Generator:
        settings = PRODUCER.model_copy(update={"backend": self.kind, "fake_generate_s": 0.3, **producer})
        return make_generator(self.model_folder, MODEL, settings, SAMPLING)

    def staged(self, number: int) -> StagedWeights:
        """Version `number` has the weights of model number % 2."""
        named = [(WEIGHT_NAME, torch.from_numpy(initial_weights(number)))]
        if self.models:
            named = list(self.models[number % 2].named_parameters())
        return write_staged(named, Version(1, number, f"c{number}"), self.folder / f"{number}.bin")

    def logprobs(self, asked: Request, completion: Completion, number: int) -> np.ndarray:
        """[T] of the completion under version `number`, by a plain forward pass in float64."""
        ids = np.concatenate([asked.prompt_ids, completion.token_ids])
        with torch.no_grad():
            logits = self.exact[number % 2](torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()
        rows = [filtered(row, asked.sampling) for row in logits[len(asked.prompt_ids) - 1 : -1]]
        return np.asarray([row[t] for row, t in zip(rows, completion.token_ids, strict=True)])

    def logprobs_of_two(self, asked: Request, completion: Completion, cut: int, old: int, new: int) -> np.ndarray:
        """[T] when tokens [0, cut) were drawn from `old` and the rest from `new` on the KV cache that `old` had left."""
        ids = torch.from_numpy(np.concatenate([asked.prompt_ids, completion.token_ids]).astype(np.int64))[None]
        fed = len(asked.prompt_ids) + cut - 1  # the last token before the cut was fed after the swap
        with torch.no_grad():
            first = self.exact[old % 2](ids[:, :fed], use_cache=True)
            second = self.exact[new % 2](ids[:, fed:], past_key_values=first.past_key_values)
        logits = torch.cat([first.logits[0], second.logits[0]]).numpy()
        rows = [filtered(row, asked.sampling) for row in logits[len(asked.prompt_ids) - 1 : -1]]
        return np.asarray([row[t] for row, t in zip(rows, completion.token_ids, strict=True)])

    async def generate(self, asked: Request) -> list[Completion]:
        return await asyncio.wait_for(self.generator.generate(asked), WAIT_S)

    async def load(self, number: int) -> None:
        await asyncio.wait_for(self.generator.load(self.staged(number)), WAIT_S)

    async def until(self, tokens: int) -> None:
        """Wait until so many more tokens were generated."""
        goal, end = self.generator.progress() + tokens, time.monotonic() + WAIT_S
        while self.generator.progress() < goal:
            assert time.monotonic() < end, "no progress"
            await asyncio.sleep(0.002)


def filtered(logits_V: np.ndarray, sampling: Sampling) -> np.ndarray:
    """[V] logprobs after temperature, top-k and top-p, written the slow and obvious way."""
    scaled = logits_V / sampling.temperature
    order = np.argsort(-scaled)
    kept = list(order[: sampling.top_k or len(order)])
    weights = np.exp(scaled - scaled.max())
    if sampling.top_p < 1:
        total, mass, nucleus = sum(weights[i] for i in kept), 0.0, list[int]()
        for i in kept:
            if nucleus and mass >= sampling.top_p * total:
                break
            nucleus.append(i)
            mass += weights[i]
        kept = nucleus
    out = np.full(len(logits_V), -np.inf)
    out[kept] = np.log(weights[kept] / sum(weights[kept]))
    return out


def check_greedy(logits_TV: np.ndarray, token_ids: np.ndarray, tolerance: float) -> None:
    """Every token is the best of its logits, or one that the tolerance does not tell from the best."""
    best_T = logits_TV.max(-1)
    gap_T = best_T - np.take_along_axis(logits_TV, token_ids[:, None].astype(np.int64), 1)[:, 0]
    assert gap_T.max() < tolerance, f"token {int(gap_T.argmax())} is {gap_T.max():g} below the best"


def check_shape(asked: Request, completions: list[Completion]) -> None:
    assert len(completions) == asked.sampling.num_generations
    for c in completions:
        assert c.token_ids.dtype == np.int32 and c.logprobs.dtype == np.float32
        assert c.token_ids.shape == c.logprobs.shape and 1 <= len(c.token_ids) <= asked.sampling.max_new_tokens
        assert np.all(c.logprobs <= 0) and np.all(np.isfinite(c.logprobs))
        edges = [0, *(end for _, _, end in c.spans)]
        assert [start for _, start, _ in c.spans] == edges[:-1] and edges[-1] == len(c.token_ids)
