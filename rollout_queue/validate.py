"""Are the arrays of a group consistent? Used on both sides: a broken producer hears it before the trainer does."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_queue.errors import MessageError
from rollout_queue.messages import Finish, Group


def check_group_arrays(group: Group) -> None:
    """Raise MessageError unless the arrays of the group are consistent with each other."""
    samples, tokens = len(group.lengths), len(group.token_ids)
    if samples < 1:
        raise MessageError("no samples")
    if int(group.lengths.min()) < 0 or int(group.lengths.sum(dtype=np.int64)) != tokens:
        raise MessageError("lengths do not add up to the number of tokens")
    if len(group.logprobs) != tokens or len(group.rewards) != samples or len(group.finish) != samples:
        raise MessageError("logprobs, rewards or finish of another length than tokens or samples")
    for name, part in group.reward_parts.items():
        if len(part) != samples or not np.isfinite(part).all():
            raise MessageError(f"reward part {name!r} is not finite, or of another length than the samples")
    if not np.isfinite(group.rewards).all():
        raise MessageError("a reward is not finite")
    if not np.isfinite(group.logprobs).all():
        raise MessageError("a logprob is not finite")
    if (tokens and int(group.token_ids.min()) < 0) or (len(group.prompt_ids) and int(group.prompt_ids.min()) < 0):
        raise MessageError("a negative token id")
    if int(group.finish.max()) > max(Finish):
        raise MessageError("an unknown finish reason")
    check_spans(group.spans, group.lengths, len(group.versions))


def all_equal(rewards: NDArray[np.float32]) -> bool:
    return bool((rewards == rewards[:1]).all())


def check_spans(spans: NDArray[np.int32], lengths: NDArray[np.int32], num_versions: int) -> None:
    """Raise MessageError unless the rows (sample, version index, start, end) cover every sample exactly, in order."""
    if spans.ndim != 2 or spans.shape[1] != 4:
        raise MessageError("spans are not rows of four")
    total = int(lengths.sum(dtype=np.int64))
    if not len(spans):
        if total:
            raise MessageError("tokens without a version span")
        return
    sample, version, start, end = spans.astype(np.int64).T
    if int(sample.min()) < 0 or int(sample.max()) >= len(lengths):
        raise MessageError("a span of a sample that does not exist")
    if int(version.min()) < 0 or int(version.max()) >= num_versions:
        raise MessageError("a span of a version that is not listed")
    if bool((start < 0).any()) or bool((start >= end).any()) or bool((end > lengths[sample]).any()):
        raise MessageError("an empty span, or one outside of its sample")
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))[sample]
    first, last = offsets + start, offsets + end
    if int(first[0]) != 0 or int(last[-1]) != total or bool((first[1:] != last[:-1]).any()):
        raise MessageError("spans do not cover the tokens exactly once, in order")


def expect(array: NDArray[Any], name: str, dtype: type, ndim: int) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != np.dtype(dtype) or array.ndim != ndim:
        kind = f"{array.dtype}[{array.ndim}d]" if isinstance(array, np.ndarray) else type(array).__name__
        raise MessageError(f"{name} is {kind}, expected {np.dtype(dtype)}[{ndim}d]")
