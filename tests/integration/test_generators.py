"""One suite over all generators; with real engines their logprobs are recomputed with transformers."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from nbehind.config import ModelConfig, ProducerConfig, SamplingConfig
from producer_svc.errors import GeneratorError
from producer_svc.fake_generator import FakeGenerator
from producer_svc.generation import sample_seed
from producer_svc.generator import Completion, Generator
from producer_svc.transformers_generator import TransformersGenerator
from rollout_queue.messages import Finish, Request, RequestId, Sampling, Version
from trainer_svc.fake_engine import WEIGHT_NAME, initial_weights
from weight_sync.manifest import Manifest
from weight_sync.staged import StagedWeights

VOCABULARY = 96
CONTEXT = 256
WAIT_S = 120.0
MODEL = ModelConfig(max_context=CONTEXT)
PRODUCER = ProducerConfig(kv_cache_gb=0.1, max_requests=8)
SAMPLING = SamplingConfig()


# --- parts
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
        settings = PRODUCER.model_copy(update=producer)
        if self.kind == "fake":
            return FakeGenerator(base_s=0.3)
        if self.kind == "transformers":
            return TransformersGenerator(self.model_folder, MODEL, settings, SAMPLING)
        from producer_svc.vllm_generator import VllmGenerator

        return VllmGenerator(self.model_folder, MODEL, settings, SAMPLING)

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


def check_shape(asked: Request, completions: list[Completion]) -> None:
    assert len(completions) == asked.sampling.num_generations
    for c in completions:
        assert c.token_ids.dtype == np.int32 and c.logprobs.dtype == np.float32
        assert c.token_ids.shape == c.logprobs.shape and 1 <= len(c.token_ids) <= asked.sampling.max_new_tokens
        assert np.all(c.logprobs <= 0) and np.all(np.isfinite(c.logprobs))
        edges = [0, *(end for _, _, end in c.spans)]
        assert [start for _, start, _ in c.spans] == edges[:-1] and edges[-1] == len(c.token_ids)


# --- fixtures: one engine a module and kind
KINDS = [
    pytest.param(("fake", True), id="fake"),
    pytest.param(("transformers", True), id="transformers-tied"),
    pytest.param(("transformers", False), id="transformers-untied"),
    pytest.param(("vllm", True), id="vllm-tied", marks=pytest.mark.vllm),
    pytest.param(("vllm", False), id="vllm-untied", marks=pytest.mark.vllm),
]


@pytest.fixture(scope="module", params=KINDS)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    kind, tied = request.param
    rig = Rig(kind, tied, tmp_path_factory.mktemp(kind))
    yield rig
    asyncio.run(asyncio.wait_for(rig.generator.close(), WAIT_S))


@pytest.fixture
def real(rig: Rig) -> Rig:
    if rig.kind == "fake":
        pytest.skip("the fake generator has no model to recompute")
    return rig


# --- every generator (the first test must see the generator before its first load)
async def test_generate_before_load_is_refused(rig: Rig) -> None:
    with pytest.raises(GeneratorError, match=r"before load"):
        await rig.generate(request(1))


async def test_shapes_spans_and_length(rig: Rig) -> None:
    await rig.load(0)
    asked = request(1, samples=5, length=17)
    completions = await rig.generate(asked)
    check_shape(asked, completions)
    assert all(c.spans == ((Version(1, 0, "c0"), 0, len(c.token_ids)),) for c in completions)
    if rig.kind != "fake":
        assert all(c.finish is Finish.LENGTH and len(c.token_ids) == 17 for c in completions)


async def test_progress_counts_every_token(rig: Rig) -> None:
    await rig.load(0)
    before = rig.generator.progress()
    groups = await asyncio.gather(*(rig.generate(request(n)) for n in range(3)))
    assert rig.generator.progress() - before == sum(len(c.token_ids) for group in groups for c in group)


async def test_load_during_generation_splits_the_spans(rig: Rig) -> None:
    await rig.load(0)
    asked = [request(n, length=160) for n in range(4)]
    tasks = [asyncio.create_task(rig.generate(r)) for r in asked]
    await rig.until(4)
    await rig.load(1)
    groups = [await task for task in tasks]
    both = 0
    for r, group in zip(asked, groups, strict=True):
        check_shape(r, group)
        for c in group:
            assert {v.number for v, _, _ in c.spans} <= {0, 1}
            if rig.kind != "fake":
                assert [v.number for v, _, _ in c.spans] == [0, 1]
                (_, _, cut), _ = c.spans
                assert np.abs(rig.logprobs(r, c, 0) - c.logprobs)[:cut].max() < 1e-3
                assert np.abs(rig.logprobs(r, c, 1) - c.logprobs)[cut:].max() < 1e-3
            both += len(c.spans) > 1
    assert both


# --- real engines
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}, {"top_p": 0.7, "top_k": 9}],
    ids=str,
)
async def test_logprobs_are_those_of_the_sampled_distribution(real: Rig, sampling: dict[str, Any]) -> None:
    await real.load(0)
    asked = request(3, **sampling)
    for c in await real.generate(asked):
        assert np.abs(real.logprobs(asked, c, 0) - c.logprobs).max() < 1e-3


async def test_after_a_load_the_output_is_that_of_the_new_weights(real: Rig) -> None:
    for number in (0, 1, 2, 3):
        await real.load(number)
        greedy, free = request(4, samples=1, top_k=1), request(4)
        (best,) = await real.generate(greedy)
        ids = list(greedy.prompt_ids)
        for token in best.token_ids:
            with torch.no_grad():
                assert token == int(real.exact[number % 2](torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)
        for c in await real.generate(free):
            assert np.abs(real.logprobs(free, c, number) - c.logprobs).max() < 1e-3
            assert c.spans[0][0] == Version(1, number, f"c{number}")


async def test_a_prefix_cached_under_other_weights_is_not_used(real: Rig) -> None:
    asked = request(5, prompt=200, length=8)
    for number in (0, 0, 1, 1, 0):
        await real.load(number)
        for _ in range(2):
            for c in await real.generate(asked):
                assert np.abs(real.logprobs(asked, c, number) - c.logprobs).max() < 1e-3


async def test_stop_token_ends_a_sample_and_belongs_to_it(real: Rig) -> None:
    await real.load(0)
    stops = tuple(range(0, VOCABULARY, 6))
    asked = request(6, samples=16, length=6, stop_token_ids=stops)
    completions = await real.generate(asked)
    for c in completions:
        assert not set(c.token_ids[:-1].tolist()) & set(stops)
        assert (c.finish is Finish.STOP) == (int(c.token_ids[-1]) in stops)
        assert c.finish is Finish.STOP or len(c.token_ids) == 6
        assert np.abs(real.logprobs(asked, c, 0) - c.logprobs).max() < 1e-3
    assert {c.finish for c in completions} == {Finish.STOP, Finish.LENGTH}


async def test_output_depends_on_the_seed_and_not_on_the_neighbours(real: Rig) -> None:
    await real.load(0)
    asked = request(7, prompt=9)
    alone = await real.generate(asked)
    others = [request(n, prompt=3 + 17 * n, samples=1 + n) for n in range(5)]
    together, *_ = await asyncio.gather(*(real.generate(r) for r in (asked, *others)))
    assert [c.token_ids.tolist() for c in together] == [c.token_ids.tolist() for c in alone]
    assert len({tuple(c.token_ids) for c in alone}) == len(alone)
    other = await real.generate(request(7, prompt=9, seed=8))
    assert not {tuple(c.token_ids) for c in alone} & {tuple(c.token_ids) for c in other}


async def test_cancel_frees_the_engine(real: Rig) -> None:
    await real.load(0)
    doomed = [asyncio.create_task(real.generator.generate(request(n, samples=8, length=200))) for n in range(8)]
    kept = request(20, samples=3, length=30, prompt=5)
    survivor = asyncio.create_task(real.generate(kept))
    await real.until(64)
    for task in doomed:
        task.cancel()
    await asyncio.gather(*doomed, return_exceptions=True)
    for c in await survivor:
        assert np.abs(real.logprobs(kept, c, 0) - c.logprobs).max() < 1e-3
    before = real.generator.progress()
    await asyncio.sleep(0.3)
    assert real.generator.progress() == before
    assert before < sum(8 * 200 for _ in doomed) + before  # and the counter did not fall
    check_shape(kept, await real.generate(kept))


async def test_the_staged_file_is_free_after_load(real: Rig) -> None:
    staged = real.staged(0)
    await real.generator.load(staged)
    staged.path.write_bytes(b"\xff" * staged.manifest.total_bytes)
    asked = request(8)
    for c in await real.generate(asked):
        assert np.abs(real.logprobs(asked, c, 0) - c.logprobs).max() < 1e-3


async def test_the_context_limits_a_completion(real: Rig) -> None:
    await real.load(0)
    asked = request(9, prompt=CONTEXT - 5, length=50)
    for c in await real.generate(asked):
        assert (len(c.token_ids), c.finish) == (5, Finish.LENGTH)


async def test_more_requests_than_slots(real: Rig) -> None:
    await real.load(0)
    asked = [request(n, prompt=1 + n % 40, length=1 + n % 7, samples=1 + n % 5) for n in range(40)]
    for r, group in zip(asked, await asyncio.gather(*(real.generate(r) for r in asked)), strict=True):
        check_shape(r, group)
        assert np.abs(real.logprobs(r, group[-1], 0) - group[-1].logprobs).max() < 1e-3


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (request(1, prompt=0), "empty"),
        (request(1, prompt=CONTEXT), "max_context"),
        (request(1, temperature=0.0), "temperature"),
        (request(1, samples=0), "no samples"),
    ],
    ids=["empty", "long", "cold", "none"],
)
async def test_a_bad_request_is_refused_and_harms_nobody(real: Rig, bad: Request, reason: str) -> None:
    await real.load(0)
    good = asyncio.create_task(real.generate(request(2)))
    with pytest.raises(GeneratorError, match=reason):
        await real.generate(bad)
    check_shape(request(2), await good)


async def test_a_token_id_outside_the_vocabulary_is_refused(real: Rig) -> None:
    bad = request(1)
    bad.prompt_ids[3] = VOCABULARY
    with pytest.raises(GeneratorError, match="token id"):
        await real.generate(bad)


async def test_weights_that_do_not_fit_are_refused_before_anything_changes(real: Rig) -> None:
    await real.load(0)
    named = [(n, p) for n, p in real.models[1].named_parameters() if "layers.1.mlp" not in n]
    short = write_staged(named, Version(1, 1, "short"), real.folder / "short.bin")
    with pytest.raises(GeneratorError, match=r"layers\.1\.mlp"):
        await real.generator.load(short)
    torn = real.staged(1)
    torn.path.write_bytes(torn.path.read_bytes()[:-100])
    with pytest.raises(GeneratorError, match="bytes"):
        await real.generator.load(torn)
    torn.path.unlink()
    with pytest.raises(GeneratorError, match="gone"):
        await real.generator.load(torn)
    asked = request(10)
    for c in await real.generate(asked):
        assert c.spans[0][0].number == 0
        assert np.abs(real.logprobs(asked, c, 0) - c.logprobs).max() < 1e-3


async def test_a_tied_output_matrix_may_be_sent_too(real: Rig) -> None:
    if not real.tied:
        pytest.skip("only for tied models")
    await real.load(0)
    model = real.models[1]
    named = [*model.named_parameters(), ("lm_head.weight", model.lm_head.weight)]
    await real.generator.load(write_staged(named, Version(1, 1, "c1"), real.folder / "both.bin"))
    asked = request(11)
    for c in await real.generate(asked):
        assert np.abs(real.logprobs(asked, c, 1) - c.logprobs).max() < 1e-3


# --- start and end
async def test_finish_lets_running_generations_end_under_their_version(tmp_path: Path) -> None:
    rig = await asyncio.to_thread(Rig, "transformers", True, tmp_path)
    generator = rig.make(in_flight="finish")
    await generator.start()
    await generator.load(rig.staged(0))
    first = asyncio.create_task(generator.generate(request(1, length=60)))
    while not generator.progress():
        await asyncio.sleep(0.002)
    swap = asyncio.create_task(generator.load(rig.staged(1)))
    await asyncio.sleep(0)
    second = asyncio.create_task(generator.generate(request(2, length=5)))
    groups = await asyncio.wait_for(asyncio.gather(first, second), WAIT_S)
    await swap
    assert [{v.number for c in group for v, _, _ in c.spans} for group in groups] == [{0}, {1}]
    await generator.close()
    with pytest.raises(GeneratorError, match="closed"):
        await generator.generate(request(3))
    await rig.generator.close()


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
@pytest.mark.parametrize("fault", ["missing", "no config", "no weights", "torn config", "torn weights"])
async def test_a_bad_model_folder_is_one_clear_line(tmp_path: Path, kind: str, fault: str) -> None:
    rig = Rig.__new__(Rig)
    rig.kind, rig.model_folder = kind, tmp_path / "model"
    if fault != "missing":
        tiny_model(0, True).save_pretrained(rig.model_folder)
        config, weights = rig.model_folder / "config.json", rig.model_folder / "model.safetensors"
        {"no config": config.unlink, "no weights": weights.unlink}.get(fault, lambda: None)()
        if fault.startswith("torn"):
            path = config if fault == "torn config" else weights
            path.write_bytes(path.read_bytes()[:5])
    generator = rig.make()
    with pytest.raises(GeneratorError) as caught:
        await generator.start()
    assert str(rig.model_folder) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(GeneratorError):
        await generator.generate(request(1))
    await generator.close()


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
async def test_an_engine_that_fails_ends_every_call(tmp_path: Path, kind: str) -> None:
    rig = await asyncio.to_thread(Rig, kind, True, tmp_path)
    await rig.load(0)
    running = [asyncio.create_task(rig.generate(request(n, length=200))) for n in range(3)]
    await rig.until(8)
    good = rig.staged(1)
    far = [dataclasses.replace(spec, offset=spec.offset + 2**40) for spec in good.manifest.tensors]
    broken = dataclasses.replace(good, manifest=dataclasses.replace(good.manifest, tensors=tuple(far)))
    calls = [*running, asyncio.create_task(rig.generator.load(broken))]
    outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), WAIT_S)
    assert all(isinstance(outcome, GeneratorError) for outcome in outcomes), outcomes
    for call in (rig.generate(request(1)), rig.load(0)):
        with pytest.raises(GeneratorError, match="failed"):
            await call
    await asyncio.wait_for(rig.generator.close(), WAIT_S)


def test_neighbouring_seeds_share_no_stream() -> None:
    seeds = {sample_seed(seed, sample) for seed in range(100) for sample in range(100)}
    assert len(seeds) == 100 * 100 and all(0 <= s < 2**63 for s in seeds)


# --- processes of vLLM
CHILD = """
import asyncio, sys
from pathlib import Path
import tests.integration.test_generators as t
async def main():
    rig = t.Rig.__new__(t.Rig)
    rig.kind, rig.tied, rig.folder, rig.model_folder = "vllm", True, Path(sys.argv[1]), Path(sys.argv[1]) / "model"
    rig.models = [t.tiny_model(s, True) for s in (1, 2)]
    rig.exact = [t.tiny_model(s, True).double() for s in (1, 2)]
    rig.models[0].save_pretrained(rig.model_folder)
    rig.generator = rig.make(tensor_parallel=2)
    await rig.generator.start()
    await rig.load(1)
    asked = t.request(1)
    for c in await rig.generate(asked):
        assert abs(rig.logprobs(asked, c, 1) - c.logprobs).max() < 1e-3
    print("ready", flush=True)
    try:
        while True:
            await rig.generate(t.request(2, length=200))
    except t.GeneratorError as error:
        print("error", error, flush=True)
    await rig.generator.close()
    print("closed", flush=True)
if __name__ == "__main__":
    asyncio.run(main())
"""


@contextlib.contextmanager
def started_child(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with a two-rank engine; it says "ready" and generates until the engine fails."""
    folder.mkdir()
    script = folder / "child.py"
    script.write_text(CHILD)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, text=True, env=env
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def ranks_of(child: subprocess.Popen[str]) -> list[psutil.Process]:
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    family = psutil.Process(child.pid).children(recursive=True)
    return [p for p in family if "Worker" in p.name()]


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_killed_processes_of_a_two_rank_engine(tmp_path: Path) -> None:
    """Two engines at once, to save time: of one the producer is killed, of the other a rank."""
    with started_child(tmp_path / "orphaned") as orphaned, started_child(tmp_path / "maimed") as maimed:
        ranks = ranks_of(orphaned)
        assert len(ranks) == 2
        orphaned.send_signal(signal.SIGKILL)
        orphaned.wait(10)
        _, alive = psutil.wait_procs(ranks, timeout=10)
        assert not alive, "ranks outlive a killed producer"

        ranks = ranks_of(maimed)
        ranks[0].kill()
        out, _ = maimed.communicate(timeout=WAIT_S)
        assert [line.split()[0] for line in out.splitlines()] == ["error", "closed"]
        _, alive = psutil.wait_procs(ranks, timeout=10)
        assert not alive, "ranks outlive close()"
