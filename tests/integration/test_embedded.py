"""The embedded server: how it starts, how it ends, and what it says when it cannot."""

from __future__ import annotations

import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import redis

from nbehind.embedded import EmbeddedRedis, EmbeddedRedisError, find_binary
from rollout_queue.connection import check_server, connect

ROOT = Path(__file__).resolve().parents[2]
LONG_S = 30.0


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + LONG_S
    while not gone(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def test_serves_by_socket_and_by_port_and_is_suitable(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path, max_mb=8) as server:
        for url in (server.url, server.tcp_url):
            client = connect(url)
            check_server(client)
            assert client.config_get("maxmemory") == {"maxmemory": "8388608"}
            client.close()
        assert server.url.startswith("unix://")
        pid = server.pid
        assert pid > 0
    assert gone(pid)
    assert server.pid == 0
    server.close()


def test_several_at_a_time(tmp_path: Path) -> None:
    servers: list[EmbeddedRedis] = []

    def start(number: int) -> None:
        servers.append(EmbeddedRedis(tmp_path / str(number), max_mb=8))

    threads = [threading.Thread(target=start, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert len({server.port for server in servers}) == 4
    for server in servers:  # the threads that started them have ended
        assert server.pid
        server.close()


def test_a_long_folder_with_odd_characters(tmp_path: Path) -> None:
    folder = tmp_path / 'a "quoted" \\ folder # with ünïcode' / ("deep" * 40)
    with EmbeddedRedis(folder, max_mb=8, persistence=True) as server:
        client = connect(server.url)
        client.set("x", "y")
        client.close()
    assert list(folder.glob("appendonlydir/*"))


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EmbeddedRedisError, match=f"port {port} .*in use: choose another"):
            EmbeddedRedis(tmp_path, max_mb=8, port=port)


def test_a_machine_without_a_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "sparc")
    with pytest.raises(EmbeddedRedisError, match=r"sparc.*redis\.url"):
        find_binary()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_text("a file where a folder should be")
    with pytest.raises(EmbeddedRedisError, match=r"did not start: .*append"):
        EmbeddedRedis(tmp_path, max_mb=8, persistence=True)


def test_kill_and_restart(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path, max_mb=8) as server:
        first, port = server.pid, server.port
        server.kill()
        assert server.pid == 0
        server.restart()
        assert server.pid not in (0, first)
        assert server.port == port
        client = connect(server.tcp_url)
        assert client.ping()
        client.close()
        with pytest.raises(EmbeddedRedisError, match="still runs"):
            server.restart()


def test_a_second_one_in_the_same_folder_does_not_harm_the_first(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path, max_mb=8) as server:
        with pytest.raises(EmbeddedRedisError, match="in use by another"):
            EmbeddedRedis(tmp_path, max_mb=8)
        client = connect(server.url)
        assert client.ping()
        client.close()


PARENT = """
import sys, time
from nbehind.embedded import EmbeddedRedis
server = EmbeddedRedis(sys.argv[1], max_mb=8)
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_dies_with_its_parent(tmp_path: Path, how: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert os.getsid(pid) != os.getsid(0)  # Ctrl-C in the terminal does not reach it
    parent.send_signal(how)
    parent.wait(LONG_S)
    parent.stdout.close()
    wait_until_gone(pid)


def test_a_hung_server_is_killed(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path, max_mb=8)
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    server.close(timeout_s=0.2)
    assert gone(pid)


def test_a_password_is_needed_when_given(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path, max_mb=8, password='x" y\\n#') as server:
        client = redis.Redis(port=server.port, protocol=2)
        with pytest.raises(redis.exceptions.AuthenticationError):
            client.ping()
        client.close()
        assert (tmp_path / "redis.conf").stat().st_mode & 0o077 == 0
