"""Several commands in one round trip, and large values without a copy, on redis-py's pooled connections.

redis-py's pipeline costs as much as the commands themselves, and its parser takes microseconds for every element and
copies a value three times. Connecting, credentials, TLS and the pool stay with redis-py.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import redis

Part = str | int | bytes
Command = tuple[Part | Sequence[memoryview], ...]  # several buffers are sent as one value

_JOIN_BYTES = 64 * 1024  # up to here copying the pieces costs less than sending them apart
_READ_BYTES = 64 * 1024
_LINE_BYTES = 64  # asked for at the start of an answer: its length, and a bit of the value
_CRLF = b"\r\n"
_ERRORS: dict[str, type[redis.exceptions.RedisError]] = {
    "NOSCRIPT": redis.exceptions.NoScriptError,
    "OOM": redis.exceptions.OutOfMemoryError,
    "NOPERM": redis.exceptions.NoPermissionError,
    "READONLY": redis.exceptions.ReadOnlyError,
    "NOAUTH": redis.exceptions.AuthenticationError,
    "LOADING": redis.exceptions.BusyLoadingError,
}


def exchange(client: redis.Redis, *commands: Command) -> list[Any]:
    """Send all commands, then read all answers. An error of the server is an answer; a lost connection raises."""
    pieces = _packed(commands)
    with _connection(client) as connection:
        _send(connection, pieces)
        reader = _Reader(_socket(connection), _READ_BYTES)
        return [reader.answer() for _ in commands]


def get_values(client: redis.Redis, keys: Sequence[str]) -> list[memoryview | None]:
    """The values of the keys, None for a missing one, each read straight into memory of its own."""
    if not keys:
        return []
    pieces = _packed([("GET", key) for key in keys])
    with _connection(client) as connection:
        _send(connection, pieces)
        reader = _Reader(_socket(connection), _LINE_BYTES)
        return [reader.value() for _ in keys]


@contextlib.contextmanager
def _connection(client: redis.Redis) -> Iterator[Any]:
    """A connection of the pool. Whatever goes wrong on it, the next user gets a fresh one."""
    pool = client.connection_pool
    connection: Any = pool.get_connection()
    try:
        yield connection
    except BaseException as error:
        connection.disconnect()
        if isinstance(error, TimeoutError):
            raise redis.exceptions.TimeoutError("Timeout on the connection to Redis") from error
        if isinstance(error, OSError | ValueError):  # ValueError: what came is not the protocol of Redis
            raise redis.exceptions.ConnectionError(f"Connection to Redis lost: {error}") from error
        raise
    finally:
        pool.release(connection)


def _socket(connection: Any) -> Any:
    sock = connection._get_socket()
    if sock is None:
        raise redis.exceptions.ConnectionError("Connection to Redis lost")
    return sock


def _send(connection: Any, pieces: Sequence[bytes | memoryview]) -> None:
    sock = _socket(connection)
    if isinstance(sock, ssl.SSLSocket) or sum(map(len, pieces)) <= _JOIN_BYTES:
        sock.sendall(b"".join(pieces))
        return
    left = [memoryview(piece) for piece in pieces if len(piece)]
    while left:
        sent = sock.sendmsg(left)
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = left[0][sent:]


def _packed(commands: Sequence[Command]) -> list[bytes | memoryview]:
    """The commands in the protocol of Redis: arrays of bulk strings."""
    pieces: list[bytes | memoryview] = []
    for command in commands:
        pieces.append(b"*%d\r\n" % len(command))
        for part in command:
            if isinstance(part, str):
                part = part.encode("utf-8", "replace")  # a lone surrogate in a reason must not stop the queue
            elif isinstance(part, int):
                part = b"%d" % part
            buffers = (part,) if isinstance(part, bytes) else part
            pieces += (b"$%d\r\n" % sum(map(len, buffers)), *buffers, _CRLF)
    return pieces


class _Reader:
    """Reads answers (RESP2) from a socket on which nothing is buffered. `ahead` is how much one read may take."""

    def __init__(self, sock: Any, ahead: int) -> None:
        self._sock = sock
        self._ahead = ahead
        self._data = b""  # read ...
        self._at = 0  # ... and used up to here

    def answer(self) -> Any:
        """bytes, int, None, a list of these, or an exception that the server sent."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return self._bytes(int(rest)) if rest != b"-1" else None
        if kind == b"*":
            return [self.answer() for _ in range(int(rest))] if rest != b"-1" else None
        if kind == b":":
            return int(rest)
        if kind == b"+":
            return rest
        return self._error(line)

    def value(self) -> memoryview | None:
        """A bulk string in memory of its own."""
        line = self._line()
        if line[:1] != b"$":
            raise self._error(line)
        length = int(line[1:])
        if length < 0:
            return None
        memory: Any = np.empty(length + len(_CRLF), np.uint8)  # not zeroed first, unlike bytearray
        whole = memoryview(memory)
        place = min(len(self._data) - self._at, len(whole))
        whole[:place] = self._data[self._at : self._at + place]
        self._at += place
        while place < len(whole):
            got = self._sock.recv_into(whole[place:])
            if not got:
                raise redis.exceptions.ConnectionError("Connection closed by Redis")
            place += got
        return whole[:length]

    def _error(self, line: bytes) -> redis.exceptions.RedisError:
        message = line[1:].decode("utf-8", "replace")
        if line[:1] != b"-":
            raise redis.exceptions.ConnectionError(f"not an answer of Redis: {message[:40]!r}")
        error = _ERRORS.get(message.partition(" ")[0], redis.exceptions.ResponseError)(message)
        if isinstance(error, redis.exceptions.ConnectionError):
            raise error
        return error

    def _line(self) -> bytes:
        while (end := self._data.find(_CRLF, self._at)) < 0:
            self._read()
        line = self._data[self._at : end]
        self._at = end + len(_CRLF)
        return line

    def _bytes(self, length: int) -> bytes:
        while len(self._data) < self._at + length + len(_CRLF):
            self._read(self._at + length + len(_CRLF) - len(self._data))
        found = self._data[self._at : self._at + length]
        self._at += length + len(_CRLF)
        return found

    def _read(self, wanted: int = 0) -> None:
        more = self._sock.recv(max(wanted, self._ahead))
        if not more:
            raise redis.exceptions.ConnectionError("Connection closed by Redis")
        self._data = self._data[self._at :] + more
        self._at = 0
