"""What every service opens in the same way: the queue of its run, and the settings of the weight channel."""

from __future__ import annotations

import redis

from nbehind.config import Config
from rollout_queue.connection import check_server, connect, resolve_password
from rollout_queue.keys import Keys
from rollout_queue.redis_queue import RedisQueue
from weight_sync.channel import SyncSettings


def open_client(config: Config, redis_url: str, retry_s: float = 0.0) -> redis.Redis:
    """A checked connection to the run's Redis; a server that is away is waited for `retry_s` seconds."""
    section = config.redis
    client = connect(
        redis_url,
        username=section.username,
        password=resolve_password(section.password_env, section.password_file),
        tls_ca=section.tls_ca,
    )
    check_server(client, retry_s)
    return client


def open_queue(config: Config, redis_url: str) -> tuple[redis.Redis, Keys, RedisQueue]:
    """Client, keys and queue of the run."""
    client = open_client(config, redis_url, config.redis.retry_s)
    keys = Keys(config.run.name)
    queue = RedisQueue(
        client,
        keys,
        lease_s=config.producer.lease_s,
        max_attempts=config.producer.max_attempts,
        max_body_bytes=int(config.redis.max_body_mb * 2**20),
        retry_s=config.redis.retry_s,
    )
    return client, keys, queue


def sync_settings(config: Config) -> SyncSettings:
    section = config.sync
    return SyncSettings(
        bucket_bytes=int(section.bucket_mb * 2**20),
        join_timeout_s=section.join_timeout_s,
        transfer_timeout_s=section.transfer_timeout_s,
        transport=section.transport,
        interface=section.interface,
        retry_s=config.redis.retry_s,
    )
