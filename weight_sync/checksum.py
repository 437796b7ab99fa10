"""The checksum of a version: block sums, then SHA-256 over them. It costs about half of a copy of the weights.

    sums[i] = sum of block i (64 KiB) as int64 words, wrapping      checksum = sha256(length, sums, manifest digest)

A flipped bit changes its block's sum by a power of two, so it is always found; a lost, repeated or misplaced block
changes the vector. It guards against faults, not against an attacker.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import torch
from numpy.typing import NDArray

from weight_sync.buckets import BLOCK

CHECKSUM_BYTES = 32  # hex digits
_WORDS = BLOCK // 8


class BlockSums:
    """Sums of a flat buffer (uint8 on the CPU), from its beginning on as it is filled."""

    def __init__(self, flat: torch.Tensor | NDArray[np.uint8]) -> None:
        self._raw = flat.numpy() if isinstance(flat, torch.Tensor) else flat
        self._sums = np.zeros(-(-self._raw.size // BLOCK), np.int64)
        self._blocks = 0  # summed

    def up_to(self, stop: int) -> None:
        """Sum what is new of the first `stop` bytes; of a block that is not whole before them nothing yet."""
        first, last = self._blocks, min(stop, self._raw.size) // BLOCK
        if last > first:
            words = self._raw[first * BLOCK : last * BLOCK].view(np.int64).reshape(-1, _WORDS)
            np.add.reduce(words, axis=1, out=self._sums[first:last])
            self._blocks = last

    def hex(self, manifest_digest: str) -> str:
        """The checksum of the whole buffer, 32 hex digits; what was not summed before is summed now."""
        size = self._raw.size
        self.up_to(size)
        if size % BLOCK:
            self._sums[-1] = _tail_sum(self._raw[size // BLOCK * BLOCK :])
        digest = sha256(size.to_bytes(8, "little"))
        digest.update(self._sums.astype("<i8").tobytes())
        digest.update(manifest_digest.encode())
        return digest.hexdigest()[:CHECKSUM_BYTES]


def as_bytes(value: str) -> torch.Tensor:
    """A checksum as uint8 [CHECKSUM_BYTES], to be sent after the weights."""
    return torch.frombuffer(bytearray(value.encode()), dtype=torch.uint8)


def from_bytes(raw: torch.Tensor) -> str:
    """Inverse of as_bytes(). What is not a checksum gives a text that equals none."""
    return raw.numpy().tobytes().decode("ascii", "replace")


def _tail_sum(raw: NDArray[np.uint8]) -> np.int64:
    padded = np.zeros(-(-raw.size // 8) * 8, np.uint8)
    padded[: raw.size] = raw
    return np.int64(np.add.reduce(padded.view(np.int64)))
