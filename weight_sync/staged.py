"""A received and verified set of weights, waiting to be swapped in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollout_queue.messages import Version
from weight_sync.manifest import Manifest


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Weights in a shared-memory file, so that an engine's own process can map them without a copy.

    The receiver does not write to `path` again until the owner has called `Receiver.swapped(version)`.
    """

    version: Version
    manifest: Manifest
    path: Path  # file of manifest.total_bytes bytes, usually below /dev/shm
    transfer_s: float = 0.0  # from the announcement to the verified whole, seconds
