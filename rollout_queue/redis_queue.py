"""Both sides of the queue on Redis: what must be atomic is in scripts.py, bodies travel apart from headers."""

from __future__ import annotations

from rollout_queue.heartbeat import HeartbeatArguments
from rollout_queue.redis_producer import RedisProducerSide
from rollout_queue.redis_trainer import RedisTrainerSide


class RedisQueue(RedisTrainerSide, RedisProducerSide, HeartbeatArguments):
    """TrainerQueue and ProducerQueue on one Redis (see queue.py for what every call promises).

    RedisQueue(client, keys, lease_s, max_attempts, max_body_bytes, body_ttl_s=86_400, retry_s=60.0): times in seconds.
    A lost connection is retried for `retry_s`, then ConnectionRefused is raised. Thread-safe but for the trainer's
    `poll`, which one thread calls.
    """
