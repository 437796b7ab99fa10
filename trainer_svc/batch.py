"""From groups to what the engine trains on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nbehind.config import Config
from trainer_svc.advantage import advantages
from trainer_svc.engine import TrainBatch, TrainSequence
from trainer_svc.intake import Taken


def make_batch(step: int, taken: Sequence[Taken], config: Config) -> TrainBatch:
    """The samples of the groups, each token with its group's advantage."""
    sequences = []
    for index, t in enumerate(taken):
        group = t.group
        values = advantages(group.rewards, config.algo.advantage)
        ends = np.cumsum(group.lengths)
        for sample, (end, length) in enumerate(zip(ends, group.lengths, strict=True)):
            part = slice(int(end - length), int(end))
            sequences.append(
                TrainSequence(
                    token_ids=np.concatenate([group.prompt_ids, group.token_ids[part]]),
                    prompt_len=len(group.prompt_ids),
                    logprobs=group.logprobs[part],
                    advantages=np.full(int(length), values[sample], dtype=np.float32),
                    group=index,
                )
            )
    on_policy = all(not t.lags.any() for t in taken)
    return TrainBatch(step=step, num_groups=len(taken), sequences=tuple(sequences), on_policy=on_policy)
