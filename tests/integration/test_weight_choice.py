"""Members that could use different transports, at one publisher. GPUs are only said to be there; gloo moves the bytes."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from nbehind.embedded import EmbeddedRedis
from rollout_queue.connection import connect
from rollout_queue.keys import Keys
from tests.integration.test_weight_sync import until
from tests.sync_processes import HELLO as GLOO_HELLO
from tests.sync_processes import PATIENCE_S, expected, file_fingerprint, weights
from tests.sync_processes import SETTINGS as GLOO
from weight_sync.channel import Channel, SyncSettings
from weight_sync.errors import Refused
from weight_sync.gloo_channel import GlooTransport
from weight_sync.publisher import Publisher
from weight_sync.receiver import Receiver
from weight_sync.staged import StagedWeights

HELLO = {**GLOO_HELLO, "transport": "auto"}
NCCL = "2.30.1 (nccl4py 0.6.0)"
TRAINER = {"gpu": "GPU-0", "nccl": NCCL}


class Named:
    """gloo under another name, which counts its groups."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.opened = 0
        self._inner = GlooTransport()

    def open(self, store: Any, rank: int, size: int, address: str, timeout_s: float) -> Channel:
        self.opened += 1
        return self._inner.open(store, rank, size, address, timeout_s)


class Peer:
    """A member in this process."""

    def __init__(
        self, url: str, keys: Keys, name: str, settings: SyncSettings, hello: Mapping[str, str], gpu: Mapping[str, str]
    ) -> None:
        self._client = connect(url)
        self._staged: queue.Queue[tuple[int, str]] = queue.Queue()
        self.transport = Named("nccl")
        self.receiver = Receiver(self._client, keys, name, hello, settings, self._take, self.transport, gpu)
        self.receiver.start()

    def _take(self, staged: StagedWeights) -> None:
        self._staged.put((staged.version.number, file_fingerprint(staged)))
        self.receiver.swapped(staged.version)

    def next(self) -> tuple[int, str]:
        return self._staged.get(timeout=PATIENCE_S)

    def close(self) -> None:
        self.receiver.close()
        self._client.close()


@pytest.fixture
def settings(tmp_path: Path) -> SyncSettings:
    return replace(GLOO, transport="auto", shm_dir=tmp_path)


Join = Callable[..., Peer]


@pytest.fixture
def join(valkey: EmbeddedRedis, keys: Keys, settings: SyncSettings) -> Iterator[Join]:
    peers = []

    def start(name: str, gpu: Mapping[str, str], shared: bool = False, hello: Mapping[str, str] = HELLO) -> Peer:
        """Without `shared` it is as if it ran elsewhere: its mode keeps it from showing a file."""
        peer = Peer(valkey.url, keys, name, settings if shared else replace(settings, transport="nccl"), hello, gpu)
        peers.append(peer)
        return peer

    yield start
    for peer in peers:
        peer.close()


@contextmanager
def publishing(client: redis.Redis, keys: Keys, settings: SyncSettings, mode: str = "auto") -> Iterator[Publisher]:
    hello = {**HELLO, "transport": mode}
    made = Publisher(client, keys, 1, hello, replace(settings, transport=mode), Named("nccl"), TRAINER)
    made.start()
    yield made
    made.close()
    made.check()


def transports(publisher: Publisher) -> dict[str, str]:
    return {name: member["transport"] for name, member in publisher.status()["members"].items()}


def test_a_group_uses_nccl_until_somebody_joins_that_cannot(
    redis_client: redis.Redis, keys: Keys, settings: SyncSettings, join: Join
) -> None:
    with publishing(redis_client, keys, settings) as publisher:
        a, b = join("a", {"gpu": "GPU-1", "nccl": NCCL}), join("b", {"gpu": "GPU-2", "nccl": NCCL})
        near = join("near", {}, shared=True)
        until(lambda: len(publisher.members()) == 3, "all join")
        publisher.publish(0, weights(0))
        for peer in (a, b, near):
            assert peer.next() == (0, expected(0))
        assert transports(publisher) == {"a": "nccl", "b": "nccl", "near": "shm"}
        assert (a.transport.opened, b.transport.opened, near.transport.opened) == (1, 1, 0)
        old = join("old", {"gpu": "GPU-3", "nccl": "2.21.5 (nccl4py 0.6.0)"})
        assert old.next() == (0, expected(0))
        publisher.publish(1, weights(1))
        for peer in (a, b, near, old):
            assert peer.next() == (1, expected(1))
        assert (a.transport.opened, old.transport.opened) == (1, 0), "the whole group has gone over to gloo"
        assert publisher.status()["failures"] == 0


def test_another_nccl_is_refused_where_nccl_is_wanted(
    redis_client: redis.Redis, keys: Keys, settings: SyncSettings, join: Join
) -> None:
    hello = {**HELLO, "transport": "nccl"}
    with publishing(redis_client, keys, settings, "nccl") as publisher:
        good = join("good", {"gpu": "GPU-1", "nccl": NCCL}, hello=hello)
        bad = join("bad", {"gpu": "GPU-2", "nccl": "2.21.5 (nccl4py 0.6.0)"}, hello=hello)
        until(bad.receiver.failed, "bad is refused")
        with pytest.raises(Refused) as refused:
            bad.receiver.check()
        for word in ("producer bad", "2.21.5", "2.30.1", "install the same nccl4py"):
            assert word in str(refused.value)
        publisher.publish(0, weights(0))
        assert good.next() == (0, expected(0))
        assert good.transport.opened == 1
