"""A random tiny Qwen2, batches with true logprobs, and one update as in a textbook to compare the engine with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from nbehind.config import AlgoConfig, Config, RunConfig, SamplingConfig, TrainerConfig
from trainer_svc.engine import TrainBatch, TrainSequence
from trainer_svc.torch_engine import TorchEngine

VOCABULARY = 50


def make_model(folder: Path, **changes) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    Qwen2ForCausalLM(Qwen2Config(**{**shape, **changes})).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def configure(trainer: dict | None = None, algo: dict | None = None, sampling: dict | None = None) -> Config:
    return Config(
        run=RunConfig(seed=1),
        trainer=TrainerConfig(**{"lr": 1e-5, "max_grad_norm": 0.5, **(trainer or {})}),
        algo=AlgoConfig(**(algo or {})),
        sampling=SamplingConfig(**(sampling or {})),
    )


def start(folder: Path, config: Config | None = None, total: int = 10) -> TorchEngine:
    engine = TorchEngine(folder, config or configure(), total)
    engine.setup()
    return engine


def load(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def full_logprobs(model, ids: np.ndarray, prompt_len: int, temperature: float = 1.0) -> torch.Tensor:
    """[T] from full logits of one sequence without padding."""
    ids_L = torch.from_numpy(ids.astype(np.int64))
    logits = model(input_ids=ids_L[None]).logits[0].float() / temperature
    return logits[:-1].log_softmax(-1).gather(1, ids_L[1:, None]).squeeze(1)[prompt_len - 1 :]


@torch.no_grad()
def make_batch(folder: Path, groups=4, size=3, seed=0, temperature=1.0, noise=0.0, longest=20, step=0) -> TrainBatch:
    """Random tokens with their true logprobs, plus `noise` as if an older policy had sampled them."""
    rng, model, sequences = np.random.default_rng(seed), load(folder), []
    for group in range(groups):
        prompt = rng.integers(0, VOCABULARY, rng.integers(1, 12))
        for _ in range(size):
            completion = rng.integers(0, VOCABULARY, rng.integers(1, longest))
            ids = np.concatenate([prompt, completion]).astype(np.int32)
            logprobs = full_logprobs(model, ids, len(prompt), temperature).numpy()
            logprobs = (logprobs + noise * rng.normal(size=len(completion))).astype(np.float32)
            advantages = np.full(len(completion), rng.normal(), dtype=np.float32)
            sequences.append(TrainSequence(ids, len(prompt), logprobs, advantages, group))
    return TrainBatch(step, groups, tuple(sequences), on_policy=noise == 0)


def weights(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], atol: float = 0.0) -> None:
    assert list(a) == list(b)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def naive_update(folder: Path, batch: TrainBatch, config: Config):
    """One update as in a textbook: a loop over sequences with full logits, plain AdamW."""
    algo, trainer, temperature = config.algo, config.trainer, config.sampling.temperature
    model, reference = load(folder), load(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=trainer.lr, weight_decay=0.0, foreach=False)
    tokens = sum(len(s.logprobs) for s in batch.sequences)
    total = 0.0
    for s in batch.sequences:
        new = full_logprobs(model, s.token_ids, s.prompt_len, temperature)
        ratio = (new - torch.from_numpy(s.logprobs)).exp()
        gain = torch.from_numpy(s.advantages)
        cut = ratio.clamp(1 - algo.clip_low, 1 + algo.clip_high)
        per_token = -torch.minimum(ratio * gain, cut * gain)
        if algo.beta:
            with torch.no_grad():
                d = full_logprobs(reference, s.token_ids, s.prompt_len, temperature)
            per_token = per_token + algo.beta * ((d - new).exp() - 1 - (d - new))
        loss = per_token.sum() / tokens if algo.loss == "token" else per_token.mean() / len(batch.sequences)
        torch.autograd.backward(loss)
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.max_grad_norm)
    optimizer.step()
    return total, float(norm), dict(model.named_parameters())


def assert_same_update(engine: TorchEngine, folder: Path, expected) -> None:
    """The clipped gradients (a first exp_avg is 0.1 · g), and the weights within 1e-6.

    AdamW's first step is lr · g/(|g| + 1e-8): where g is rounding noise, so is the step, and only its size is checked.
    """
    engine.snapshot()(folder)
    state = load_file(folder / "state-00000.safetensors")
    assert {n for n, _ in engine.named_weights()} == set(expected)
    largest = max(p.grad.abs().max().item() for p in expected.values())
    for name, tensor in engine.named_weights():
        gradient, weight = expected[name].grad, expected[name].detach()
        torch.testing.assert_close(state[f"exp_avg.{name}"], 0.1 * gradient, rtol=1e-4, atol=1e-6 * largest)
        noise = gradient.abs() < 1e-5 * largest
        torch.testing.assert_close(tensor[~noise], weight[~noise], rtol=0, atol=1e-6)
        torch.testing.assert_close(tensor[noise], weight[noise], rtol=0, atol=2.1e-5)


def changed(sequence: TrainSequence, **fields) -> TrainSequence:
    values = {n: getattr(sequence, n) for n in ("token_ids", "prompt_len", "logprobs", "advantages", "group")}
    return TrainSequence(**{**values, **fields})


def silenced(batch: TrainBatch) -> TrainBatch:
    """The same with advantages of zero."""
    none = tuple(changed(s, advantages=np.zeros_like(s.advantages)) for s in batch.sequences)
    return TrainBatch(batch.step, batch.num_groups, none, batch.on_policy)
