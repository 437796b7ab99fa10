"""The shipped fake policy and its engine: a vector of logits that learns, in microseconds, bit for bit reproducible.

Token t has log-probability log σ(w[t]); the completion is the right answer with probability σ(w[SKILL]). The fake
generator draws from the weights that it was *given*, and this engine recomputes the log-probabilities from its own:
`ratio_max_dev_first` is 0 only if both had the same bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trainer_svc.engine import TrainBatch
from trainer_svc.errors import TrainingError

if TYPE_CHECKING:
    import torch

VOCABULARY = 257  # bytes and the end token
SKILL = VOCABULARY  # index of the skill logit
SIZE = VOCABULARY + 1
WEIGHT_NAME = "policy.logits"
_STATE = "fake_state.json"
_WEIGHTS = "fake_weights.bin"


def initial_weights(seed: int) -> NDArray[np.float32]:
    """[SIZE] small random logits and a skill of σ(−1.5) ≈ 0.18."""
    weights = np.random.default_rng(seed).normal(0.0, 0.1, SIZE).astype(np.float32)
    weights[SKILL] = -1.5
    return weights


def sigmoid(x: float) -> float:
    return float(1.0 / (1.0 + np.exp(-np.float64(x))))


def token_logprobs(weights: NDArray[np.float32], token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """[T] log σ(w[t]), always < 0."""
    return (-np.logaddexp(0.0, -weights[token_ids].astype(np.float64))).astype(np.float32)


class FakeEngine:
    """Implements Engine without a model; `step_s` is how long a step takes."""

    def __init__(self, seed: int, lr: float, step_s: float) -> None:
        self._lr = np.float32(lr)
        self._step_s = step_s
        self.weights = initial_weights(seed)
        self.updates = 0

    def setup(self) -> None:
        """Nothing to load."""

    def train_step(self, batch: TrainBatch) -> Mapping[str, float]:
        """w[t] += lr · mean advantage of the token; skill grows with the reward signal."""
        if not batch.sequences:
            raise TrainingError(f"step {batch.step}: empty batch")
        if self._step_s:
            time.sleep(self._step_s)
        deviation, tokens, loss = 0.0, 0, 0.0
        gradient = np.zeros(SIZE, dtype=np.float64)
        for sequence in batch.sequences:
            completion = sequence.token_ids[sequence.prompt_len :]
            now = token_logprobs(self.weights, completion)
            ratios = np.exp((now - sequence.logprobs).astype(np.float64))
            deviation = max(deviation, float(np.abs(ratios - 1.0).max(initial=0.0)))
            np.add.at(gradient, completion, sequence.advantages.astype(np.float64))
            gradient[SKILL] += float(np.abs(sequence.advantages).sum())
            loss -= float((ratios * sequence.advantages).sum())
            tokens += len(completion)
        if not np.isfinite(loss):
            raise TrainingError(f"step {batch.step}: loss is {loss}")
        self.weights = (self.weights + self._lr * (gradient / max(tokens, 1)).astype(np.float32)).astype(np.float32)
        self.updates += 1
        return {
            "loss": loss / max(tokens, 1),
            "grad_norm": float(np.linalg.norm(gradient)),
            "lr": float(self._lr),
            "ratio_max_dev_first": deviation,
            "tokens": float(tokens),
            "updates": float(self.updates),
        }

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        yield WEIGHT_NAME, torch.from_numpy(self.weights.copy())

    def save_model(self, folder: Path) -> None:
        _write_weights(folder, self.weights)

    def snapshot(self) -> Callable[[Path], None]:
        weights, updates = self.weights.copy(), self.updates

        def write(folder: Path) -> None:
            _write_weights(folder, weights)
            _write_weights(folder / "model", weights)
            (folder / _STATE).write_text(json.dumps({"updates": updates}))

        return write

    def load_state(self, folder: Path) -> None:
        self.weights = np.frombuffer((folder / _WEIGHTS).read_bytes(), dtype="<f4").astype(np.float32)
        self.updates = int(json.loads((folder / _STATE).read_text())["updates"])

    def close(self) -> None:
        """Nothing to release."""


def _write_weights(folder: Path, weights: NDArray[np.float32]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _WEIGHTS).write_bytes(weights.astype("<f4").tobytes())
