"""Are the arrays of a group consistent? Used on both sides: a broken producer hears it before the trainer does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_queue.errors import MessageError
from rollout_queue.messages import Finish, Group


def check_group_arrays(group: Group) -> None:
    """Raise MessageError unless the arrays of the group are consistent with each other.

    What has one entry a sample or a span is checked in plain Python, which is faster than numpy at these sizes.
    """
    lengths, tokens = group.lengths.tolist(), len(group.token_ids)
    samples = len(lengths)
    if not samples:
        raise MessageError("no samples")
    if min(lengths) < 0 or sum(lengths) != tokens:
        raise MessageError("lengths do not add up to the number of tokens")
    if len(group.logprobs) != tokens or len(group.rewards) != samples or len(group.finish) != samples:
        raise MessageError("logprobs, rewards or finish of another length than tokens or samples")
    for name, part in group.reward_parts.items():
        if len(part) != samples or not _all_finite(part):
            raise MessageError(f"reward part {name!r} is not finite, or of another length than the samples")
    if not _all_finite(group.rewards):
        raise MessageError("a reward is not finite")
    if not np.isfinite(group.logprobs).all():
        raise MessageError("a logprob is not finite")
    if (tokens and int(group.token_ids.min()) < 0) or (len(group.prompt_ids) and int(group.prompt_ids.min()) < 0):
        raise MessageError("a negative token id")
    if max(group.finish.tolist()) > max(Finish):
        raise MessageError("an unknown finish reason")
    check_spans(group.spans, lengths, len(group.versions))


def _all_finite(values: NDArray[np.float32]) -> bool:
    return all(map(math.isfinite, values.tolist()))


def all_equal(rewards: NDArray[np.float32]) -> bool:
    """Do all samples have the same reward?"""
    return len(set(rewards.tolist())) == 1


def check_spans(spans: NDArray[np.int32], lengths: Sequence[int], num_versions: int) -> None:
    """Raise MessageError unless the rows (sample, version index, start, end) cover every sample exactly, in order."""
    if spans.ndim != 2 or spans.shape[1] != 4:
        raise MessageError("spans are not rows of four")
    expected_sample, expected_start = _next_token(lengths, 0, 0)
    for sample, version, start, end in spans.tolist():
        if (sample, start) != (expected_sample, expected_start) or sample >= len(lengths):
            raise MessageError(f"span {sample}, {start} to {end}: expected {expected_sample}, {expected_start}")
        if not start < end <= lengths[sample]:
            raise MessageError(f"span {sample}, {start} to {end} is empty or ends outside of its sample")
        if not 0 <= version < num_versions:
            raise MessageError(f"span {sample}, {start} to {end} is of a version that is not listed")
        expected_sample, expected_start = _next_token(lengths, sample, end)
    if expected_sample != len(lengths):
        raise MessageError(f"spans end before token {expected_start} of sample {expected_sample}")


def _next_token(lengths: Sequence[int], sample: int, place: int) -> tuple[int, int]:
    """The first token from `place` of `sample` on; (number of samples, 0) when there is none."""
    while sample < len(lengths) and place >= lengths[sample]:
        sample, place = sample + 1, 0
    return sample, place


def expect(array: NDArray[Any], name: str, dtype: type, ndim: int) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != np.dtype(dtype) or array.ndim != ndim:
        kind = f"{array.dtype}[{array.ndim}d]" if isinstance(array, np.ndarray) else type(array).__name__
        raise MessageError(f"{name} is {kind}, expected {np.dtype(dtype)}[{ndim}d]")
