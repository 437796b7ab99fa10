"""Learning rate as a function of the optimizer update. Pure."""

from __future__ import annotations

import math
from typing import Literal

ScheduleKind = Literal["constant", "cosine"]


def learning_rate(
    update: int, total: int, *, peak: float, warmup: int, kind: ScheduleKind, min_ratio: float = 0.1
) -> float:
    """Rate of update number `update` (from 0) of `total`.

    Linear warm-up peak·1/warmup … peak over the first `warmup` updates, then constant, or half a cosine that starts
    at `peak` and is at peak·min_ratio in the last update and after it. Raises ValueError on negative numbers.
    """
    if update < 0 or total < 0 or warmup < 0:
        raise ValueError(f"update, total and warmup must not be negative, got {update}, {total}, {warmup}")
    if update < warmup:
        return peak * (update + 1) / warmup
    if kind == "constant":
        return peak
    if kind != "cosine":
        raise ValueError(f"unknown schedule {kind!r}; use constant or cosine")
    span = max(1, total - 1 - warmup)
    progress = min(1.0, (update - warmup) / span)
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
