"""The reward seam: `(request, completion) -> RewardResult`, found by name or as `module:function`, sync or async."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollout_queue.messages import Finish, Request


@dataclass(frozen=True, slots=True)
class ScoredText:
    """What a reward sees of a completion: its text without special tokens, its ids, and how it ended."""

    text: str
    token_ids: NDArray[np.int32]
    finish: Finish


@dataclass(frozen=True, slots=True)
class RewardResult:
    """`total` is trained on; `parts` are named components for logs and metrics."""

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)


Reward = Callable[[Request, ScoredText], RewardResult | Awaitable[RewardResult]]
