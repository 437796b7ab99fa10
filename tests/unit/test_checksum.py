"""The checksum of a version finds flipped bits and lost, repeated or misplaced blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.buckets import BLOCK, buckets
from weight_sync.checksum import BlockSums, checksum


def noise(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_golden_value() -> None:
    # One block of ones: 8,192 words of 0x0101010101010101. The checksum must not change between releases or machines,
    # since both ends compute it. sha256(le64(65536) + le64(8192 * 0x0101010101010101 mod 2**64) + b"digest")[:32]
    from hashlib import sha256

    total = (8192 * 0x0101010101010101) % 2**64
    by_hand = sha256((65536).to_bytes(8, "little") + total.to_bytes(8, "little") + b"digest").hexdigest()[:32]
    assert checksum(torch.ones(BLOCK, dtype=torch.uint8), "digest") == by_hand


@given(size=st.integers(1, 3 * BLOCK + 17), at=st.integers(0, 2**31), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_every_flipped_bit_is_found(size: int, at: int, bit: int) -> None:
    flat = noise(size)
    before = checksum(flat, "d")
    flat[at % size] ^= 1 << bit
    assert checksum(flat, "d") != before


@given(size=st.integers(0, 5 * BLOCK + 100), blocks_a_bucket=st.integers(1, 6), order=st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_pieces_in_any_order_sum_to_the_whole(size: int, blocks_a_bucket: int, order: object) -> None:
    flat = noise(size)
    pieces = buckets(size, blocks_a_bucket * BLOCK)
    order.shuffle(pieces)  # type: ignore[attr-defined]
    sums = BlockSums(size)
    for start, stop in pieces:
        sums.add(start, flat[start:stop])
    assert sums.hex("d") == checksum(flat, "d")


def test_blocks_that_are_lost_repeated_or_exchanged_are_found() -> None:
    flat = noise(4 * BLOCK)
    good = checksum(flat, "d")
    lost, repeated, exchanged = flat.clone(), flat.clone(), flat.clone()
    lost[BLOCK : 2 * BLOCK] = 0
    repeated[BLOCK : 2 * BLOCK] = flat[:BLOCK]
    exchanged[:BLOCK], exchanged[BLOCK : 2 * BLOCK] = flat[BLOCK : 2 * BLOCK], flat[:BLOCK].clone()
    assert len({good, *(checksum(t, "d") for t in (lost, repeated, exchanged))}) == 4


def test_length_and_manifest_count() -> None:
    zeros = torch.zeros(2 * BLOCK, dtype=torch.uint8)
    assert checksum(zeros, "d") != checksum(zeros[:-8], "d")
    assert checksum(zeros, "d") != checksum(zeros, "e")
    assert len(checksum(torch.empty(0, dtype=torch.uint8), "d")) == 32


def test_missing_and_ragged_pieces_are_errors() -> None:
    sums = BlockSums(3 * BLOCK)
    sums.add(0, noise(BLOCK))
    with pytest.raises(ValueError, match="65536 of 196608 bytes"):
        sums.hex("d")
    with pytest.raises(ValueError, match="does not end on a block"):
        sums.add(BLOCK, noise(100))
    with pytest.raises(ValueError, match="does not end on a block"):
        sums.add(5, noise(BLOCK))
