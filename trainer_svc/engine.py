"""The engine seam. Implementations: torch_engine, fake_engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One sample to train on: P prompt and T completion tokens."""

    token_ids: NDArray[np.int32]  # [P + T]
    prompt_len: int  # P
    logprobs: NDArray[np.float32]  # [T] of the policy that sampled it
    advantages: NDArray[np.float32]  # [T]
    group: int  # index of its group in the batch
    seed: int = 0  # of its request


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The samples of one step, group by group. `on_policy`: every token has lag 0."""

    step: int
    num_groups: int
    sequences: tuple[TrainSequence, ...]
    on_policy: bool


class Engine(Protocol):
    """Owns the policy and its optimizer. `updates` counts optimizer updates over the whole run."""

    def setup(self) -> None:
        """Load model (and reference) and make the optimizer; logs each stage with its time."""
        ...

    def train_step(self, batch: TrainBatch) -> Mapping[str, float]:
        """Do the step's optimizer updates. Returns named scalars: loss, grad_norm, lr, ratio_max_dev_first, kl, entropy_estimate, clip_share, pad_share, tokens, ...

        Raises TrainingError on a loss that is not finite; the weights are then as before the update.
        """
        ...

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face names and tensors of the policy, tied ones once, in a fixed order."""
        ...

    def save_model(self, folder: Path) -> None:
        """Model, config and tokenizer in Hugging Face format."""
        ...

    def snapshot(self) -> Callable[[Path], None]:
        """Copy everything now; the result, called with a folder from any thread, writes it there.

        The folder then holds weights as trained, optimizer, scheduler position and RNG, so that load_state continues bit for bit,
        and in `model/` what save_model would have written.
        """
        ...

    def load_state(self, folder: Path) -> None: ...

    def close(self) -> None: ...
