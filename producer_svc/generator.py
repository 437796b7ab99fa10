"""The generator seam. Implementations: vllm_generator, transformers_generator, fake_generator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollout_queue.messages import Finish, Request, Version
from weight_sync.staged import StagedWeights


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample. `logprobs` are of the distribution that was sampled (temperature, top-p and top-k applied).

    `spans` rows are (version, start, end): tokens [start, end) were drawn from that version; they cover [0, T).
    """

    token_ids: NDArray[np.int32]  # [T]
    logprobs: NDArray[np.float32]  # [T]
    spans: tuple[tuple[Version, int, int], ...]
    finish: Finish


class Generator(Protocol):
    """Turns requests into completions, many requests at a time, with weights that change under it."""

    async def start(self) -> None:
        """Load the engine and warm it up; logs each stage once with its time."""
        ...

    async def generate(self, request: Request) -> list[Completion]:
        """`request.sampling.num_generations` completions. Cancelling the call aborts them in the engine."""
        ...

    async def load(self, staged: StagedWeights) -> None:
        """Swap the weights in between two engine steps; running generations go on under the new version (or finish first, by config)."""
        ...

    def progress(self) -> int:
        """Tokens generated so far: grows while the engine is alive and has work."""
        ...

    async def close(self) -> None:
        """Stop the engine and every process of it."""
        ...
