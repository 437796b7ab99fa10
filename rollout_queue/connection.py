"""Connecting to Redis: one place for URLs, credentials, time limits, repeats, and what a server must offer."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry

from rollout_queue.errors import ConnectionRefused, OutOfMemory, UnsuitableRedis

log = logging.getLogger(__name__)
T = TypeVar("T")

SOCKET_TIMEOUT_S = 20.0  # a peer that answers nothing is given up after this
MAX_BLOCK_S = 10.0  # longest single blocking read, well below the socket timeout
_TELL_S = 10.0  # between two log lines about a lost connection
_OLDEST_SERVER = (6, 2)
_URL_OPTIONS = frozenset({"db", "ssl_cert_reqs", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"})
_URL_PARTS = frozenset({"host", "port", "path", "username", "password", "connection_class"})
_TRANSIENT = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    ReadOnlyError,
    ClusterDownError,
    TryAgainError,
)
# What a server says while it is loading, failing over, saving with trouble or running somebody's long script.
_PASSING = (
    "LOADING",
    "READONLY",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "BUSY",
    "MISCONF",
    "NOREPLICAS",
    "UNBLOCKED",
)
_PERMANENT = (AuthenticationError, AuthorizationError)  # redis-py counts them as connection errors


def resolve_password(env_name: str, file: str) -> str:
    """The password: the content of `file` (without its line end) when given, else the variable `env_name`, else ''.

    Raises ConnectionRefused when the file cannot be read.
    """
    if not file:
        return os.environ.get(env_name, "") if env_name else ""
    try:
        return Path(file).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConnectionRefused(f"redis.password_file {file} cannot be read: {cause}") from None


def masked_url(url: str) -> str:
    """The URL without its credentials and options, for messages."""
    return re.sub(r"//.*@", "//***@", url, flags=re.DOTALL).partition("?")[0]


def connect(
    url: str,
    *,
    username: str = "",
    password: str = "",
    tls_ca: str = "",
    socket_timeout_s: float = SOCKET_TIMEOUT_S,
    connect_timeout_s: float = 5.0,
    name: str = "",
) -> redis.Redis:
    """A client for `url` (redis://, rediss:// or unix://). Opens no connection yet; see `check_server`.

    The client speaks RESP2, returns bytes and never repeats a command by itself: a repeated XADD adds twice and
    a repeated XREADGROUP skips. Wrap what is safe to repeat in `repeat`. `username` and `password` win over the URL's.
    """
    options = _url_options(url)
    if username:
        options["username"] = username
    if password:
        options["password"] = password
    if tls_ca:
        if not Path(tls_ca).is_file():
            raise ConnectionRefused(f"redis.tls_ca {tls_ca} is not a file")
        options["ssl_ca_certs"] = tls_ca
    if "path" not in options:
        options["socket_keepalive"] = True
        options["socket_connect_timeout"] = connect_timeout_s
    pool = redis.ConnectionPool(
        **options,
        protocol=2,
        decode_responses=False,
        socket_timeout=socket_timeout_s,
        health_check_interval=15,
        retry=Retry(NoBackoff(), 0),
        client_name=re.sub(r"[^!-~]", "_", name) or None,
    )
    return redis.Redis.from_pool(pool)  # close() closes the pool too


def _url_options(url: str) -> dict[str, Any]:
    shown = masked_url(url)
    try:
        options: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]
    except ValueError:  # its text may quote a part of the password
        raise ConnectionRefused(
            f"redis.url {shown} is not a redis://, rediss:// or unix:// URL; percent-encode special characters of a "
            "password in it, or give the password by redis.password_env or redis.password_file"
        ) from None
    unknown = set(options) - _URL_OPTIONS - _URL_PARTS
    if unknown:
        raise ConnectionRefused(f"redis.url {shown}: unknown option {', '.join(sorted(unknown))}")
    return options


def server_name(client: redis.Redis) -> str:
    """host:port or the socket's path, for messages."""
    options: Mapping[str, Any] = client.connection_pool.connection_kwargs
    if "path" in options:
        return str(options["path"])
    return f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"


class _Replica(ReadOnlyError):
    """The server does not take writes, which may pass when another one is promoted."""


def check_server(client: redis.Redis, retry_s: float = 0.0) -> None:
    """Raise ConnectionRefused or UnsuitableRedis unless the server answers and keeps what it is given.

    A server that is away, loading or a replica is waited for `retry_s` seconds.
    """
    try:
        repeat(client, lambda: _check_once(client), retry_s)
    except ConnectionRefused as error:
        if isinstance(error.__cause__, _Replica):
            raise UnsuitableRedis(str(error.__cause__)) from None
        raise
    except RedisError as error:
        raise refused(client, error) from error


def _check_once(client: redis.Redis) -> None:
    client.ping()
    server, memory, role = client.info("server"), client.info("memory"), client.info("replication")
    where = server_name(client)
    version = str(server.get("redis_version", "0"))  # Valkey reports the Redis version that it is compatible with
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < _OLDEST_SERVER:
        raise UnsuitableRedis(f"Redis at {where} is version {version}; 6.2 or newer is needed")
    policy = str(memory.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        raise UnsuitableRedis(
            f"Redis at {where} evicts keys when it is full (maxmemory-policy {policy}), which loses groups: "
            "run `CONFIG SET maxmemory-policy noeviction`"
        )
    if role.get("role", "master") != "master":
        raise _Replica(f"Redis at {where} is a replica, which refuses writes: give the address of its primary")


def refused(client: redis.Redis, error: Exception) -> ConnectionRefused:
    """`error` as one line that names the server, never the secret."""
    where = server_name(client)
    if isinstance(error, NoPermissionError):
        return ConnectionRefused(f"Redis at {where} forbids this user what the queue needs: {_line(error)}")
    if isinstance(error, _PERMANENT) or "NOAUTH" in str(error) or "WRONGPASS" in str(error):
        return ConnectionRefused(
            f"Redis at {where} refuses the user or password: set redis.username and the variable named by "
            "redis.password_env, or redis.password_file"
        )
    return ConnectionRefused(f"Redis at {where} cannot be used: {_line(error)}; is it running, is redis.url right?")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def out_of_memory(error: Exception) -> bool:
    """Did the server refuse a write because its memory is full?"""
    text = str(error)  # redis-py strips the code from plain errors, old servers wrap those of scripts
    return isinstance(error, ResponseError) and ("OOM command" in text or "used memory > 'maxmemory'" in text)


def passing(error: Exception) -> bool:
    """Is it worth trying again: a lost connection, or a server that cannot answer just now?"""
    if isinstance(error, _PERMANENT):
        return False
    return isinstance(error, _TRANSIENT) or (
        isinstance(error, ResponseError) and str(error).partition(" ")[0].rstrip(":") in _PASSING
    )


class Outage:
    """Since when (monotonic seconds) no call of a service has been answered; None while they are. Shared by its threads,
    so that all give up together and none begins to wait anew."""

    since: float | None = None


def repeat(client: redis.Redis, call: Callable[[], T], retry_s: float, outage: Outage | None = None) -> T:
    """Run `call`, which must be safe to repeat, until it gets an answer.

    A lost connection is retried with backoff for `retry_s` seconds, then ConnectionRefused. A full server raises
    OutOfMemory, refused credentials raise ConnectionRefused at once.
    """
    outage = outage or Outage()
    deadline = time.monotonic() + retry_s
    delay, told = 0.05, float("-inf")
    while True:
        try:
            answer = call()
            outage.since = None
            return answer
        except RedisError as error:
            if not passing(error):
                _give_up(client, error)
            now = time.monotonic()
            since = outage.since = outage.since or now
            left = min(deadline, since + retry_s) - now
            if left <= 0:
                raise refused(client, error) from error
            if now - told > _TELL_S:
                told = now
                log.warning("Redis at %s: %s; trying again for %.0f s", server_name(client), _line(error), left)
            if isinstance(error, ReadOnlyError):
                client.connection_pool.disconnect(inuse_connections=False)  # the others are read by other threads
            time.sleep(min(delay, left))
            delay = min(delay * 2, 2.0)


def _give_up(client: redis.Redis, error: RedisError) -> NoReturn:
    """Raise what an error that will not pass is to the caller."""
    if out_of_memory(error):
        raise OutOfMemory(f"Redis at {server_name(client)} is full (maxmemory): {_line(error)}") from error
    if isinstance(error, (*_PERMANENT, NoPermissionError)) or "NOAUTH" in str(error):
        raise refused(client, error) from error
    raise error
