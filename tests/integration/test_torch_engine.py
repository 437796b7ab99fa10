"""Updates of the torch engine against a naive computation with full logits and no padding."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_cases import (
    VOCABULARY,
    assert_same,
    assert_same_update,
    changed,
    configure,
    load,
    make_batch,
    make_model,
    naive_update,
    silenced,
    start,
    weights,
)

from trainer_svc.engine import TrainBatch, TrainSequence

pytestmark = pytest.mark.usefixtures("same_threads_after")


@pytest.mark.parametrize(
    ("algo", "temperature"),
    [
        ({"loss": "token"}, 1.0),
        ({"loss": "sample", "clip_high": 0.28}, 0.7),
        ({"loss": "token", "beta": 0.1}, 1.5),
    ],
)
@pytest.mark.parametrize("model", ["tied", "untied"])
def test_an_update_equals_the_naive_one(request, tmp_path, model, algo, temperature):
    folder = request.getfixturevalue(model)
    config = configure({"logprob_chunk": 7, "tokens_per_micro_batch": 64}, algo, {"temperature": temperature})
    batch = make_batch(folder, temperature=temperature, noise=0.3)
    loss, norm, expected = naive_update(folder, batch, config)
    engine = start(folder, config)
    stats = engine.train_step(batch)
    assert stats["loss"] == pytest.approx(loss, abs=1e-6)
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert stats["clip_share"] > 0
    assert_same_update(engine, tmp_path, expected)
    before = dict(load(folder).named_parameters())
    moved = max(float((t - before[n]).detach().abs().max()) for n, t in engine.named_weights())
    assert moved == pytest.approx(1e-5, rel=0.05)  # the comparison is of moved weights


def test_micro_batches_do_not_change_the_update(tied):
    batch = make_batch(tied, noise=0.1)
    results, counts = [], []
    for bound, chunk in ((64, 5), (100_000, 1024), (16, 1)):
        engine = start(tied, configure({"tokens_per_micro_batch": bound, "logprob_chunk": chunk}))
        stats = engine.train_step(batch)
        counts.append(stats["micro_batches"])
        results.append((weights(engine), stats))
    assert counts[2] > counts[0] > counts[1] == 1
    for got, stats in results[1:]:
        assert_same(got, results[0][0], atol=1e-6)
        for name in ("loss", "grad_norm", "kl_sampler", "clip_share", "entropy_estimate", "tokens"):
            assert stats[name] == pytest.approx(results[0][1][name], abs=1e-6)


def test_gradient_checkpointing_and_dropout_change_nothing(tied, tmp_path):
    folder = make_model(tmp_path, attention_dropout=0.5)
    batch = make_batch(folder, noise=0.1)
    engines = [start(folder, configure({"gradient_checkpointing": flag})) for flag in (False, True)]
    for engine in engines:
        engine.train_step(batch)
    assert_same(weights(engines[0]), weights(engines[1]), atol=1e-7)
    engines[1].save_model(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["attention_dropout"] == 0.5


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_on_policy_ratio_is_one(tied, caplog, temperature):
    batch = make_batch(tied, temperature=temperature)
    stats = start(tied, configure(sampling={"temperature": temperature})).train_step(batch)
    assert stats["ratio_max_dev_first"] <= 1e-4
    assert stats["clip_share"] == stats["kl"] == 0
    assert stats["entropy_estimate"] == pytest.approx(-np.concatenate([s.logprobs for s in batch.sequences]).mean())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    start(tied, configure(sampling={"temperature": temperature / 2})).train_step(batch)  # not what was sampled
    assert "sampler and trainer disagree" in caplog.text


@torch.no_grad()
def test_on_policy_ratio_is_one_with_top_k_and_top_p(tied):
    """The sampler's logprobs, made by transformers' own filters: temperature, then top-k, then top-p, renormalised."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    model, rng, sequences = load(tied), torch.Generator().manual_seed(0), []
    warpers = [TemperatureLogitsWarper(1.5), TopKLogitsWarper(12), TopPLogitsWarper(0.8)]
    for _ in range(12):
        ids, logprobs = torch.randint(0, VOCABULARY, (1, 3), generator=rng), []
        for _ in range(8):
            logits = model(input_ids=ids).logits[:, -1]
            for warper in warpers:
                logits = warper(ids, logits)
            token = torch.multinomial(logits.softmax(-1), 1, generator=rng)
            logprobs.append(logits.log_softmax(-1).gather(1, token).item())
            ids = torch.cat([ids, token], dim=1)
        array = np.array(logprobs, dtype=np.float32)
        sequences.append(TrainSequence(ids[0].numpy().astype(np.int32), 3, array, np.ones_like(array), 0))
    config = configure(sampling={"temperature": 1.5, "top_k": 12, "top_p": 0.8})
    with torch.enable_grad():
        stats = start(tied, config).train_step(TrainBatch(0, 1, tuple(sequences), True))
    assert stats["ratio_max_dev_first"] <= 1e-4
    assert stats["grad_norm"] > 0


def test_the_first_update_alone_makes_the_ratio_statistic(tied):
    batch = make_batch(tied)
    stats = start(tied, configure({"updates_per_step": 4, "lr": 1e-2})).train_step(batch)
    assert stats["updates"] == 4
    assert stats["ratio_max_dev_first"] <= 1e-4
    assert stats["kl_sampler"] > 1e-4  # the later updates see weights that have moved


def test_several_updates_equal_several_steps(tied):
    batch = make_batch(tied, groups=5)
    schedule = {"lr": 1e-3, "warmup_steps": 1, "schedule": "cosine"}
    together = start(tied, configure({"updates_per_step": 2, **schedule}))
    stats = together.train_step(batch)
    apart = start(tied, configure(schedule))
    last = {}
    for groups in (range(0, 2), range(2, 5)):
        part = tuple(s for s in batch.sequences if s.group in groups)
        last = apart.train_step(TrainBatch(0, 5, part, True))
    assert_same(weights(together), weights(apart))
    assert stats["lr"] == last["lr"] == 1e-3
    assert together.updates == apart.updates == 2


def test_zero_advantages_are_counted_but_do_not_train(tied, tmp_path):
    batch = make_batch(tied)
    half = tuple(changed(s, advantages=s.advantages * (s.group % 2)) for s in batch.sequences)
    mixed = TrainBatch(0, 4, half, True)
    loss, norm, expected = naive_update(tied, mixed, configure())
    engine = start(tied)
    stats = engine.train_step(mixed)
    assert (stats["loss"], stats["grad_norm"]) == (pytest.approx(loss, abs=1e-6), pytest.approx(norm, rel=1e-5))
    assert stats["tokens"] == sum(len(s.logprobs) for s in batch.sequences)
    assert_same_update(engine, tmp_path, expected)
    engine = start(tied)
    before = weights(engine)
    stats = engine.train_step(silenced(batch))
    assert (stats["loss"], stats["grad_norm"]) == (0, 0)
    assert_same(weights(engine), before)


def test_steps_without_a_gradient_go_on_by_momentum(tied):
    """As AdamW does with gradients of zero, whatever is left out of the backward pass."""
    batch, silent = make_batch(tied), silenced(make_batch(tied))
    engine = start(tied)
    engine.train_step(batch)
    after = weights(engine)
    engine.train_step(silent)
    # exp_avg = 0.9 · 0.1 g, exp_avg_sq = 0.999 · 0.001 g², corrected by 1 − 0.9² and 1 − 0.999²:
    # step = lr · (0.09 g / 0.19) / sqrt(0.000999 g² / 0.001999) = lr · 0.67005 · sign(g)
    moved = torch.cat([(t - after[n]).flatten().abs() for n, t in weights(engine).items()])
    assert moved.max().item() == pytest.approx(1e-5 * 0.67005, rel=2e-3)


def test_weight_decay_spares_norms_and_biases(tied):
    batch = make_batch(tied)
    engine = start(tied, configure({"weight_decay": 0.5, "lr": 1e-2}))
    before = weights(engine)
    engine.train_step(silenced(batch))
    for name, tensor in weights(engine).items():
        factor = 1 - 1e-2 * 0.5 if tensor.ndim >= 2 else 1.0
        torch.testing.assert_close(tensor, before[name] * factor)


def test_a_long_sequence_stays_within_chunk_and_micro_batch(tied, monkeypatch):
    from trainer_svc import torch_engine

    batch = make_batch(tied, groups=2, size=2, longest=6)
    ids = np.arange(200, dtype=np.int32) % VOCABULARY
    long = TrainSequence(ids, 3, np.full(197, -4, np.float32), np.ones(197, np.float32), 1)
    shapes = []
    original = torch_engine.hidden_states
    monkeypatch.setattr(torch_engine, "hidden_states", lambda m, i: shapes.append(tuple(i.shape)) or original(m, i))
    start(tied, configure({"tokens_per_micro_batch": 40, "logprob_chunk": 8})).train_step(
        TrainBatch(0, 2, (*batch.sequences, long), False)
    )
    assert (1, 199) in shapes
    assert all(rows * width <= 40 for rows, width in shapes if (rows, width) != (1, 199))


def other_model(folder: Path, kind: str) -> Path:
    import transformers as t

    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    made = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**shape)),
        "gemma2": lambda: t.Gemma2ForCausalLM(
            t.Gemma2Config(**shape, head_dim=32, final_logit_softcapping=3.0, attn_logit_softcapping=0.5)
        ),
        "granite": lambda: t.GraniteForCausalLM(t.GraniteConfig(**shape, logits_scaling=8.0)),
        "cohere": lambda: t.CohereForCausalLM(t.CohereConfig(**shape, logit_scale=0.5)),
        "phi": lambda: t.PhiForCausalLM(t.PhiConfig(**shape)),
    }
    made[kind]().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite", "cohere", "phi"])
def test_other_heads(tmp_path, kind):
    """Softcap of logits and attention, logit scaling and a head with a bias are computed as the model does."""
    folder = other_model(tmp_path, kind)
    batch = make_batch(folder, noise=0.1)
    loss, norm, expected = naive_update(folder, batch, configure())
    engine = start(folder)
    stats = engine.train_step(batch)
    assert stats["loss"] == pytest.approx(loss, abs=1e-6)
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert_same_update(engine, tmp_path / "state", expected)


def test_learns(tied):
    """Rewarding one token raises its probability: sampled by the engine's own weights, on policy, fifteen steps."""
    engine = start(tied, configure({"lr": 3e-3, "max_grad_norm": 1.0}), total=15)
    model, rng, shares = load(tied), torch.Generator().manual_seed(0), []
    for step in range(15):
        model.load_state_dict(dict(engine.named_weights()), strict=False)
        prompt = torch.zeros(64, 1, dtype=torch.long)
        with torch.no_grad():
            probs = model(input_ids=prompt).logits[:, -1].softmax(-1)
        drawn = torch.multinomial(probs, 1, generator=rng)
        logprobs = probs.log().gather(1, drawn).squeeze(1).numpy()
        rewards = (drawn.squeeze(1) < VOCABULARY // 2).float().numpy()
        shares.append(rewards.mean())
        sequences = tuple(
            TrainSequence(
                np.array([0, int(d)], np.int32), 1, logprobs[i : i + 1], rewards[i : i + 1] - rewards.mean(), 0
            )
            for i, d in enumerate(drawn)
        )
        stats = engine.train_step(TrainBatch(step, 1, sequences, True))
        assert stats["ratio_max_dev_first"] < 1e-3
    assert shares[-1] > 0.9 > 0.7 > shares[0]
