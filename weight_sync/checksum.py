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
    """Sums of a flat buffer of `total_bytes`, added piece by piece as it arrives."""

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._sums = np.zeros(-(-total_bytes // BLOCK), np.int64)
        self._seen = 0

    def add(self, start: int, flat_piece: torch.Tensor | NDArray[np.uint8]) -> None:
        """Add the bytes from `start` on: uint8 on the CPU; whole blocks, except for the end of the buffer."""
        raw = flat_piece.numpy() if isinstance(flat_piece, torch.Tensor) else flat_piece
        if start % BLOCK or (raw.size % BLOCK and start + raw.size != self._total):
            raise ValueError(f"a piece of {raw.size} bytes at {start} does not end on a block of {BLOCK} bytes")
        whole = raw.size // BLOCK * BLOCK
        first = start // BLOCK
        if whole:
            words = raw[:whole].view(np.int64).reshape(-1, _WORDS)
            np.add.reduce(words, axis=1, out=self._sums[first : first + whole // BLOCK])
        if whole < raw.size:
            self._sums[first + whole // BLOCK] = _tail_sum(raw[whole:])
        self._seen += raw.size

    def hex(self, manifest_digest: str) -> str:
        """The checksum, 32 hex digits. ValueError unless every byte was added once."""
        if self._seen != self._total:
            raise ValueError(f"{self._seen} of {self._total} bytes were added to the checksum")
        digest = sha256(self._total.to_bytes(8, "little"))
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


def checksum(flat: torch.Tensor, manifest_digest: str) -> str:
    """Checksum of a whole flat uint8 buffer on the CPU, 32 hex digits."""
    sums = BlockSums(flat.numel())
    sums.add(0, flat)
    return sums.hex(manifest_digest)
