"""Which item of the data set a request rolls out: a pure function of (step, slot, round), so never of timing."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollout_queue.messages import RequestId


@dataclass(frozen=True)
class DataOrder:
    """The data order of a run.

    Position p = step · groups_per_step + slot walks through the epochs; every epoch is a permutation seeded by (seed, epoch).
    Replacements (round > 0) come from a reserve order keyed by (step, slot, round), which leaves the main order as it is.
    """

    num_items: int
    groups_per_step: int
    seed: int
    shuffle: bool
    epochs: int  # 0 = without end
    max_steps: int  # 0 = as many as the epochs give
    _permutations: dict[int, NDArray[np.int64]] = field(default_factory=dict, repr=False, compare=False)

    def total_steps(self) -> int:
        """Steps of the whole run; the last one may have fewer slots than the others."""
        from_data = -(-self.epochs * self.num_items // self.groups_per_step)
        bounds = [n for n in (self.max_steps, from_data) if n]
        return min(bounds) if bounds else 0

    def slots(self, step: int) -> int:
        """Groups that `step` trains."""
        if step >= self.total_steps():
            return 0
        if not self.epochs:
            return self.groups_per_step
        return min(self.groups_per_step, self.epochs * self.num_items - step * self.groups_per_step)

    def item(self, request: RequestId) -> int:
        """Index of the item that the request rolls out."""
        if request.round:
            return int(self._rng(1, *request).integers(self.num_items))
        position = request.step * self.groups_per_step + request.slot
        epoch, offset = divmod(position, self.num_items)
        if not self.shuffle:
            return offset
        if epoch not in self._permutations:
            self._permutations.clear()
            self._permutations[epoch] = self._rng(0, epoch).permutation(self.num_items)
        return int(self._permutations[epoch][offset])

    def request_seed(self, request: RequestId) -> int:
        """Seed of the request's sampling, in [0, 2^31)."""
        return int(self._rng(2, *request).integers(2**31))

    def _rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *key])
