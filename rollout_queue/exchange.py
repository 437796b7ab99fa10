"""Several commands in one round trip, and large values without a copy, on redis-py's pooled connections.

redis-py's pipeline costs as much as the commands themselves, sends a large value in three pieces, and copies an answer
three times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import redis

Part = str | int | bytes
Command = tuple[Part | Sequence[memoryview], ...]  # several buffers are sent as one value

_LINE = 64  # bytes asked for at the start of a reply: its length, and a bit of the value
_CRLF = 2


def exchange(client: redis.Redis, *commands: Command) -> list[Any]:
    """Send all commands, then read all answers. An error of the server is an answer; a lost connection raises."""
    with _connection(client) as connection:
        connection.send_packed_command([_packed(commands)])
        answers: list[Any] = []
        for _ in commands:
            try:
                answers.append(connection.read_response())
            except redis.exceptions.ResponseError as error:
                answers.append(error)
        return answers


def get_values(client: redis.Redis, keys: Sequence[str]) -> list[memoryview | None]:
    """The values of the keys, None for a missing one, each read straight into memory of its own."""
    if not keys:
        return []
    with _connection(client) as connection:
        connection.send_packed_command([_packed([("GET", key) for key in keys])])
        sock = connection._get_socket()
        if sock is None:
            raise redis.exceptions.ConnectionError("the connection was closed")
        try:
            reader = _Reader(sock)
            return [reader.value() for _ in keys]
        except TimeoutError as error:
            raise redis.exceptions.TimeoutError("Timeout reading a value") from error
        except OSError as error:
            raise redis.exceptions.ConnectionError(f"Error while reading a value: {error}") from error


def _packed(commands: Sequence[Command]) -> bytes:
    """The commands in the protocol of Redis (arrays of bulk strings), copied once."""
    pieces: list[bytes | memoryview] = []
    for command in commands:
        pieces.append(b"*%d\r\n" % len(command))
        for part in command:
            if isinstance(part, str):
                part = part.encode()
            elif isinstance(part, int):
                part = b"%d" % part
            buffers = (part,) if isinstance(part, bytes) else part
            pieces += (b"$%d\r\n" % sum(map(len, buffers)), *buffers, b"\r\n")
    return b"".join(pieces)


@contextlib.contextmanager
def _connection(client: redis.Redis) -> Iterator[Any]:
    """A connection of the pool. Whatever goes wrong on it, the next user gets a fresh one."""
    pool = client.connection_pool
    connection: Any = pool.get_connection()
    try:
        yield connection
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)


class _Reader:
    """Reads bulk replies ("$length, value") from a socket on which nothing is buffered."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._ahead = b""  # read, but not used yet

    def value(self) -> memoryview | None:
        line = self._line()
        if line[:1] != b"$":
            raise redis.exceptions.ResponseError(line[1:].decode("utf-8", "replace"))
        length = int(line[1:])
        if length < 0:
            return None
        memory: Any = np.empty(length + _CRLF, np.uint8)  # not zeroed first, unlike bytearray
        whole = memoryview(memory)
        place = min(len(self._ahead), len(whole))
        whole[:place] = self._ahead[:place]
        self._ahead = self._ahead[place:]
        while place < len(whole):
            got = self._sock.recv_into(whole[place:])
            if not got:
                raise redis.exceptions.ConnectionError("Connection closed by server.")
            place += got
        return whole[:length]

    def _line(self) -> bytes:
        while b"\r\n" not in self._ahead:
            more = self._sock.recv(_LINE)
            if not more:
                raise redis.exceptions.ConnectionError("Connection closed by server.")
            self._ahead += more
        line, _, self._ahead = self._ahead.partition(b"\r\n")
        return line
