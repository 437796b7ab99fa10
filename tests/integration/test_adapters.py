"""Training and sending adapters alone (lora.rank > 0): the trainer's side, and engines that put whole weights together."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from generator_rig import (
    FP32_TOLERANCE,
    MODEL,
    PRODUCER,
    SAMPLING,
    WAIT_S,
    filtered,
    request,
    tiny_model,
    write_staged,
)
from torch_cases import assert_same, configure, make_batch, start, weights

from nbehind.config import LoraConfig
from producer_svc.adapters import Base
from producer_svc.engines import make_generator
from producer_svc.errors import GeneratorError
from producer_svc.generator import Generator
from rollout_queue.messages import Version
from trainer_svc import checkpoint
from trainer_svc.adapters import Adapters
from trainer_svc.errors import CheckpointError, TrainerError

pytestmark = pytest.mark.usefixtures("same_threads_after")
LORA = LoraConfig(rank=4, alpha=8.0)


def lora(trainer: dict | None = None, algo: dict | None = None, **settings):
    changes = {"lora": LORA.model_copy(update=settings)}
    return configure({"lr": 1e-2, **(trainer or {})}, algo).model_copy(update=changes)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(12)[None] % 50).logits


# --- the trainer
def test_adapters_alone_are_trained_and_named(tied):
    engine, whole = start(tied, lora()), start(tied)
    before = {n: p.clone() for n, p in engine._model.named_parameters()}
    assert {n.rsplit(".", 2)[1] for n in weights(engine)} == {"lora_A", "lora_B"}
    stats = engine.train_step(make_batch(tied))
    assert stats["ratio_max_dev_first"] < 1e-4, "a new adapter changes nothing"
    engine.train_step(make_batch(tied, seed=1, noise=0.1))
    changed = {n for n, p in engine._model.named_parameters() if not torch.equal(p, before[n])}
    assert {Adapters.name_of(n) for n in changed} == set(weights(engine))
    sent, all_of_it = (sum(w.nbytes for w in weights(e).values()) for e in (engine, whole))
    assert sent < all_of_it / 4
    assert {n.removesuffix(".lora_A.weight").rpartition(".")[2] for n in weights(engine) if "lora_A" in n} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip


def test_it_learns_what_it_is_told(tied):
    engine, batch = start(tied, lora()), make_batch(tied)
    losses = [engine.train_step(dataclasses.replace(batch, on_policy=False))["loss"] for _ in range(6)]
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_saved_models_are_whole_and_the_adapter_lies_beside(name, request, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = request.getfixturevalue(name)
    engine = start(folder, lora())
    for seed in range(3):
        engine.train_step(make_batch(folder, seed=seed, noise=0.1))
    expected = logits(engine._model)
    engine.save_model(tmp_path / "saved")
    engine.snapshot()(tmp_path / "state")
    for saved in (tmp_path / "saved", tmp_path / "state" / "model"):
        torch.testing.assert_close(
            logits(AutoModelForCausalLM.from_pretrained(saved)), expected, atol=1e-4, rtol=0, msg=str(saved)
        )
        peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), saved / "adapter")
        torch.testing.assert_close(logits(peft), expected, atol=1e-5, rtol=0)
    assert (logits(AutoModelForCausalLM.from_pretrained(folder)) - expected).abs().max() > 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_engine_continues_bit_for_bit(tied, tmp_path, dtype):
    config = lora({"dtype": dtype, "gradient_checkpointing": True}, {"beta": 0.1})
    batches = [make_batch(tied, seed=seed, noise=0.1) for seed in range(4)]
    straight = start(tied, config)
    for batch in batches[:2]:
        straight.train_step(batch)
    saved = checkpoint.save(tmp_path, 2, straight.snapshot(), {"step": 2})
    expected = [dict(straight.train_step(b)) for b in batches[2:]]
    resumed = start(tied, config)
    resumed.load_state(saved)
    assert [dict(resumed.train_step(b)) for b in batches[2:]] == expected
    assert_same(weights(straight), weights(resumed))
    with pytest.raises(CheckpointError, match="lora"):
        start(tied).load_state(saved)
    with pytest.raises(CheckpointError, match="lora"):
        start(tied, lora(rank=2)).load_state(saved)


def test_a_checkpoint_of_adapters_goes_with_its_base_and_scale_only(tied, tmp_path):
    engine = start(tied, lora())
    engine.train_step(make_batch(tied, noise=0.1))
    saved = checkpoint.save(tmp_path, 1, engine.snapshot(), {"step": 1})
    with pytest.raises(CheckpointError, match=r"scale 24\.75.*set model\.path and lora"):
        start(tied, lora(alpha=99)).load_state(saved)
    other = tmp_path / "other"
    shutil.copytree(tied, other)
    engine.save_model(other)
    with pytest.raises(CheckpointError, match=r"on [0-9a-f]{16}.*on [0-9a-f]{16}"):
        start(other, lora()).load_state(saved)
    start(tied, lora()).load_state(saved)


def test_layers_are_chosen_by_name(tied):
    engine = start(tied, lora(target_modules=("q_proj", "v_proj")))
    assert len(weights(engine)) == 2 * 2 * 2
    for odd in ("nonsense", "lm_head", "embed_tokens"):
        with pytest.raises(TrainerError, match=rf"{odd} has no linear layer.*choose from down_proj.*q_proj"):
            start(tied, lora(target_modules=("q_proj", odd)))


# --- producers
class Engines:
    """A model folder with a base, adapters by version number, and the whole models that they make."""

    def __init__(self, folder: Path, tied: bool) -> None:
        self.folder = folder
        base = tiny_model(0, tied)
        base.save_pretrained(folder / "model")
        self.named, self.exact = [], []
        for seed in (1, 2):
            model = tiny_model(0, tied)
            adapters = Adapters(model, LORA, "tiny")
            torch.manual_seed(seed)
            for _, tensor in adapters.named():
                tensor.normal_(0, 0.2)
            whole = tiny_model(9, tied)
            whole.load_state_dict(dict(adapters.merged(dict(adapters.named()))), strict=not tied)
            self.named.append(list(adapters.named()))
            self.exact.append(whole.double())

    def generator(self, kind: str) -> Generator:
        folder = self.folder / "model"
        settings = PRODUCER.model_copy(update={"backend": kind})
        return make_generator(folder, MODEL, settings, SAMPLING, Base(str(folder), 8.0 / 4))

    def error(self, asked, completion, number: int) -> float:
        ids = torch.from_numpy(np.concatenate([asked.prompt_ids, completion.token_ids]).astype(np.int64))
        with torch.no_grad():
            rows = self.exact[number](ids[None]).logits[0].numpy()[len(asked.prompt_ids) - 1 : -1]
        exact = [filtered(row, asked.sampling)[t] for row, t in zip(rows, completion.token_ids, strict=True)]
        return float(np.abs(np.asarray(exact) - completion.logprobs).max())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
async def test_engines_generate_with_base_and_newest_adapters(kind, tied, tmp_path):
    engines = Engines(tmp_path, tied)
    generator = engines.generator(kind)
    await asyncio.wait_for(generator.start(), WAIT_S)
    for number in (0, 1, 0):
        staged = write_staged(engines.named[number], Version(1, number, "c"), tmp_path / "staged")
        await asyncio.wait_for(generator.load(staged), WAIT_S)
        asked = request(3, length=16)
        for completion in await asyncio.wait_for(generator.generate(asked), WAIT_S):
            assert engines.error(asked, completion, number) < FP32_TOLERANCE
            assert engines.error(asked, completion, 1 - number) > 10 * FP32_TOLERANCE
    for odd, reason in (
        (engines.named[0][:-1], r"down_proj is \[\]"),
        ([(n.replace("layers.1", "layers.7"), t) for n, t in engines.named[0]], r"layers\.7.*model has nothing"),
        ([(n, t[:, :1]) for n, t in engines.named[0]], "does not fit the model"),
        (list(tiny_model(0, tied).named_parameters()), "not pairs of adapters"),
    ):
        with pytest.raises(GeneratorError, match=reason):
            await generator.load(write_staged(odd, Version(1, 2, "c"), tmp_path / "odd"))
    await generator.close()
