"""Shared fixtures: a real Valkey for the whole session, and fresh keys in it for every test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import redis

from nbehind.embedded import EmbeddedRedis
from rollout_queue.connection import connect
from rollout_queue.keys import PREFIX, Keys


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A server that tests share: do not kill, flush or configure it (make your own EmbeddedRedis for that)."""
    with EmbeddedRedis(tmp_path_factory.mktemp("valkey"), max_mb=512) as server:
        yield server


@pytest.fixture
def redis_client(valkey: EmbeddedRedis) -> Iterator[redis.Redis]:
    client = connect(valkey.url)
    yield client
    client.close()


@pytest.fixture
def keys(redis_client: redis.Redis) -> Iterator[Keys]:
    """The keys of a run that nobody has used; whatever is left of it is deleted afterwards."""
    run = f"test-{uuid.uuid4().hex[:12]}"
    yield Keys(run)
    left = list(redis_client.scan_iter(match=f"{PREFIX}:{{{run}}}:*", count=1000))
    if left:
        redis_client.delete(*left)
