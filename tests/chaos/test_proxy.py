"""The proxy that faults of the network happen in, in front of a real server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import redis

from nbehind.chaos.proxy import Proxy, ProxyLoop
from nbehind.embedded import EmbeddedRedis, free_port
from rollout_queue.connection import connect
from tests import runs

BIG = b"x" * 3_000_000
SHORT_S = 0.5


@pytest.fixture
def loop() -> Iterator[ProxyLoop]:
    made = ProxyLoop()
    yield made
    made.close()


@pytest.fixture
def proxy(loop: ProxyLoop, valkey: EmbeddedRedis) -> Iterator[Proxy]:
    made = Proxy(loop, valkey.port)
    yield made
    made.close()


@pytest.fixture
def client(proxy: Proxy) -> Iterator[redis.Redis]:
    made = connect(f"redis://127.0.0.1:{proxy.port}/0", socket_timeout_s=SHORT_S)
    yield made
    made.close()


def test_bytes_pass(client: redis.Redis) -> None:
    client.set("chaos-proxy", BIG, ex=60)
    assert client.get("chaos-proxy") == BIG


def test_silence_keeps_the_connection_and_loses_nothing(proxy: Proxy, client: redis.Redis) -> None:
    client.set("chaos-proxy", "1", ex=60)
    patient = connect(f"redis://127.0.0.1:{proxy.port}/0")
    patient.ping()
    proxy.set("silent")
    with pytest.raises(redis.exceptions.TimeoutError):
        client.get("chaos-proxy")
    pipe = patient.connection_pool.get_connection()
    pipe.send_command("INCR", "chaos-proxy")
    proxy.set("open")
    assert pipe.read_response() == 2
    patient.connection_pool.release(pipe)
    patient.close()


def test_a_cut_ends_connections_and_lets_none_in(proxy: Proxy, client: redis.Redis) -> None:
    client.ping()
    proxy.set("cut")
    for _ in range(2):
        with pytest.raises(redis.exceptions.ConnectionError):
            client.ping()
    proxy.set("open")
    assert client.ping()


def test_a_server_that_is_away_looks_like_one(loop: ProxyLoop) -> None:
    proxy = Proxy(loop, free_port())
    client = connect(f"redis://127.0.0.1:{proxy.port}/0")
    with pytest.raises(redis.exceptions.ConnectionError):
        client.ping()
    client.close()
    proxy.close()


TICKING = """
import sys, time
from nbehind.chaos.proxy import ProxyLoop
loop = ProxyLoop()
print("ready", flush=True)
sys.stdin.readline()
deadline = time.time() + 20
while not loop.pauses and time.time() < deadline:
    time.sleep(0.05)
print([round(end - begin) for begin, end in loop.pauses], flush=True)
loop.close()
"""


def test_a_process_that_did_not_run_notes_it() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", TICKING],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=runs.environment(), start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(child.pid, signal.SIGCONT)
        out, _ = child.communicate("\n", timeout=60)
        pauses = json.loads(out)
        assert max(pauses) >= 3
    finally:
        child.kill()
        child.wait()
