"""From completions to a group: flat ragged arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from producer_svc.generator import Completion
from rollout_queue.messages import Group, Lease, Version


def build_group(
    lease: Lease,
    producer: str,
    completions: Sequence[Completion],
    rewards: NDArray[np.float32],
    parts: Mapping[str, NDArray[np.float32]],
    times: tuple[float, float, float],
) -> Group:
    """`times` = generation began, ended, rewards were there; seconds since the epoch."""
    versions: list[Version] = sorted({span[0] for c in completions for span in c.spans})
    spans = [(i, versions.index(v), start, end) for i, c in enumerate(completions) for v, start, end in c.spans]
    return Group(
        id=lease.request.id,
        incarnation=lease.request.incarnation,
        attempt=lease.request.attempt,
        producer=producer,
        versions=tuple(versions),
        prompt_ids=lease.request.prompt_ids,
        lengths=np.asarray([len(c.token_ids) for c in completions], dtype=np.int32),
        token_ids=np.concatenate([c.token_ids for c in completions]).astype(np.int32, copy=False),
        logprobs=np.concatenate([c.logprobs for c in completions]).astype(np.float32, copy=False),
        spans=np.asarray(spans, dtype=np.int32).reshape(-1, 4),
        rewards=np.asarray(rewards, dtype=np.float32),
        finish=np.asarray([int(c.finish) for c in completions], dtype=np.uint8),
        reward_parts=dict(parts),
        started_at=times[0],
        generated_at=times[1],
        scored_at=times[2],
    )
