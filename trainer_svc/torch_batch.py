"""Between the trainer's batch and the model: checks, padded tensors, and the sums that become the step's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from trainer_svc.engine import TrainBatch, TrainSequence
from trainer_svc.errors import TrainingError
from trainer_svc.loss import TokenTerms


def check_batch(batch: TrainBatch, vocabulary: int) -> list[TrainSequence]:
    """The sequences that have completion tokens. Raises TrainingError naming the first inconsistent one."""
    for i, s in enumerate(batch.sequences):
        completion = len(s.token_ids) - s.prompt_len
        problem = ""
        if s.prompt_len < 1 or completion < 0:
            problem = f"prompt_len {s.prompt_len} of {len(s.token_ids)} tokens"
        elif len(s.logprobs) != completion or len(s.advantages) != completion:
            problem = f"{completion} completion tokens, {len(s.logprobs)} logprobs, {len(s.advantages)} advantages"
        elif s.token_ids.min() < 0 or s.token_ids.max() >= vocabulary:
            problem = f"a token id outside the vocabulary of {vocabulary}"
        elif not (np.isfinite(s.logprobs).all() and np.isfinite(s.advantages).all()):
            problem = "logprobs or advantages that are not finite"
        elif not 0 <= s.group < batch.num_groups:
            problem = f"group {s.group} of {batch.num_groups}"
        if problem:
            raise TrainingError(
                f"step {batch.step}: sequence {i} has {problem}; the producer that made it does not fit this run"
            )
    return [s for s in batch.sequences if len(s.logprobs)]


@dataclass(frozen=True, slots=True)
class Tokens:
    """A micro-batch of n sequences: padded inputs, and its M completion tokens flat."""

    ids_nL: Tensor  # right-padded, without each sequence's last token, which predicts nothing
    rows_M: Tensor  # where in [n · L] the token before each completion token is
    targets_M: Tensor
    old_logprobs_M: Tensor
    advantages_M: Tensor
    lengths_n: Tensor  # completion tokens

    @classmethod
    def of(cls, sequences: Sequence[TrainSequence], device: torch.device) -> Tokens:
        width = max(len(s.token_ids) for s in sequences) - 1
        ids = np.zeros((len(sequences), width), dtype=np.int64)
        rows = []
        for i, s in enumerate(sequences):
            ids[i, : len(s.token_ids) - 1] = s.token_ids[:-1]
            rows.append(np.arange(s.prompt_len - 1, len(s.token_ids) - 1) + i * width)
        arrays = (
            ids,
            np.concatenate(rows),
            np.concatenate([s.token_ids[s.prompt_len :] for s in sequences]).astype(np.int64),
            np.concatenate([s.logprobs for s in sequences]).astype(np.float32),
            np.concatenate([s.advantages for s in sequences]).astype(np.float32),
            np.array([len(s.logprobs) for s in sequences], dtype=np.int64),
        )
        return cls(*(torch.from_numpy(a).to(device) for a in arrays))


class StepStats:
    """Sums over the updates of one step."""

    def __init__(self) -> None:
        self.sums = dict.fromkeys(("clipped", "ratio", "kl_reference", "kl_sampler", "neg_logprob"), 0.0)
        self.tokens = self.input_tokens = self.padded_tokens = self.micro_batches = self.updates = 0
        self.loss = self.grad_norm = self.lr = self.ratio_max_dev_first = 0.0

    def add(self, terms: TokenTerms) -> None:
        values = torch.stack(
            [getattr(terms, f.name).double() for f in fields(terms)]
        ).tolist()  # one wait for the device
        named = dict(zip((f.name for f in fields(terms)), values, strict=True))
        deviation = named.pop("ratio_max_dev")
        if self.updates == 0:
            self.ratio_max_dev_first = max(self.ratio_max_dev_first, deviation)
        for name, value in named.items():
            self.sums[name] += value
        self.micro_batches += 1

    def summary(self) -> dict[str, float]:
        tokens, updates = max(1, self.tokens), max(1, self.updates)
        return {
            "loss": self.loss / updates,
            "grad_norm": self.grad_norm / updates,
            "lr": self.lr,
            "kl": self.sums["kl_reference"] / tokens,
            "kl_sampler": self.sums["kl_sampler"] / tokens,
            "clip_share": self.sums["clipped"] / tokens,
            "ratio_mean": self.sums["ratio"] / tokens,
            "ratio_max_dev_first": self.ratio_max_dev_first,
            "entropy_estimate": self.sums["neg_logprob"] / tokens,
            "pad_share": 1 - self.input_tokens / self.padded_tokens if self.padded_tokens else 0.0,
            "tokens": float(self.tokens),
            "micro_batches": float(self.micro_batches),
            "updates": float(self.updates),
        }
