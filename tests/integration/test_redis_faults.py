"""The queue on a Redis that is full, flushed, killed, silent, misconfigured or fed with rubbish."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
from queue_samples import group, request, same_group

from nbehind.embedded import EmbeddedRedis
from rollout_queue import connection
from rollout_queue.connection import check_server, connect, repeat, resolve_password
from rollout_queue.errors import ConnectionRefused, OutOfMemory, UnsuitableRedis
from rollout_queue.exchange import exchange, get_values
from rollout_queue.keys import Keys
from rollout_queue.messages import CommitResult, DeadNotice, GroupHeader, Lease
from rollout_queue.redis_queue import RedisQueue

PASSWORD = 'p@ss:w/o#r?d% "\\é'


def queue_on(client: redis.Redis, keys: Keys, retry_s: float = 30.0) -> RedisQueue:
    return RedisQueue(client, keys, 600.0, 3, 10**8, retry_s=retry_s)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A server that the test may break."""
    with EmbeddedRedis(tmp_path / "own", max_mb=16) as server:
        yield server


@pytest.fixture
def own_client(own: EmbeddedRedis) -> Iterator[redis.Redis]:
    client = connect(own.url)
    yield client
    client.close()


@pytest.fixture
def fresh() -> Keys:
    return Keys(f"faults-{uuid.uuid4().hex[:8]}")


def issue(trainer: RedisQueue, count: int, **options: int) -> None:
    trainer.issue([request(slot, trainer.state().incarnation, **options) for slot in range(count)])


def fill(producer: RedisQueue, leases: list[Lease]) -> list[Lease]:
    """Commit 2 MB groups until the server refuses; returns the leases left over."""
    left = list(leases)
    with pytest.raises(OutOfMemory, match="full"):
        while left:
            producer.commit(left[0], group(left[0], lengths=(250_000, 1)))
            left.pop(0)
    assert left
    return left


class TestFullMemory:
    def test_everything_that_frees_or_renews_still_works(self, own_client: redis.Redis, fresh: Keys) -> None:
        trainer, producer = queue_on(own_client, fresh), queue_on(own_client, fresh)
        trainer.claim(0)
        issue(trainer, 20)
        left = fill(producer, producer.lease("p1", 0, 16, 0.0))
        own_client.config_set("maxmemory", "1mb")  # far below what is in use now
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            own_client.set("x", "y")

        assert producer.renew(left) == []
        trainer.announce(2)
        trainer.heartbeat(60.0)
        producer.heartbeat("p1", 60.0, {"a": "b"})
        assert producer.state().trainer_alive and producer.producers() == {"p1": {"a": "b"}}
        assert trainer.raise_floor(1)[left[0].request.id] == 0
        assert len(producer.lease("p2", 1, 1, 0.0)) == 1
        for _ in range(3):
            producer.give_back(left[0], "boom")
            left[:1] = [lease for lease in producer.lease("p1", 1, 1, 0.0) if lease.request.id == left[0].request.id]
        producer.give_back(left[1])
        with pytest.raises(OutOfMemory):
            trainer.issue([request(99, 1)])
        assert trainer.memory_full()
        arrived = trainer.poll(1.0)
        assert [header.id for header in arrived if isinstance(header, DeadNotice)] == [request(len(arrived) - 1, 1).id]
        assert None not in trainer.fetch([header for header in arrived[:1] if isinstance(header, GroupHeader)])
        assert len(trainer.dead_letters()) == 1
        producer.leave("p1")
        trainer.release(arrived)
        trainer.withdraw([left[2].request.id])
        trainer.finish("full")
        assert producer.state().ended == "full"
        assert own_client.xlen(fresh.rollouts) == 0

    def test_a_refused_commit_works_after_a_release(self, own_client: redis.Redis, fresh: Keys) -> None:
        trainer, producer = queue_on(own_client, fresh), queue_on(own_client, fresh)
        trainer.claim(0)
        issue(trainer, 16)
        left = fill(producer, producer.lease("p1", 0, 16, 0.0))
        assert trainer.memory_full()
        assert not trainer.memory_full(), "once for every refusal"
        trainer.release(trainer.poll(1.0))
        assert producer.commit(left[0], group(left[0], lengths=(250_000, 1))) is CommitResult.OK
        assert not trainer.memory_full()
        assert [header.id for header in trainer.poll(1.0)] == [left[0].request.id]

    def test_a_claim_on_a_full_server(self, own_client: redis.Redis, fresh: Keys) -> None:
        trainer, producer = queue_on(own_client, fresh), queue_on(own_client, fresh)
        trainer.claim(0)
        issue(trainer, 16)
        fill(producer, producer.lease("p1", 0, 16, 0.0))
        heir = queue_on(own_client, fresh)
        assert heir.claim(0) == 2
        arrived = heir.poll(0.0)
        assert arrived
        heir.release(arrived)
        heir.issue([request(0, 2)])

    def test_a_refusal_is_counted_by_a_server_that_has_lost_its_scripts(
        self, own_client: redis.Redis, fresh: Keys
    ) -> None:
        trainer, producer = queue_on(own_client, fresh), queue_on(own_client, fresh)
        trainer.claim(0)
        issue(trainer, 1)
        (lease,) = producer.lease("p1", 0, 1, 0.0)
        own_client.config_set("maxmemory", "1mb")
        own_client.script_flush()
        with pytest.raises(OutOfMemory):
            producer.commit(lease, group(lease))
        assert trainer.memory_full()


class TestLostState:
    def test_scripts_are_loaded_again(self, own_client: redis.Redis, fresh: Keys) -> None:
        trainer = queue_on(own_client, fresh)
        trainer.claim(0)
        own_client.script_flush()
        issue(trainer, 1)
        assert len(trainer.lease("p1", 0, 1, 0.0)) == 1

    def test_lost_consumer_groups_are_made_again(self, own_client: redis.Redis, fresh: Keys) -> None:
        trainer, producer = queue_on(own_client, fresh), queue_on(own_client, fresh)
        trainer.claim(0)
        issue(trainer, 3)
        leased, delivered = producer.lease("p1", 0, 2, 0.0)
        producer.commit(delivered, group(delivered))
        own_client.xgroup_destroy(fresh.requests, "producers")
        own_client.xgroup_destroy(fresh.rollouts, "trainer")
        assert producer.renew([leased]) == [leased]
        producer.leave("p1")
        assert len(trainer.poll(0.0)) == 1
        again = producer.lease("p2", 0, 9, 0.0)
        assert sorted(lease.request.id.slot for lease in again) == [0, 2]
        assert producer.commit(leased, group(leased)) is CommitResult.FENCED

    @pytest.mark.parametrize("lost", ["requests", "rollouts"])
    def test_open_marks_without_their_entry_are_forgotten(
        self, own_client: redis.Redis, fresh: Keys, lost: str
    ) -> None:
        trainer, producer = queue_on(own_client, fresh), queue_on(own_client, fresh)
        trainer.claim(0)
        issue(trainer, 4)
        for lease in producer.lease("p1", 0, 2, 0.0):
            producer.commit(lease, group(lease))
        own_client.delete(getattr(fresh, lost))
        kept = {0, 1} if lost == "requests" else {2, 3}
        assert {request_id.slot for request_id in trainer.census()} == kept
        issue(trainer, 4, attempt=1)  # those of the census are known under a lower attempt, so all are issued
        assert len(producer.lease("p1", 0, 9, 0.0)) == 4

    def test_a_mangled_open_mark_is_forgotten(self, own_client: redis.Redis, fresh: Keys) -> None:
        trainer = queue_on(own_client, fresh)
        trainer.claim(0)
        issue(trainer, 2)
        own_client.hset(fresh.open, "0.0.0", b"\xff rubbish")
        own_client.hset(fresh.open, "not an id", b"1|0|q|-1|0|1-1|")
        assert [request_id.slot for request_id in trainer.census()] == [1]
        assert [lease.request.id.slot for lease in trainer.lease("p", 0, 9, 0.0)] == [1]
        issue(trainer, 1)
        assert len(trainer.lease("p", 0, 9, 0.0)) == 1


class TestServerDeath:
    def test_a_killed_server_comes_back_empty(self, own: EmbeddedRedis, own_client: redis.Redis, fresh: Keys) -> None:
        trainer, producer = queue_on(own_client, fresh), queue_on(own_client, fresh)
        trainer.claim(0)
        trainer.announce(3)
        issue(trainer, 1)
        (lease,) = producer.lease("p1", 3, 1, 0.0)
        own.kill()
        back = threading.Timer(0.5, own.restart)
        back.start()
        assert producer.renew([lease]) == [lease]  # waits for the server
        back.join()
        assert producer.commit(lease, group(lease)) is CommitResult.GONE
        trainer.heartbeat(60.0)
        assert (producer.state().incarnation, producer.state().published) == (1, 3)
        issue(trainer, 1, attempt=1)
        (lease,) = producer.lease("p1", 3, 1, 0.0)
        assert producer.commit(lease, group(lease)) is CommitResult.OK
        assert len(trainer.poll(5.0)) == 1

    def test_a_waiting_poll_survives_a_restart(self, own: EmbeddedRedis, own_client: redis.Redis, fresh: Keys) -> None:
        trainer = queue_on(own_client, fresh)
        trainer.claim(0)
        found: list[object] = []
        waiting = threading.Thread(target=lambda: found.extend(trainer.poll(30.0)))
        waiting.start()
        own.kill()
        own.restart()
        other = queue_on(own_client, fresh)
        deadline = time.monotonic() + 30.0
        while not other.state().incarnation:  # the poll restores it
            assert time.monotonic() < deadline
        issue_as(own_client, fresh, trainer)
        (lease,) = other.lease("p1", 0, 1, 5.0)
        other.commit(lease, group(lease))
        waiting.join(30.0)
        assert len(found) == 1

    def test_a_server_that_stays_away_ends_the_call(
        self, own: EmbeddedRedis, own_client: redis.Redis, fresh: Keys
    ) -> None:
        trainer = queue_on(own_client, fresh, retry_s=0.3)
        trainer.claim(0)
        own.kill()
        calls: list[Callable[[], object]] = [
            lambda: trainer.poll(1.0),
            lambda: trainer.heartbeat(1.0),
            trainer.state,
            trainer.census,
            lambda: trainer.lease("p1", 0, 1, 1.0),
        ]
        for call in calls:
            with pytest.raises(ConnectionRefused, match=r"redis\.sock"):
                call()

    def test_with_persistence_nothing_is_lost(self, tmp_path: Path, fresh: Keys) -> None:
        with EmbeddedRedis(tmp_path / "kept", max_mb=64, persistence=True) as server:
            client = connect(server.url)
            trainer, producer = queue_on(client, fresh), queue_on(client, fresh)
            trainer.claim(0)
            issue(trainer, 2)
            sent, leased = producer.lease("p1", 0, 2, 0.0)
            producer.commit(sent, group(sent))
            client.execute_command("CONFIG", "SET", "appendfsync", "always")
            producer.renew([leased])
            server.kill()
            server.restart()
            assert producer.renew([leased]) == []
            (header,) = trainer.poll(5.0)
            assert isinstance(header, GroupHeader)
            (got,) = trainer.fetch([header])
            assert got is not None and same_group(got, group(sent))
            client.close()

    def test_an_answer_that_comes_too_late_is_nobody_elses(self, own: EmbeddedRedis, own_client: redis.Redis) -> None:
        own_client.mset({"a": "of a", "b": "of b"})
        client = connect(own.url, socket_timeout_s=0.3)
        assert exchange(client, ("GET", "a")) == [b"of a"]
        for read in (lambda: exchange(client, ("GET", "a")), lambda: get_values(client, ["a"])):
            os.kill(own.pid, signal.SIGSTOP)
            with pytest.raises(redis.exceptions.TimeoutError):
                read()
            wake = threading.Timer(0.1, os.kill, (own.pid, signal.SIGCONT))
            wake.start()
            assert repeat(client, lambda: exchange(client, ("GET", "b")), 30.0) == [b"of b"]
            wake.join()
        client.close()


def issue_as(client: redis.Redis, keys: Keys, trainer: RedisQueue) -> None:
    """Issue from another thread than the one that polls."""
    trainer.issue([request(0, trainer.state().incarnation)])


class Proxy:
    """Forwards to a server; `cut` requests go through, but their answers are lost with the connection."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.cut = 0
        self.commands = 0
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [client, server]
            threading.Thread(target=self._requests, args=(client, server), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        """One request, one answer: enough for small commands."""
        try:
            while data := client.recv(2**20):
                self.commands += 1
                server.sendall(data)
                answer = server.recv(2**20)
                if self.cut and b"EVALSHA" in data:
                    self.cut -= 1
                    break
                client.sendall(answer)
        except OSError:
            pass
        client.close()
        server.close()

    def close(self) -> None:
        self._listener.close()
        for item in self._sockets:
            item.close()


class TestLostAnswers:
    """The command ran, its answer did not come: the repeat must not do it twice."""

    @pytest.fixture
    def proxy(self, own: EmbeddedRedis) -> Iterator[Proxy]:
        proxy = Proxy(own.port)
        yield proxy
        proxy.close()

    @pytest.fixture
    def shaky(self, proxy: Proxy, own_client: redis.Redis, fresh: Keys) -> Iterator[RedisQueue]:
        client = connect(f"redis://127.0.0.1:{proxy.port}")
        trainer = queue_on(client, fresh)
        trainer.claim(0)
        trainer.heartbeat(60.0)
        issue(trainer, 3)
        for lease in trainer.lease("warm", 0, 1, 0.0):
            trainer.commit(lease, group(lease))
        trainer.release(trainer.poll(0.0))
        trainer.give_back(trainer.lease("warm", 0, 1, 0.0)[0])  # every script is loaded now
        yield trainer
        client.close()

    def test_issue(self, shaky: RedisQueue, proxy: Proxy, own_client: redis.Redis, fresh: Keys) -> None:
        proxy.cut = 1
        shaky.issue([request(7, 1)])
        assert proxy.cut == 0
        assert own_client.xlen(fresh.requests) == 3

    def test_commit(self, shaky: RedisQueue, proxy: Proxy) -> None:
        (lease,) = shaky.lease("p1", 0, 1, 0.0)
        proxy.cut = 1
        assert shaky.commit(lease, group(lease)) is CommitResult.DUP
        assert proxy.cut == 0
        assert len(shaky.poll(0.0)) == 1

    def test_poll_skips_nothing(self, shaky: RedisQueue, proxy: Proxy) -> None:
        leases = shaky.lease("p1", 0, 2, 0.0)
        for lease in leases:
            shaky.commit(lease, group(lease))
        proxy.cut = 1
        assert [header.id for header in shaky.poll(0.0)] == [lease.request.id for lease in leases]
        assert proxy.cut == 0

    def test_give_back_counts_once(self, shaky: RedisQueue, proxy: Proxy) -> None:
        (lease,) = shaky.lease("p1", 0, 1, 0.0)
        proxy.cut = 1
        shaky.give_back(lease, "boom")
        assert proxy.cut == 0
        (again,) = shaky.lease("p2", 0, 1, 0.0)
        assert again.request.failures == 1

    def test_release(self, shaky: RedisQueue, proxy: Proxy, own_client: redis.Redis, fresh: Keys) -> None:
        (lease,) = shaky.lease("p1", 0, 1, 0.0)
        shaky.commit(lease, group(lease))
        arrived = shaky.poll(0.0)
        proxy.cut = 1
        shaky.release(arrived)
        assert proxy.cut == 0
        assert own_client.xlen(fresh.rollouts) == 0

    def test_the_client_itself_repeats_nothing(self, shaky: RedisQueue, proxy: Proxy, own_client: redis.Redis) -> None:
        client = connect(f"redis://127.0.0.1:{proxy.port}")
        proxy.cut = 1
        with pytest.raises(redis.exceptions.ConnectionError):
            client.xadd("once", {"note": "holds the word EVALSHA, so its answer is cut off"})
        assert own_client.xlen("once") == 1
        client.close()


class TestRubbish:
    def test_in_the_stream_of_rollouts(
        self, redis_client: redis.Redis, keys: Keys, caplog: pytest.LogCaptureFixture
    ) -> None:
        trainer, producer = queue_on(redis_client, keys), queue_on(redis_client, keys)
        trainer.claim(0)
        issue(trainer, 2)
        rubbish: list[dict[str | bytes, bytes | str | int]] = [
            {"x": "y"},
            {"group": "0.0.0|1|0"},
            {"group": "0.0.0|1|0", "header": b"\x80\xff"},
            {"group": "0.0.0|1|0", "header": b"x" * 100_000},
            {"dead": "what|1", "reason": "x"},
            {"dead": "0.0.0|one", "reason": "x"},
            {"dead": "0.0.0", "reason": "x"},
            {"dead": "0.0.0|1", "reason": "forged"},
            {b"\xff\xfe": b"\xff" * 1000, "group": b"\xff"},
            {"group": "0.0.0\nERROR a forged line|1|0", "header": "x"},
        ]
        for fields in rubbish:
            redis_client.xadd(keys.rollouts, fields)
        (lease,) = producer.lease("p1", 0, 1, 0.0)
        producer.commit(lease, group(lease))
        with caplog.at_level(logging.ERROR):
            (header,) = trainer.poll(0.0)
        assert header.id == lease.request.id
        assert len(trainer.census()) == 2  # rubbish that names an open request does not touch it
        letters = trainer.dead_letters()
        assert [letter.kind for letter in letters] == ["rollout"] * len(rubbish)
        assert all(letter.reason for letter in letters)
        assert len(caplog.records) == len(rubbish)
        assert not any("\n" in record.getMessage() for record in caplog.records)
        assert {letter.request_id for letter in letters} <= {"", "0.0.0"}
        assert redis_client.xlen(keys.rollouts) == 1

    def test_a_header_under_the_name_of_another_request(self, redis_client: redis.Redis, keys: Keys) -> None:
        trainer = queue_on(redis_client, keys)
        trainer.claim(0)
        issue(trainer, 1)
        (lease,) = trainer.lease("p1", 0, 1, 0.0)
        trainer.commit(lease, group(lease))
        ((_entry, fields),) = redis_client.xrange(keys.rollouts)
        redis_client.xadd(keys.rollouts, fields | {b"group": b"0.9.0|1|0"})
        assert len(trainer.poll(0.0)) == 1
        assert "not of the request" in trainer.dead_letters()[0].reason

    def test_in_the_stream_of_requests(self, redis_client: redis.Redis, keys: Keys) -> None:
        trainer, producer = queue_on(redis_client, keys), queue_on(redis_client, keys)
        trainer.claim(0)
        redis_client.xadd(keys.requests, {"x": "y"})
        redis_client.xadd(keys.requests, {"id": "0.0.0", "inc": "1", "min": "0", "data": "never issued"})
        issue(trainer, 1)
        assert len(producer.lease("p1", 0, 9, 0.0)) == 1
        assert [letter.kind for letter in trainer.dead_letters()] == ["request"]
        assert redis_client.xlen(keys.requests) == 1

    def test_a_request_that_cannot_be_decoded(self, redis_client: redis.Redis, keys: Keys) -> None:
        trainer, producer = queue_on(redis_client, keys), queue_on(redis_client, keys)
        trainer.claim(0)
        issue(trainer, 2)
        ((entry, fields), _second) = redis_client.xrange(keys.requests)
        redis_client.xtrim(keys.requests, maxlen=0)
        forged = redis_client.xadd(keys.requests, fields | {b"data": b"\xc1"})
        mark = redis_client.hget(keys.open, "0.0.0")
        assert mark is not None
        redis_client.hset(keys.open, "0.0.0", mark.replace(entry, forged))
        assert producer.lease("p1", 0, 9, 0.0) == []
        (letter,) = trainer.dead_letters()
        assert (letter.kind, letter.request_id) == ("request", "0.0.0")
        assert trainer.census() == {}
        issue(trainer, 2, attempt=1)
        assert len(producer.lease("p1", 0, 9, 0.0)) == 2

    def test_dead_letters_are_bounded(self, redis_client: redis.Redis, keys: Keys) -> None:
        trainer = queue_on(redis_client, keys)
        trainer.claim(0)
        pipe = redis_client.pipeline(transaction=False)
        for number in range(1100):
            pipe.xadd(keys.rollouts, {"x": str(number)})
        pipe.execute()
        assert trainer.poll(0.0, count=2000) == []
        assert redis_client.xlen(keys.dead) == 1000
        assert redis_client.xlen(keys.rollouts) == 0
        assert len(trainer.dead_letters(5)) == 5


class TestTwoRuns:
    def test_they_do_not_touch_each_other(self, redis_client: redis.Redis, keys: Keys) -> None:
        one, other = queue_on(redis_client, keys), queue_on(redis_client, Keys(f"{keys.run}.b"))
        one.claim(0)
        other.claim(5)
        issue(one, 2)
        other.finish("done")
        assert one.state().ended == ""
        assert len(one.lease("p1", 0, 9, 0.0)) == 2
        assert other.census() == {}
        other.claim(0)
        assert len(one.census()) == 2
        redis_client.delete(*redis_client.scan_iter(match=f"nbehind:{{{keys.run}.b}}:*"))


class TestConnecting:
    @pytest.fixture
    def secured(self, tmp_path: Path) -> Iterator[EmbeddedRedis]:
        with EmbeddedRedis(tmp_path / "secured", max_mb=16, password=PASSWORD) as server:
            yield server

    def test_any_character_in_a_password(self, secured: EmbeddedRedis) -> None:
        plain = f"redis://127.0.0.1:{secured.port}"
        for client in (connect(secured.url), connect(secured.tcp_url), connect(plain, password=PASSWORD)):
            check_server(client)
            client.close()

    @pytest.mark.parametrize("name", ["", "nobody"])
    def test_wrong_user_or_password(self, secured: EmbeddedRedis, name: str) -> None:
        wrong = "wr0ng-secret"
        urls = [f"redis://127.0.0.1:{secured.port}", f"redis://{name}:{quote(wrong)}@127.0.0.1:{secured.port}"]
        for url in urls:
            client = connect(url, username=name, password=wrong)
            for call in (lambda c=client: check_server(c), queue_on(client, Keys("x")).state):
                with pytest.raises(ConnectionRefused, match="refuses the user or password") as error:
                    call()
                assert f"127.0.0.1:{secured.port}" in str(error.value)
                assert wrong not in str(error.value)
            client.close()
        client = connect(urls[0])
        with pytest.raises(ConnectionRefused, match="refuses the user or password"):
            check_server(client)
        client.close()

    def test_a_user_with_just_the_rights_that_are_needed(self, secured: EmbeddedRedis, fresh: Keys) -> None:
        admin = connect(secured.url)
        admin.execute_command(
            "ACL", "SETUSER", "runner", "on", ">pw", "~nbehind:*", "+@all", "-@admin", "-@dangerous", "+info"
        )
        client = connect(f"redis://127.0.0.1:{secured.port}", username="runner", password="pw")
        check_server(client)
        queue = queue_on(client, fresh)
        queue.claim(0)
        issue(queue, 1)
        assert len(queue.lease("p1", 0, 1, 0.0)) == 1
        with pytest.raises(ConnectionRefused, match="forbids"):
            queue_on(client, fresh)._repeat(lambda: client.get("elsewhere"))
        admin.execute_command("ACL", "SETUSER", "runner", "-info")
        with pytest.raises(ConnectionRefused, match="forbids"):
            check_server(client)
        admin.close()
        client.close()

    def test_no_server(self, tmp_path: Path) -> None:
        for url, where in (("redis://127.0.0.1:1", "127.0.0.1:1"), (f"unix://{tmp_path}/none", f"{tmp_path}/none")):
            with pytest.raises(ConnectionRefused, match="is it running") as error:
                check_server(connect(url))
            assert where in str(error.value)

    @pytest.mark.parametrize(
        "url",
        ["", "localhost", "http://x", "redis://:s3cret#x@host", "redis://u:s3cret@host:port", "redis://h?foo=s3cret"],
    )
    def test_bad_urls_are_refused_without_the_secret(self, url: str) -> None:
        with pytest.raises(ConnectionRefused) as error:
            check_server(connect(url, connect_timeout_s=1.0))
        assert "s3cret" not in str(error.value)
        assert "\n" not in str(error.value)

    def test_a_missing_ca_file(self) -> None:
        with pytest.raises(ConnectionRefused, match=r"tls_ca .*nowhere"):
            connect("rediss://127.0.0.1:1", tls_ca="/nowhere.pem")

    @pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "allkeys-random"])
    def test_an_evicting_server_is_refused_with_the_remedy(
        self, own: EmbeddedRedis, own_client: redis.Redis, policy: str
    ) -> None:
        check_server(own_client)
        own_client.config_set("maxmemory-policy", policy)
        with pytest.raises(UnsuitableRedis, match="CONFIG SET maxmemory-policy noeviction"):
            check_server(own_client)

    def test_a_replica_is_refused(self, own: EmbeddedRedis, own_client: redis.Redis) -> None:
        own_client.execute_command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(UnsuitableRedis, match="replica"):
            check_server(own_client)

    def test_an_old_server_is_refused(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))

        def answer() -> None:
            peer, _ = listener.accept()
            info = b"redis_version:6.0.16\r\n"
            while data := peer.recv(65536):
                count = data.count(b"\r\n$") and data.count(b"*")
                reply = b"$%d\r\n%s\r\n" % (len(info), info) if b"INFO" in data else b"+PONG\r\n" * count
                peer.sendall(reply if b"INFO" in data or b"PING" in data else b"+OK\r\n" * count)
            peer.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        client = connect(f"redis://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(UnsuitableRedis, match=r"6\.0\.16; 6\.2 or newer"):
            check_server(client)
        client.close()
        thread.join(10.0)
        listener.close()

    def test_a_silent_peer_is_given_up(self) -> None:
        assert connection.SOCKET_TIMEOUT_S + 5.0 <= 30.0
        assert connection.MAX_BLOCK_S < connection.SOCKET_TIMEOUT_S
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = connect(f"redis://127.0.0.1:{listener.getsockname()[1]}", socket_timeout_s=0.2)
            with pytest.raises(ConnectionRefused, match="127"):
                check_server(client)
            client.close()


class TestPassword:
    def test_from_a_file_or_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NBEHIND_TEST_PW", "from env")
        file = tmp_path / "pw"
        file.write_text(PASSWORD + "\n", encoding="utf-8")
        assert resolve_password("NBEHIND_TEST_PW", str(file)) == PASSWORD
        assert resolve_password("NBEHIND_TEST_PW", "") == "from env"
        assert resolve_password("NBEHIND_NOT_SET", "") == ""
        assert resolve_password("", "") == ""

    def test_an_unreadable_file(self, tmp_path: Path) -> None:
        (tmp_path / "binary").write_bytes(b"\xff\xfe")
        for path in (tmp_path / "none", tmp_path, tmp_path / "binary"):
            with pytest.raises(ConnectionRefused, match="password_file"):
                resolve_password("", str(path))
