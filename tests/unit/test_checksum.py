"""The checksum of a version finds flipped bits and lost, repeated or misplaced blocks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.buckets import BLOCK
from weight_sync.checksum import BlockSums


def checksum(flat: torch.Tensor, manifest_digest: str) -> str:
    return BlockSums(flat).hex(manifest_digest)


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


@given(size=st.integers(0, 5 * BLOCK + 100), stops=st.lists(st.integers(0, 6 * BLOCK), max_size=6))
@settings(max_examples=60, deadline=None)
def test_following_a_buffer_that_is_being_filled_gives_the_sum_of_the_whole(size: int, stops: list[int]) -> None:
    flat = noise(size)
    arriving = torch.zeros(size, dtype=torch.uint8)
    sums = BlockSums(arriving)
    for stop in sorted(stops):
        arriving[:stop] = flat[:stop]
        sums.up_to(stop)
    arriving[:] = flat
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


def test_what_changes_after_it_was_summed_does_not_count() -> None:
    flat = noise(2 * BLOCK)
    whole = checksum(flat, "d")
    sums = BlockSums(flat)
    sums.up_to(BLOCK)
    flat[0] ^= 1
    assert sums.hex("d") == whole, "blocks are read once"
