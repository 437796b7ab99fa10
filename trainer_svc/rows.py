"""The lines of metrics.jsonl and rollouts.jsonl (docs/metrics.md)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nbehind.tokenizer import Tokenizer
from rollout_queue.messages import Finish
from trainer_svc.intake import Intake, Taken


def step_row(
    step: int,
    published: int,
    taken: Sequence[Taken],
    stats: Mapping[str, float],
    overlapped: bool,
    seconds: Mapping[str, float],
    intake: Intake,
) -> dict[str, Any]:
    """One line of metrics.jsonl (docs/metrics.md)."""
    rewards = np.concatenate([t.group.rewards for t in taken])
    lengths = np.concatenate([t.group.lengths for t in taken])
    lags = np.concatenate([t.lags for t in taken])
    names = sorted({name for t in taken for name in t.group.reward_parts})
    parts = {
        n: float(np.mean(np.concatenate([t.group.reward_parts[n] for t in taken if n in t.group.reward_parts])))
        for n in names
    }
    states = Counter(s.state for s in intake.census.values())
    return {
        "step": step,
        "t": time.time(),
        "version": step + 1,
        "published": published,
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "reward_parts": parts,
        "lag_max": int(lags.max(initial=0)),
        "lag_mean": float(lags.mean()) if lags.size else 0.0,
        "lag_histogram": {str(k): v for k, v in sorted(Counter(lags.tolist()).items())},
        "tokens": int(lengths.sum()),
        "prompt_tokens": int(sum(len(t.group.prompt_ids) for t in taken)),
        "length_mean": float(lengths.mean()),
        "cut_share": float(np.mean(np.concatenate([t.group.finish for t in taken]) == Finish.LENGTH)),
        "seconds": {k: round(v, 4) for k, v in seconds.items()},
        "overlapped": overlapped,
        "queue": {"open": len(intake.window), **{k: states.get(k, 0) for k in ("queued", "leased", "delivered")}},
        "reissued": intake.reissued,
        "refused": intake.refused,
        "malformed": intake.malformed,
        "counters": intake.ledger.as_dict(),
        **{k: float(v) for k, v in stats.items() if k != "tokens"},
    }


def rollout_row(step: int, taken: Taken, tokenizer: Tokenizer) -> dict[str, Any]:
    """One line of rollouts.jsonl: the first sample of a group, as text."""
    group = taken.group
    length = int(group.lengths[0])
    return {
        "step": step,
        "request": str(group.id),
        "producer": group.producer,
        "versions": [list(v) for v in group.versions],
        "prompt": tokenizer.decode(group.prompt_ids.tolist()),
        "completion": tokenizer.decode(group.token_ids[:length].tolist()),
        "reward": float(group.rewards[0]),
        "group_rewards": [float(r) for r in group.rewards],
        "seconds": round(group.generated_at - group.started_at, 3),
    }
