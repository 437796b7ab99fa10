"""How a flat buffer is cut for sending."""

from __future__ import annotations

BLOCK = 64 * 1024  # bytes: the checksum's block; buckets end on blocks, so that a bucket can be summed by itself


def buckets(total_bytes: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """[start, stop) of every bucket: in order, without gap or overlap, all of `bucket_bytes` except the last."""
    if total_bytes < 0 or bucket_bytes <= 0:
        raise ValueError(f"cannot cut {total_bytes} bytes into buckets of {bucket_bytes}")
    return [(start, min(start + bucket_bytes, total_bytes)) for start in range(0, total_bytes, bucket_bytes)]
