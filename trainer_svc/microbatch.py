"""Which sequences go through the model together. Pure.

A micro-batch of n sequences is padded to its longest one, so it costs n · width tokens whatever the others have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# a micro-batch this full is closed early when the next sequence would be mostly padding
FULL_ENOUGH_TOKENS = 1024
LEAST_FILL = 0.8


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """Indices of the sequences of each micro-batch, longest first, and what they cost."""

    batches: tuple[tuple[int, ...], ...]
    tokens: int  # without padding
    padded_tokens: int  # with it

    @property
    def pad_share(self) -> float:
        """Share of the computed tokens that are padding, 0 when there are none."""
        return 1 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0


def plan_micro_batches(lengths: Sequence[int], max_tokens: int) -> MicroBatchPlan:
    """Pack sequences of these lengths into micro-batches of at most `max_tokens` padded tokens.

    Sorted by length and packed greedily from the longest, so neighbours have nearly the same length and the widest
    micro-batch comes first. A sequence longer than the bound is alone in its micro-batch. The shapes depend on the
    lengths only, not on their order. Raises ValueError on a length or bound below 1.
    """
    if max_tokens < 1 or any(length < 1 for length in lengths):
        raise ValueError(f"lengths and max_tokens must be at least 1, got {min(lengths, default=1)} and {max_tokens}")
    batches: list[list[int]] = []
    padded = width = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        filled = width * len(batches[-1]) if batches else 0
        wasteful = filled >= FULL_ENOUGH_TOKENS and length < LEAST_FILL * width
        if not batches or filled + width > max_tokens or wasteful:
            batches.append([])
            width = length
        batches[-1].append(index)
        padded += width
    return MicroBatchPlan(tuple(map(tuple, batches)), sum(lengths), padded)


def split_groups(num_groups: int, updates: int) -> tuple[range, ...]:
    """The groups of each of `updates` minibatches: whole groups, in order, sizes differing by one at most.

    Raises ValueError when there are fewer groups than minibatches.
    """
    if updates < 1 or num_groups < updates:
        raise ValueError(
            f"{num_groups} groups cannot be split into {updates} minibatches; lower trainer.updates_per_step"
        )
    edges = [num_groups * i // updates for i in range(updates + 1)]
    return tuple(range(a, b) for a, b in pairwise(edges))
