"""The shm transport with real processes and a real Valkey: members read the publisher's memory in place."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from nbehind.embedded import EmbeddedRedis
from rollout_queue.keys import Keys
from rollout_queue.messages import Version
from tests.integration.test_weight_sync import give, join_all, until
from tests.sync_processes import HELLO as GLOO_HELLO
from tests.sync_processes import PATIENCE_S, Handle, Spawner, expected, processes, weights
from tests.sync_processes import SETTINGS as GLOO
from weight_sync.channel import SyncSettings
from weight_sync.publisher import Publisher

HELLO = {**GLOO_HELLO, "transport": "auto"}


@pytest.fixture
def settings(tmp_path: Path) -> SyncSettings:
    folder = tmp_path / "shm"
    folder.mkdir()
    return replace(GLOO, transport="auto", shm_dir=folder)


class Members:
    """Starts members of this test's folder of shared memory."""

    def __init__(self, spawner: Spawner, settings: SyncSettings) -> None:
        self._spawner, self._settings = spawner, settings

    def __call__(self, name: str, **changes: object) -> Handle:
        values = {"hello": HELLO, "settings": self._settings, **changes}
        return self._spawner.member(name, **values)  # type: ignore[arg-type]


@pytest.fixture
def spawn(valkey: EmbeddedRedis, keys: Keys, settings: SyncSettings) -> Iterator[Members]:
    with processes(valkey.url, keys.run) as spawner:
        yield Members(spawner, settings)


@pytest.fixture
def publisher(redis_client: redis.Redis, keys: Keys, settings: SyncSettings) -> Iterator[Publisher]:
    made = Publisher(redis_client, keys, 1, HELLO, settings)
    made.start()
    yield made
    made.close()
    made.check()


def regions(settings: SyncSettings) -> list[Path]:
    """The publisher's memory, without the members' names for it."""
    return sorted(settings.shm_dir.glob("*-trainer-*"))


def transports(publisher: Publisher) -> dict[str, str]:
    return {name: member["transport"] for name, member in publisher.status()["members"].items()}


def test_members_of_one_machine_read_the_same_memory(
    publisher: Publisher, spawn: Members, settings: SyncSettings
) -> None:
    a, b = spawn("a"), spawn("b", swap=False)
    join_all(publisher, "a", "b")
    for number in range(20):
        publisher.publish(number, weights(number))
        checksum = publisher.wait_checksum(number, PATIENCE_S).checksum
        for member in (a, b):
            kind, version, found, path = member.next()
            assert (kind, version, found) == ("staged", Version(1, number, checksum), expected(number))
        inodes = {p.stat().st_ino for p in regions(settings)}
        assert Path(path).stat().st_ino in inodes
        b.tell("swapped", version)
        until(lambda n=number: all(v == n for v in publisher.members().values()), "acks")
    assert transports(publisher) == {"a": "shm", "b": "shm"}
    assert publisher.status()["epoch"] == 0, "no group is needed"
    assert publisher.status()["failures"] == 0
    assert len(regions(settings)) <= 3
    assert publisher.given("a") == set(range(20))
    late = spawn("late")
    assert late.staged()[1] == expected(19)


def test_members_elsewhere_form_a_group_beside_it(publisher: Publisher, spawn: Members, settings: SyncSettings) -> None:
    """Settings without shm stand for another machine: no file of theirs is to be seen here."""
    far = replace(settings, transport="gloo")
    near, one, two = spawn("near"), spawn("one", settings=far), spawn("two", settings=far)
    join_all(publisher, "near", "one", "two")
    for number in range(3):
        give(publisher, number, near, one, two)
    assert transports(publisher) == {"near": "shm", "one": "gloo", "two": "gloo"}
    assert publisher.status()["epoch"] == 1
    two.kill()
    give(publisher, 3, near, one)


def test_a_slow_member_keeps_its_version_while_the_others_go_on(
    publisher: Publisher, spawn: Members, settings: SyncSettings
) -> None:
    quick, slow = spawn("quick"), spawn("slow", swap=False)
    join_all(publisher, "quick", "slow")
    kept = {}
    for number in range(8):
        publisher.publish(number, weights(number))
        assert quick.staged()[1] == expected(number)
        if number < 2:
            _, version, found, path = slow.next()
            kept[version] = Path(path)
            assert found == expected(number)
    before = [path.read_bytes() for path in kept.values()]
    publisher.publish(8, weights(8))
    assert quick.staged()[1] == expected(8)
    assert [path.read_bytes() for path in kept.values()] == before
    assert before[0] != before[1]
    assert len(regions(settings)) <= 2 + 2 * 2
    slow.tell("swapped", max(kept))
    version, found = slow.staged()
    assert (version.number, found) == (8, expected(8)), "then it gets the newest"
    slow.tell("swapped", version)
    for number in range(9, 13):
        publisher.publish(number, weights(number))
        assert quick.staged()[1] == expected(number)
        slow.tell("swapped", slow.staged()[0])
    assert len(regions(settings)) <= 3, "what is not needed any more is given back"
    assert publisher.status()["failures"] == 0


def test_a_member_that_dies_with_a_version_in_hand_blocks_nobody(
    publisher: Publisher, spawn: Members, settings: SyncSettings
) -> None:
    a, dead = spawn("a"), spawn("dead", swap=False)
    join_all(publisher, "a", "dead")
    for number in (0, 1):
        publisher.publish(number, weights(number))
        assert a.staged()[1] == dead.staged()[1] == expected(number)
    dead.kill()
    for number in range(2, 8):
        give(publisher, number, a)
    assert len(regions(settings)) <= 3
    assert publisher.status()["drops"] <= 1


def test_a_dead_member_of_this_machine_is_not_waited_for(
    redis_client: redis.Redis, keys: Keys, spawn: Members, settings: SyncSettings
) -> None:
    """Its mark in Redis would last, and its verdict is never to come: the lock that died with it tells."""
    patient = replace(settings, alive_ttl_s=600.0, transfer_timeout_s=600.0)
    made = Publisher(redis_client, keys, 1, HELLO, patient)
    made.start()
    a, dead = spawn("a", settings=patient), spawn("dead", settings=patient)
    join_all(made, "a", "dead")
    dead.kill()
    for number in range(3):
        give(made, number, a)
    assert made.status()["drops"] == 1
    made.close()
    made.check()


def test_a_stopped_member_costs_its_deadline_and_comes_back(publisher: Publisher, spawn: Members) -> None:
    a, b = spawn("a"), spawn("b")
    join_all(publisher, "a", "b")
    give(publisher, 0, a, b)
    os.kill(b.process.pid, signal.SIGSTOP)
    for number in (1, 2, 3):
        publisher.publish(number, weights(number))
        assert a.staged()[1] == expected(number)
    until(lambda: set(publisher.members()) == {"a"}, "b is out")
    b.continue_()
    version, found = b.staged()
    while version.number < 3:  # what it finds in its calls may still be there
        assert found == expected(version.number)
        version, found = b.staged()
    assert found == expected(3)
    give(publisher, 4, a, b)


def test_memory_outlives_a_publisher_for_whoever_still_needs_it(
    redis_client: redis.Redis, keys: Keys, spawn: Members, settings: SyncSettings
) -> None:
    """A trainer that is restarted must not take the weights from an engine that is about to load them."""
    first = Publisher(redis_client, keys, 1, HELLO, settings)
    first.start()
    holder = spawn("holder", swap=False)
    join_all(first, "holder")
    first.publish(0, weights(0))
    _, version, _, path = holder.next()
    before = Path(path).read_bytes()
    first.close()
    first.check()
    assert regions(settings) == []
    second = Publisher(redis_client, keys, 2, HELLO, settings)  # cleans the folder
    second.start()
    assert Path(path).read_bytes() == before
    holder.tell("swapped", version)
    second.publish(1, weights(1))
    assert holder.staged()[1] == expected(1)
    second.close()


def test_what_killed_processes_leave_is_removed(
    redis_client: redis.Redis, keys: Keys, valkey: EmbeddedRedis, settings: SyncSettings
) -> None:
    with processes(valkey.url, keys.run) as spawner:
        first = spawner.publisher(1, settings=settings, hello=HELLO)
        a = spawner.member("a", hello=HELLO, settings=settings, swap=False)
        until(lambda: redis_client.hlen(keys.members) == 1, "a joins")
        first.tell("publish", 0)
        assert a.staged()[1] == expected(0)
        first.kill()
        a.kill()
        left = {path for path in settings.shm_dir.iterdir() if path.stat().st_size}  # one may be without a name yet
        assert len(left) >= 2
        second = Publisher(redis_client, keys, 2, HELLO, settings)
        assert not left & set(settings.shm_dir.iterdir())
        second.close()
        assert not [path for path in settings.shm_dir.iterdir() if path.stat().st_size]


def test_damaged_memory_is_never_handed_out(publisher: Publisher, spawn: Members, settings: SyncSettings) -> None:
    a = spawn("a")
    join_all(publisher, "a")
    give(publisher, 0, a)
    for path in regions(settings):
        with path.open("r+b") as file:
            file.seek(1000)
            byte = file.read(1)
            file.seek(1000)
            file.write(bytes([byte[0] ^ 1]))
    b = spawn("b")
    until(lambda: "arrived damaged" in publisher.status()["last_failure"], "b finds it")
    assert b.silent(0.5)
    publisher.publish(1, weights(1))
    assert a.staged()[1] == b.staged()[1] == expected(1)


def test_a_member_that_cannot_share_is_refused_when_shm_is_wanted(
    redis_client: redis.Redis, keys: Keys, spawn: Members, settings: SyncSettings
) -> None:
    hello = {**HELLO, "transport": "shm"}
    publisher = Publisher(redis_client, keys, 1, hello, replace(settings, transport="shm"))
    publisher.start()
    near = spawn("near", hello=hello, settings=replace(settings, transport="shm"))
    far = spawn("far", hello=hello, settings=replace(settings, transport="gloo"))
    kind, error, text, _ = far.next()
    assert (kind, error) == ("failed", "Refused")
    for part in ("producer far", "/dev/shm", 'sync.transport = "shm"', '"auto"'):
        assert part in text, text
    give(publisher, 0, near)
    publisher.close()
    publisher.check()


def test_nothing_and_another_dtype_go_over_shm_too(
    redis_client: redis.Redis, keys: Keys, spawn: Members, settings: SyncSettings
) -> None:
    publisher = Publisher(redis_client, keys, 1, HELLO, settings)
    publisher.start()
    a = spawn("a")
    publisher.publish(0, [])
    assert a.staged()[0] == publisher.wait_checksum(0, PATIENCE_S)
    publisher.close()
    publisher.check()
