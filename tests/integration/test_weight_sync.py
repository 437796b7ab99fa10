"""The weight channel with real processes, real gloo and a real Valkey."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis
import torch

from nbehind.embedded import EmbeddedRedis
from rollout_queue.connection import connect
from rollout_queue.keys import Keys
from rollout_queue.messages import Version
from tests.sync_processes import HELLO, PATIENCE_S, SETTINGS, Handle, Spawner, expected, processes, weights
from weight_sync.channel import SyncSettings
from weight_sync.errors import ChannelClosed, Refused, Superseded, SyncError, TransferFailed
from weight_sync.publisher import Publisher


def until(true: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


@pytest.fixture
def spawn(valkey: EmbeddedRedis, keys: Keys) -> Iterator[Spawner]:
    with processes(valkey.url, keys.run) as spawner:
        yield spawner


@pytest.fixture
def publisher(redis_client: redis.Redis, keys: Keys) -> Iterator[Publisher]:
    made = Publisher(redis_client, keys, 1, HELLO, SETTINGS)
    made.start()
    yield made
    made.close()
    made.check()


def join_all(publisher: Publisher, *names: str) -> None:
    until(lambda: set(names) <= set(publisher.members()), f"{names} join")


def give(publisher: Publisher, number: int, *members: Handle, incarnation: int = 1) -> None:
    """Publish a version, and see every member get exactly its bits."""
    publisher.publish(number, weights(number))
    checksum = publisher.wait_checksum(number, PATIENCE_S).checksum
    for member in members:
        assert member.staged() == (Version(incarnation, number, checksum), expected(number))
    until(lambda: all(v == number for n, v in publisher.members().items()), "acks")


def test_two_members_receive_twenty_versions_bit_for_bit(publisher: Publisher, spawn: Spawner) -> None:
    a, b = spawn.member("a"), spawn.member("b")
    join_all(publisher, "a", "b")
    for number in range(20):
        give(publisher, number, a, b)
    assert publisher.given("a") == publisher.given("b") == set(publisher.history()) == set(range(20))
    assert publisher.given("nobody") == set()
    assert publisher.status()["failures"] == 0
    assert publisher.status()["epoch"] == 1, "one set of members needs one group"


def test_a_late_joiner_gets_the_current_version_at_once(publisher: Publisher, spawn: Spawner) -> None:
    a = spawn.member("a")
    for number in (0, 1):
        give(publisher, number, a)
    b = spawn.member("b")
    version, found = b.staged()
    assert (version.number, found) == (1, expected(1))
    assert publisher.given("b") == {1}
    give(publisher, 2, a, b)
    assert publisher.given("b") == {1, 2}


def test_the_trainer_casts_once_for_all(redis_client: redis.Redis, keys: Keys, spawn: Spawner) -> None:
    hello = {**HELLO, "dtype": "bfloat16"}
    publisher = Publisher(redis_client, keys, 1, hello, SETTINGS)
    publisher.start()
    member = spawn.member("a", hello=hello)
    publisher.publish(0, weights(0))
    assert member.staged()[1] == expected(0, dtype=torch.bfloat16)
    publisher.close()


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_member_lost_in_mid_transfer_costs_its_deadline_and_no_more(
    publisher: Publisher, spawn: Spawner, fault: str
) -> None:
    a, lost, b = spawn.member("a"), spawn.member("lost", fault=fault), spawn.member("z")
    join_all(publisher, "a", "lost", "z")
    give(publisher, 0, a, b)
    assert publisher.status()["drops"] == 1
    assert "lost" not in publisher.members()
    if fault == "stop":
        lost.wait_stopped()
        assert lost.silent(0.1)
        lost.continue_()
        assert lost.staged() == (publisher.wait_checksum(0, 1), expected(0)), "it joins again by itself"
        give(publisher, 1, a, b, lost)
    else:
        give(publisher, 1, a, b)


def test_a_member_that_sleeps_through_publishes_costs_its_deadline(publisher: Publisher, spawn: Spawner) -> None:
    """Stopped between transfers, longer than its mark lives: it is out of the register, and comes back by itself."""
    a, b = spawn.member("a"), spawn.member("b")
    join_all(publisher, "a", "b")
    give(publisher, 0, a, b)
    os.kill(b.process.pid, signal.SIGSTOP)
    publisher.publish(1, weights(1))
    assert a.staged()[1] == expected(1)
    until(lambda: set(publisher.members()) == {"a"}, "b is out")
    publisher.publish(2, weights(2))
    assert a.staged()[1] == expected(2)
    time.sleep(SETTINGS.alive_ttl_s)
    b.continue_()
    assert b.staged()[1] == expected(2)
    give(publisher, 3, a, b)


@pytest.mark.parametrize("fault", ["kill_open", "kill_last"])
def test_a_member_killed_at_either_end_of_a_transfer_is_left_out(
    publisher: Publisher, spawn: Spawner, fault: str
) -> None:
    """At the rendezvous, when all have come already, and after the last bucket, when only its verdict is missing."""
    a, b, _ = spawn.member("a"), spawn.member("b"), spawn.member("lost", fault=fault)
    join_all(publisher, "a", "b", "lost")
    give(publisher, 0, a, b)
    assert set(publisher.members()) == {"a", "b"}
    give(publisher, 1, a, b)


def test_a_dead_member_is_not_waited_for_at_the_next_rendezvous(
    redis_client: redis.Redis, keys: Keys, spawn: Spawner
) -> None:
    """A rendezvous with a dead member ends when its mark expires, not by its own deadline."""
    settings = replace(SETTINGS, join_timeout_s=1000.0)
    publisher = Publisher(redis_client, keys, 1, HELLO, settings)
    publisher.start()
    a, dead = spawn.member("a"), spawn.member("dead")
    join_all(publisher, "a", "dead")
    give(publisher, 0, a, dead)
    dead.kill()
    b = spawn.member("b")
    assert b.staged()[1] == expected(0)
    publisher.publish(1, weights(1))
    for member in (a, b):
        assert member.staged()[1] == expected(1)
    publisher.close()
    publisher.check()


def test_a_publisher_stopped_in_mid_transfer_goes_on_when_it_wakes(
    spawn: Spawner, redis_client: redis.Redis, keys: Keys
) -> None:
    stopped = spawn.publisher(1, fault="stop")
    a, b = spawn.member("a"), spawn.member("b")
    until(lambda: redis_client.hlen(keys.members) == 2, "members join")
    stopped.tell("publish", 0)
    stopped.wait_stopped()
    assert a.silent(SETTINGS.transfer_timeout_s + 1), "nothing partial"
    assert b.silent(0.0)
    stopped.continue_()
    for member in (a, b):
        assert member.staged()[1] == expected(0)


def test_a_publisher_killed_in_mid_transfer_leaves_nothing_partial(
    redis_client: redis.Redis, keys: Keys, spawn: Spawner
) -> None:
    first = spawn.publisher(1, fault="kill")
    a, b = spawn.member("a"), spawn.member("b")
    until(lambda: redis_client.hlen(keys.members) == 2, "members join")
    first.tell("publish", 7)
    first.process.join(PATIENCE_S)
    assert first.process.exitcode == -9
    assert a.silent(0.5)
    assert b.silent(0.0)
    second = Publisher(redis_client, keys, 2, HELLO, SETTINGS)
    second.start()
    give(second, 3, a, b, incarnation=2)  # a resumed trainer may be at an older number
    give(second, 4, a, b, incarnation=2)
    second.close()
    second.check()


def test_a_publisher_that_was_replaced_stops_and_nobody_listens_to_it(
    redis_client: redis.Redis, keys: Keys, spawn: Spawner
) -> None:
    old = Publisher(redis_client, keys, 1, HELLO, SETTINGS)
    old.start()
    a = spawn.member("a")
    give(old, 5, a)
    new = Publisher(redis_client, keys, 2, HELLO, SETTINGS)
    new.start()
    new.publish(2, weights(2))
    assert a.staged() == (new.wait_checksum(2, PATIENCE_S), expected(2))
    old.publish(6, weights(6))
    until(lambda: not old.healthy(), "the old one sees that it is replaced")
    with pytest.raises(SyncError, match="incarnation 2 has taken over"):
        old.check()
    with pytest.raises(SyncError, match="incarnation 2 has taken over"):
        old.publish(7, weights(7))
    assert a.silent(0.3)
    give(new, 3, a, incarnation=2)
    old.close()
    new.close()
    with pytest.raises(Superseded):
        Publisher(redis_client, keys, 1, HELLO, SETTINGS).start()


def test_a_flipped_bit_is_never_handed_out_and_the_version_is_sent_again(publisher: Publisher, spawn: Spawner) -> None:
    a, b = spawn.member("a", fault="flip"), spawn.member("b")
    join_all(publisher, "a", "b")
    give(publisher, 0, a, b)  # a's first copy was damaged
    status = publisher.status()
    assert status["failures"] >= 1
    assert "arrived damaged" in status["last_failure"]
    give(publisher, 1, a, b)


def test_a_member_whose_memory_flips_every_time_gets_nothing(publisher: Publisher, spawn: Spawner) -> None:
    bad, good = spawn.member("bad", fault="flip_always"), spawn.member("good")
    join_all(publisher, "bad", "good")
    for number in range(3):
        publisher.publish(number, weights(number))
        assert good.staged()[1] == expected(number)
    assert bad.silent(0.5)
    assert publisher.members().get("bad", -1) == -1
    until(lambda: publisher.status()["drops"] >= 1, "it is dropped after some failures in a row")


def test_a_mismatch_is_refused_with_both_sides_and_the_remedy(publisher: Publisher, spawn: Spawner) -> None:
    good = spawn.member("good")
    bad = spawn.member("bad", hello={**HELLO, "tokenizer": "other", "dtype": "bfloat16", "torch": "1.0"})
    kind, error, text, _ = bad.next()
    assert (kind, error) == ("failed", "Refused")
    for part in (
        "producer bad",
        "tokenizer = other",
        "trainer has t",
        "bfloat16",
        "float32",
        "model.path",
        "model.dtype",
    ):
        assert part in text, text
    assert "torch" not in text, "gloo works between torch versions"
    give(publisher, 0, good)
    assert publisher.given("bad") == set()


def test_two_members_of_one_name_are_told_apart(publisher: Publisher, spawn: Spawner) -> None:
    first = spawn.member("same")
    join_all(publisher, "same")
    second = spawn.member("same")
    kind, error, text, _ = first.next()
    assert (kind, error) == ("failed", "Refused")
    assert "name of its own" in text
    give(publisher, 0, second)


def test_a_member_that_swaps_slowly_holds_nobody_up(publisher: Publisher, spawn: Spawner) -> None:
    quick, slow = spawn.member("quick"), spawn.member("slow", swap=False)
    join_all(publisher, "quick", "slow")
    kept = {}
    for number in range(6):
        publisher.publish(number, weights(number))
        assert quick.staged()[1] == expected(number)
        if number < 2:
            _, version, found, path = slow.next()
            kept[version] = path
            assert found == expected(number)
    assert slow.silent(0.5), "both of its buffers hold versions that it has not taken"
    assert len(set(kept.values())) == 2
    slow.tell("swapped", max(kept))
    version, found = slow.staged()
    assert (version.number, found) == (5, expected(5)), "then it gets the newest"
    give_to_quick = weights(6)
    publisher.publish(6, give_to_quick)
    assert quick.staged()[1] == expected(6)
    assert slow.staged()[1] == expected(6)
    assert publisher.status()["failures"] == 0


def test_the_newest_version_wins(redis_client: redis.Redis, keys: Keys, spawn: Spawner) -> None:
    """Versions published faster than they are sent are skipped, and only those that were sent are in the history."""
    publisher = Publisher(redis_client, keys, 1, HELLO, SETTINGS)
    for number in range(10):
        publisher.publish(number, weights(number))
    assert publisher.status()["skipped"] == 9
    publisher.start()
    a = spawn.member("a")
    assert a.staged() == (publisher.wait_checksum(9, PATIENCE_S), expected(9))
    assert set(publisher.history()) == {9}
    with pytest.raises(Superseded, match="overtaken by version 9"):
        publisher.wait_checksum(4, 1.0)
    with pytest.raises(TransferFailed, match="was it published"):
        publisher.wait_checksum(10, 0.05)
    publisher.close()
    with pytest.raises(ChannelClosed):
        publisher.publish(11, weights(11))


def test_what_cannot_be_published(publisher: Publisher, spawn: Spawner) -> None:
    a = spawn.member("a")
    give(publisher, 3, a)
    with pytest.raises(SyncError, match="numbers only grow"):
        publisher.publish(3, weights(3))
    with pytest.raises(Refused, match=r"embed float32\[10000, 10\] has become embed float32\[20000, 10\]"):
        publisher.publish(4, weights(4, size=200_000))
    with pytest.raises(Refused, match="7 tensors have become 6"):
        publisher.publish(4, weights(4)[:-1])
    with pytest.raises(Refused, match="given twice"):
        publisher.publish(4, [*weights(4), ("embed", torch.zeros(1))])
    with pytest.raises(Refused, match="meta"):
        publisher.publish(4, [("embed", torch.empty(3, device="meta"))])
    give(publisher, 4, a)


def test_nothing_to_send_is_sent_too(publisher: Publisher, spawn: Spawner) -> None:
    a = spawn.member("a")
    publisher.publish(0, [])
    version, _ = a.staged()
    assert version == publisher.wait_checksum(0, PATIENCE_S)


def test_history_of_an_earlier_life_is_kept_and_pruned(publisher: Publisher, spawn: Spawner) -> None:
    publisher.seed_history({3: "c3", 4: "c4"})
    a = spawn.member("a")
    give(publisher, 5, a)
    assert publisher.history() == {3: "c3", 4: "c4", 5: publisher.wait_checksum(5, 1).checksum}
    publisher.prune(5)
    assert set(publisher.history()) == {5}
    assert publisher.given("a") == {5}
    publisher.prune(6)
    assert publisher.given("a") == set()


def test_a_restarted_and_flushed_redis_costs_no_version(tmp_path: Path) -> None:
    """The server dies, loses everything and comes back: both ends wait, and the members register again."""
    keys = Keys("flushed")
    with EmbeddedRedis(tmp_path, max_mb=64) as server, processes(server.url, keys.run) as spawn:
        client = connect(server.url)
        publisher = Publisher(client, keys, 1, HELLO, SETTINGS)
        publisher.start()
        a, b = spawn.member("a"), spawn.member("b")
        join_all(publisher, "a", "b")
        give(publisher, 0, a, b)
        server.kill()
        publisher.publish(1, weights(1))
        time.sleep(0.5)
        server.restart()
        assert a.staged()[1] == expected(1)
        assert b.staged()[1] == expected(1)
        client.flushall()
        give(publisher, 2, a, b)
        give(publisher, 3, a, b)
        publisher.close()
        publisher.check()
        client.close()


def test_a_redis_that_stays_away_ends_both_ends_with_the_reason(tmp_path: Path) -> None:
    keys = Keys("gone")
    settings = replace(SETTINGS, retry_s=0.5)
    with EmbeddedRedis(tmp_path, max_mb=64) as server, processes(server.url, keys.run) as spawn:
        client = connect(server.url)
        publisher = Publisher(client, keys, 1, HELLO, settings)
        publisher.start()
        a = spawn.member("a", settings=settings)
        join_all(publisher, "a")
        server.kill()
        kind, error, text, _ = a.next()
        assert (kind, error) == ("failed", "SyncError")
        assert "Redis did not answer" in text
        until(lambda: not publisher.healthy(), "the publisher gives up")
        with pytest.raises(SyncError, match=r"Redis did not answer for 0\.5 s"):
            publisher.check()
        publisher.close()
        client.close()


def test_the_channel_works_while_redis_is_full(tmp_path: Path) -> None:
    """Training on is what frees memory, so weights, joins and heartbeats must not need any."""
    keys = Keys("full")
    with EmbeddedRedis(tmp_path, max_mb=64) as server, processes(server.url, keys.run) as spawn:
        client = connect(server.url)
        publisher = Publisher(client, keys, 1, HELLO, SETTINGS)
        publisher.start()
        a = spawn.member("a")
        give(publisher, 0, a)
        client.config_set("maxmemory", "1mb")
        with pytest.raises(redis.exceptions.ResponseError, match="used memory"):
            client.set("x", "y" * 1000)
        b = spawn.member("b")
        assert b.staged()[1] == expected(0)
        time.sleep(SETTINGS.alive_ttl_s * 1.5)
        assert set(publisher.members()) == {"a", "b"}
        for number in range(1, 5):
            give(publisher, number, a, b)
        publisher.close()
        publisher.check()
        client.close()


def test_redis_holds_no_more_after_many_updates(
    publisher: Publisher, spawn: Spawner, redis_client: redis.Redis, keys: Keys
) -> None:
    a = spawn.member("a", settings=replace(SETTINGS, bucket_bytes=2**20))
    for number in range(150):
        publisher.publish(number, weights(number, size=100))
        assert a.staged(PATIENCE_S)[0].number == number
    assert redis_client.xlen(keys.sync_calls) <= 64
    assert redis_client.xlen(keys.sync_acks) <= 1000
    assert redis_client.hlen(keys.members) == redis_client.hlen(keys.member_status) == 1


def _resident_kib(pid: int | str) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4


def _held(kind: str) -> int:
    """Threads ("task") or descriptors ("fd") of this process."""
    return len(list(Path(f"/proc/self/{kind}").iterdir()))


def test_two_hundred_epochs_leave_no_memory_threads_or_descriptors(publisher: Publisher, spawn: Spawner) -> None:
    """b holds one version; it takes the next, misses the one after, swaps and catches up: three sets, three groups a turn."""
    a, b = spawn.member("a"), spawn.member("b", swap=False)
    join_all(publisher, "a", "b")
    give(publisher, 0, a, b)
    marks = []
    for turn in range(70):
        give(publisher, 2 * turn + 1, a, b)
        publisher.publish(2 * turn + 2, weights(2 * turn + 2))
        assert a.staged()[0].number == 2 * turn + 2
        b.tell("swapped", publisher.wait_checksum(2 * turn + 1, 1.0))
        assert b.staged()[0].number == 2 * turn + 2
        if turn in (20, 69):
            marks.append((_resident_kib("self"), _resident_kib(a.process.pid), _held("task"), _held("fd")))
    assert publisher.status()["epoch"] >= 200
    assert publisher.status()["failures"] == 0
    early, late = marks
    assert late[0] - early[0] < 20_000, "KiB of the publisher"
    assert late[1] - early[1] < 20_000, "KiB of a member"
    assert late[2] <= early[2] + 2, marks
    assert late[3] <= early[3] + 4, marks


def test_shared_files_go_with_their_process(publisher: Publisher, spawn: Spawner, tmp_path: Path) -> None:
    settings = replace(SETTINGS, shm_dir=tmp_path)
    killed = spawn.member("killed", settings=settings)
    give(publisher, 0, killed)
    assert len(list(tmp_path.iterdir())) == 1
    killed.kill()
    left = list(tmp_path.iterdir())
    assert len(left) == 1, "SIGKILL leaves the file"
    other = spawn.member("other", settings=settings)
    assert other.staged()[1] == expected(0)
    assert left[0] not in set(tmp_path.iterdir()), "the next receiver removes it"
    again = spawn.member("again", settings=settings)
    assert again.staged()[1] == expected(0)
    assert len(list(tmp_path.iterdir())) == 2, "files of living members stay"
    for member in (other, again):
        member.tell("close")
        member.process.join(PATIENCE_S)
    assert list(tmp_path.iterdir()) == []


def test_closing_before_starting_and_twice(redis_client: redis.Redis, keys: Keys) -> None:
    publisher = Publisher(redis_client, keys, 1, HELLO, SETTINGS)
    publisher.close()
    publisher.close()
    with pytest.raises(SyncError, match=r"no-such-if0.*lo"):
        Publisher(redis_client, keys, 1, HELLO, SyncSettings(interface="no-such-if0"))
    with pytest.raises(SyncError, match="not a torch dtype"):
        Publisher(redis_client, keys, 1, {**HELLO, "dtype": "float31"}, SETTINGS)
