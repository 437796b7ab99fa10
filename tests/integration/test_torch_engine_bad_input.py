"""Batches and models that the torch engine must refuse, leaving the weights as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_cases import (
    VOCABULARY,
    assert_same,
    changed,
    configure,
    make_batch,
    make_model,
    start,
    weights,
)

from trainer_svc.engine import TrainBatch, TrainSequence
from trainer_svc.errors import TrainerError, TrainingError

pytestmark = pytest.mark.usefixtures("same_threads_after")


BAD = {
    "not finite": lambda s: changed(s, logprobs=np.full_like(s.logprobs, -np.inf)),
    "advantages that are not finite": lambda s: changed(s, advantages=np.full_like(s.advantages, np.nan)),
    "outside the vocabulary": lambda s: changed(s, token_ids=s.token_ids + VOCABULARY),
    "outside the vocabulary of 50": lambda s: changed(s, token_ids=s.token_ids - VOCABULARY),
    "prompt_len 0": lambda s: changed(s, prompt_len=0),
    "prompt_len 99": lambda s: changed(s, prompt_len=99),
    "logprobs, ": lambda s: changed(s, logprobs=s.logprobs[:-1]),
    "group 4 of 4": lambda s: changed(s, group=4),
}


@pytest.mark.parametrize("what", BAD)
def test_inconsistent_batches_are_refused(tied, what):
    batch = make_batch(tied)
    engine = start(tied)
    before = weights(engine)
    spoiled = TrainBatch(7, 4, (*batch.sequences[:5], BAD[what](batch.sequences[5]), *batch.sequences[6:]), True)
    with pytest.raises(TrainingError, match=f"step 7: sequence 5 has .*{what}"):
        engine.train_step(spoiled)
    assert_same(weights(engine), before)
    assert engine.updates == 0


def test_empty_completions_and_empty_batches(tied):
    batch = make_batch(tied)
    first = batch.sequences[0]
    none = np.zeros(0, dtype=np.float32)
    empty = TrainSequence(first.token_ids[: first.prompt_len], first.prompt_len, none, none, 0)
    engine, other = start(tied), start(tied)
    engine.train_step(TrainBatch(0, 4, (empty, *batch.sequences), True))
    other.train_step(batch)
    assert_same(weights(engine), weights(other))
    with pytest.raises(TrainingError, match="step 3, update 0: no completion tokens"):
        engine.train_step(TrainBatch(3, 1, (empty,), True))
    with pytest.raises(TrainingError, match=r"step 4: 0 groups.*updates_per_step"):
        engine.train_step(TrainBatch(4, 0, (), True))


def test_a_loss_that_is_not_finite(tied):
    """Huge advantages overflow fp32: the second micro-batch is named, and the update leaves no trace."""
    batch = make_batch(tied)
    shortest = min(range(len(batch.sequences)), key=lambda i: len(batch.sequences[i].token_ids))
    engine, clean = (
        start(tied, configure({"tokens_per_micro_batch": 16})),
        start(tied, configure({"tokens_per_micro_batch": 16})),
    )
    before = weights(engine)
    spoiled = list(batch.sequences)
    one = spoiled[shortest]
    spoiled[shortest] = changed(one, advantages=np.full_like(one.advantages, 3e38), logprobs=one.logprobs - 5)
    with pytest.raises(TrainingError, match=r"step 0, update 0, micro-batch \d+: the loss is"):
        engine.train_step(TrainBatch(0, 4, tuple(spoiled), True))
    assert_same(weights(engine), before)
    assert engine.updates == 0
    for e in (engine, clean):
        e.train_step(batch)
    assert_same(weights(engine), weights(clean))


def test_a_gradient_that_is_not_finite(tied):
    """Advantages of ±1e38 cancel in the loss, but their gradients overflow."""
    batch = make_batch(tied)
    signs = [1e38 * (-1) ** i for i in range(len(batch.sequences))]
    spoiled = tuple(
        changed(s, advantages=np.full_like(s.advantages, v)) for s, v in zip(batch.sequences, signs, strict=True)
    )
    engine = start(tied)
    before = weights(engine)
    with pytest.raises(TrainingError, match=r"step 0, update 0: the gradient is not finite \(micro-batch 0\)"):
        engine.train_step(TrainBatch(0, 4, spoiled, True))
    assert_same(weights(engine), before)


def test_models_that_cannot_be_used(tied, tmp_path):
    with pytest.raises(TrainerError, match=r"no model in .*config\.json is missing; set model\.path"):
        start(tmp_path / "nowhere")
    from safetensors.torch import load_file, save_file

    folder = make_model(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TrainerError, match=r"lacks 1 weights of its model, 'model\.norm\.weight' first"):
        start(folder)
    if not torch.cuda.is_available():
        with pytest.raises(TrainerError, match="no CUDA device"):
            start(tied, configure({"device": "cuda"}))


def test_an_unknown_head_is_refused(tied, monkeypatch):
    from transformers import Qwen2ForCausalLM

    original = Qwen2ForCausalLM.forward

    def halved(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        out.logits = out.logits / 2
        return out

    monkeypatch.setattr(Qwen2ForCausalLM, "forward", halved)
    with pytest.raises(TrainerError, match="Qwen2ForCausalLM computes its logits in a way that is not supported"):
        start(tied)


def test_fused_experts_are_refused(tmp_path):
    import transformers as t

    torch.manual_seed(0)
    t.MixtralForCausalLM(
        t.MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=2,
        )
    ).save_pretrained(tmp_path)
    with pytest.raises(TrainerError, match="under other names"):
        start(tmp_path)
