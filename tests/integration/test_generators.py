"""One suite over all generators; with real engines their logprobs are recomputed with transformers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from producer_svc.errors import GeneratorError
from producer_svc.generation import sample_seed
from producer_svc.generator import Completion
from rollout_queue.messages import Finish, Request, Version
from tests.generator_rig import (
    CONTEXT,
    FP32_TOLERANCE,
    VOCABULARY,
    WAIT_S,
    Rig,
    check_greedy,
    check_shape,
    request,
    tiny_model,
    write_staged,
)

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


MODES = {"keep": {(0,), (0, 1)}, "keep_cache": {(0,), (0, 1)}, "finish": {(0,)}, "abort": {(1,)}}


@pytest.mark.parametrize("mode", MODES)
async def test_load_during_generation(rig: Rig, mode: str) -> None:
    """Spans and logprobs of what runs while new weights come. More samples than the engine runs at a time."""
    await rig.load(0)
    rig.generator.in_flight = mode
    asked = [request(1, length=40, prompt=70, seed=n) for n in range(18)]
    tasks = [asyncio.create_task(rig.generate(r)) for r in asked]
    await rig.until(4)
    load = asyncio.create_task(rig.load(1))
    await asyncio.sleep(0)
    late = request(2, length=8)
    after = await rig.generate(late)
    groups = [await task for task in tasks]
    await load
    rig.generator.in_flight = "keep"
    seen: dict[tuple[int, ...], int] = {}
    for r, group in [*zip(asked, groups, strict=True), (late, after)]:
        check_shape(r, group)
        for c in group:
            numbers = tuple(v.number for v, _, _ in c.spans)
            seen[numbers] = seen.get(numbers, 0) + 1
            if rig.kind != "fake" and seen[numbers] <= 3:
                assert np.abs(expected_logprobs(rig, r, c, mode) - c.logprobs).max() < FP32_TOLERANCE
    assert {v.number for c in after for v, _, _ in c.spans} == {1}
    assert set(seen) - {(1,)} <= MODES[mode] and MODES[mode] - {(0,)} <= set(seen)


def expected_logprobs(rig: Rig, asked: Request, c: Completion, mode: str) -> np.ndarray:
    """[T], of the weights that drew each token."""
    (first, _, cut), last = c.spans[0], c.spans[-1][0]
    if mode == "keep_cache" and len(c.spans) == 2:
        return rig.logprobs_of_two(asked, c, cut, first.number, last.number)
    old, new = rig.logprobs(asked, c, first.number), rig.logprobs(asked, c, last.number)
    return np.concatenate([old[:cut], new[cut:]])


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
        assert np.abs(real.logprobs(asked, c, 0) - c.logprobs).max() < FP32_TOLERANCE


async def test_after_a_load_the_output_is_that_of_the_new_weights(real: Rig) -> None:
    for number in (0, 1, 2, 3):
        await real.load(number)
        greedy, free = request(4, samples=1, top_k=1), request(4)
        (best,) = await real.generate(greedy)
        ids = np.concatenate([greedy.prompt_ids, best.token_ids]).astype(np.int64)
        with torch.no_grad():
            logits = real.exact[number % 2](torch.from_numpy(ids)[None]).logits[0].numpy()
        check_greedy(logits[len(greedy.prompt_ids) - 1 : -1], best.token_ids, FP32_TOLERANCE)
        for c in await real.generate(free):
            assert np.abs(real.logprobs(free, c, number) - c.logprobs).max() < FP32_TOLERANCE
            assert c.spans[0][0] == Version(1, number, f"c{number}")


@pytest.mark.parametrize("mode", ["keep", "keep_cache"])
async def test_a_prefix_cached_under_other_weights_is_not_used(real: Rig, mode: str) -> None:
    """The same prompt again and again, while other generations of it, which outlive loads, keep their caches alive."""
    real.generator.in_flight = mode
    asked = request(5, prompt=150, length=8)
    await real.load(0)

    async def go_on() -> None:
        while True:
            await real.generate(request(5, prompt=150, length=100, samples=1))

    outlives = asyncio.create_task(go_on())
    await real.until(2)
    for number in (0, 1, 0):
        await real.load(number)
        for _ in range(2):
            for c in await real.generate(asked):
                assert np.abs(real.logprobs(asked, c, number) - c.logprobs).max() < FP32_TOLERANCE
    assert not outlives.done()
    outlives.cancel()
    await asyncio.gather(outlives, return_exceptions=True)
    real.generator.in_flight = "keep"


async def test_stop_token_ends_a_sample_and_belongs_to_it(real: Rig) -> None:
    await real.load(0)
    stops = tuple(range(0, VOCABULARY, 6))
    asked = request(6, samples=16, length=6, stop_token_ids=stops)
    completions = await real.generate(asked)
    for c in completions:
        assert not set(c.token_ids[:-1].tolist()) & set(stops)
        assert (c.finish is Finish.STOP) == (int(c.token_ids[-1]) in stops)
        assert c.finish is Finish.STOP or len(c.token_ids) == 6
        assert np.abs(real.logprobs(asked, c, 0) - c.logprobs).max() < FP32_TOLERANCE
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
        assert np.abs(real.logprobs(kept, c, 0) - c.logprobs).max() < FP32_TOLERANCE
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
        assert np.abs(real.logprobs(asked, c, 0) - c.logprobs).max() < FP32_TOLERANCE


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
        assert np.abs(real.logprobs(r, group[-1], 0) - group[-1].logprobs).max() < FP32_TOLERANCE


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
        assert np.abs(real.logprobs(asked, c, 0) - c.logprobs).max() < FP32_TOLERANCE


async def test_a_tied_output_matrix_may_be_sent_too(real: Rig) -> None:
    if not real.tied:
        pytest.skip("only for tied models")
    await real.load(0)
    model = real.models[1]
    named = [*model.named_parameters(), ("lm_head.weight", model.lm_head.weight)]
    await real.generator.load(write_staged(named, Version(1, 1, "c1"), real.folder / "both.bin"))
    asked = request(11)
    for c in await real.generate(asked):
        assert np.abs(real.logprobs(asked, c, 1) - c.logprobs).max() < FP32_TOLERANCE


async def test_an_engine_that_fails_ends_every_call(real: Rig) -> None:
    """The last test of a rig: its engine is dead afterwards."""
    await real.load(0)
    running = [asyncio.create_task(real.generate(request(n, length=200))) for n in range(3)]
    await real.until(8)
    good = real.staged(1)
    far = [dataclasses.replace(spec, offset=spec.offset + 2**40) for spec in good.manifest.tensors]
    broken = dataclasses.replace(good, manifest=dataclasses.replace(good.manifest, tensors=tuple(far)))
    calls = [*running, asyncio.create_task(real.generator.load(broken))]
    outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), WAIT_S)
    assert all(isinstance(outcome, GeneratorError) for outcome in outcomes), outcomes
    for call in (real.generate(request(1)), real.load(0)):
        with pytest.raises(GeneratorError, match="failed"):
            await call
    await asyncio.wait_for(real.generator.close(), WAIT_S)


# --- start and end
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


def test_neighbouring_seeds_share_no_stream() -> None:
    seeds = {sample_seed(seed, sample) for seed in range(100) for sample in range(100)}
    assert len(seeds) == 100 * 100 and all(0 <= s < 2**63 for s in seeds)


# --- processes of vLLM
CHILD = """
import asyncio, sys
from pathlib import Path
import tests.generator_rig as t
from producer_svc.errors import GeneratorError
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
        assert abs(rig.logprobs(asked, c, 1) - c.logprobs).max() < t.FP32_TOLERANCE
    print("ready", flush=True)
    try:
        while True:
            await rig.generate(t.request(2, length=200))
    except GeneratorError as error:
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
@pytest.mark.skipif(not os.environ.get("NBEHIND_SLOW"), reason="70 s of CPU: set NBEHIND_SLOW=1 to run it")
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
