"""Advantages of a group: how much better each sample is than the others. Pure functions."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

AdvantageKind = Literal["grpo", "grpo_no_std", "rloo"]

STD_EPS = 1e-6  # keeps the quotient finite; the same constant for every group, so groups stay comparable


def advantages(rewards_N: NDArray[np.float32], kind: AdvantageKind) -> NDArray[np.float32]:
    """[N] advantages of the N samples of one group.

    - grpo: (r − mean) / (std + 1e-6), std of the population (divided by N) as in eq. 3 of Shao et al. 2024,
      arXiv:2402.03300.
    - grpo_no_std: r − mean (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).
    - rloo: r − mean of the other N − 1 (Ahmadian et al. 2024, arXiv:2402.14740) = (r − mean) · N / (N − 1).

    Equal rewards give zeros. Raises ValueError for fewer than two samples, rewards that are not finite, or an
    unknown kind.
    """
    if rewards_N.ndim != 1 or len(rewards_N) < 2:
        raise ValueError(
            f"advantage {kind!r} compares samples of a group and needs at least 2 rewards, got shape {rewards_N.shape}; "
            "set sampling.num_generations >= 2"
        )
    rewards = rewards_N.astype(np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite numbers, got {rewards_N.tolist()}; check the reward function")
    if (rewards == rewards[0]).all():  # exact: the mean of equal numbers need not equal them
        return np.zeros(len(rewards), dtype=np.float32)
    centred = rewards - rewards.mean()
    if kind == "grpo":
        centred /= rewards.std() + STD_EPS
    elif kind == "rloo":
        centred *= len(rewards) / (len(rewards) - 1)
    elif kind != "grpo_no_std":
        raise ValueError(f"unknown advantage {kind!r}; use grpo, grpo_no_std or rloo")
    result: NDArray[np.float32] = centred.astype(np.float32)
    return result
