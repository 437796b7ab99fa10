"""Requests and groups for tests of the queue."""

from __future__ import annotations

import numpy as np

from rollout_queue.messages import Group, Lease, Request, RequestId, Sampling, Version

CHECKSUM = "ab" * 32


def request(slot: int, incarnation: int, *, step: int = 0, min_version: int = 0, attempt: int = 0) -> Request:
    return Request(
        id=RequestId(step, slot),
        incarnation=incarnation,
        min_version=min_version,
        seed=1234 + slot,
        prompt_ids=np.arange(5 + slot % 3, dtype=np.int32),
        sampling=Sampling(2, 8, 0.7, 0.9, 40, (2, 3)),
        item_id=f"item-{slot}",
        payload={
            "gt_answer": "4",
            "messages": [{"role": "user", "content": "2+2=\u00fc"}],
            "n": 3,
            "f": 0.5,
            "x": None,
        },
        attempt=attempt,
    )


def group(lease: Lease, version: int = 0, lengths: tuple[int, ...] = (2, 3), rewards: tuple[float, ...] = ()) -> Group:
    asked = lease.request
    samples, tokens = len(lengths), sum(lengths)
    rows = [(sample, 0, 0, length) for sample, length in enumerate(lengths) if length]
    return Group(
        id=asked.id,
        incarnation=asked.incarnation,
        attempt=asked.attempt,
        producer=lease.owner,
        versions=(Version(asked.incarnation, version, CHECKSUM),),
        prompt_ids=asked.prompt_ids,
        lengths=np.array(lengths, np.int32),
        token_ids=np.arange(tokens, dtype=np.int32) + asked.id.slot,
        logprobs=-np.ones(tokens, np.float32),
        spans=np.array(rows, np.int32).reshape(-1, 4),
        rewards=np.array(rewards or range(samples), np.float32),
        finish=np.zeros(samples, np.uint8),
        reward_parts={"format": np.ones(samples, np.float32)},
        started_at=100.0,
        generated_at=101.0,
        scored_at=101.5,
    )


def same_group(one: Group, other: Group) -> bool:
    plain = ("id", "incarnation", "attempt", "producer", "versions", "started_at", "generated_at", "scored_at")
    arrays = ("prompt_ids", "lengths", "token_ids", "logprobs", "spans", "rewards", "finish")
    return (
        all(getattr(one, name) == getattr(other, name) for name in plain)
        and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)
        and all(getattr(one, name).dtype == getattr(other, name).dtype for name in arrays)
        and list(one.reward_parts) == list(other.reward_parts)
        and all(np.array_equal(one.reward_parts[name], other.reward_parts[name]) for name in one.reward_parts)
    )
