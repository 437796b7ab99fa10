"""Members that cannot take weights, and publishers that cannot host a rendezvous: told, tried again, and no hot loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from rollout_queue.connection import connect
from rollout_queue.keys import Keys
from tests.integration.test_weight_sync import until
from tests.sync_processes import HELLO, SETTINGS, weights
from weight_sync import epoch
from weight_sync.publisher import Publisher
from weight_sync.receiver import Receiver
from weight_sync.rendezvous import HostedStore, NotHosted
from weight_sync.staged import StagedWeights

HOT_S = 4.0
MOST_TRIES = 15  # within HOT_S; without rests between them 95 were seen


@pytest.fixture
def publisher(redis_client: redis.Redis, keys: Keys) -> Iterator[Publisher]:
    made = Publisher(redis_client, keys, 1, HELLO, SETTINGS)
    made.start()
    made.publish(0, weights(0))
    yield made
    made.close()
    made.check()


@pytest.fixture
def receiver(valkey, keys: Keys, tmp_path: Path) -> Iterator[Receiver]:
    """Its folder for versions is not there yet."""

    def on_staged(staged: StagedWeights) -> None:
        made.swapped(staged.version)

    client = connect(valkey.url)
    made = Receiver(client, keys, "a", HELLO, replace(SETTINGS, shm_dir=tmp_path / "late"), on_staged)
    made.start()
    yield made
    made.close()
    client.close()


def test_a_member_without_memory_is_tried_less_often_and_the_cause_is_told(
    publisher: Publisher, receiver: Receiver, tmp_path: Path
) -> None:
    until(lambda: "cannot make" in publisher.troubles().get("a", ""), "the cause is known")
    before = int(publisher.status()["failures"])
    time.sleep(HOT_S)
    assert int(publisher.status()["failures"]) - before < MOST_TRIES
    (tmp_path / "late").mkdir()
    until(lambda: publisher.members().get("a") == 0, "the member gets its weights")
    assert publisher.troubles() == {}
    receiver.check()


def test_a_rendezvous_that_cannot_be_hosted_blames_no_member(
    publisher: Publisher, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotHosted, match=r"no rendezvous can be hosted at 203\.0\.113\.7"):
        HostedStore("203.0.113.7", "p", b"", 1.0)
    failing = [True]

    def sometimes(host: str, prefix: str, manifest: bytes, timeout_s: float) -> HostedStore:
        return HostedStore("203.0.113.7" if failing else host, prefix, manifest, timeout_s)

    monkeypatch.setattr(epoch, "HostedStore", sometimes)
    (tmp_path / "late").mkdir()
    until(lambda: "no rendezvous can be hosted" in publisher.status()["last_failure"], "the cause is told")
    drops = publisher.status()["drops"]
    time.sleep(1.5)
    assert publisher.status()["drops"] == drops
    failing.clear()
    until(lambda: publisher.members().get("a") == 0, "the member gets its weights")
