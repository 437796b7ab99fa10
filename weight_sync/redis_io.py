"""What every part of the weight channel needs of Redis: scripts that work on a full server, stream replies, outages.

A script whose first command frees memory (XTRIM, HDEL) may write on a full server; a plain XADD or HSET is refused
there, and the channel would stop exactly when training on is what would free memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from typing import Any

import msgpack
import redis

from rollout_queue.connection import passing
from weight_sync.errors import SyncError

log = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 2.0


def evaluate(client: redis.Redis, script: str, keys: Iterable[str], *args: Any) -> Any:
    """EVAL: the scripts are a few lines, and it needs no reload after a failover."""
    names = list(keys)
    return client.eval(script, len(names), *names, *args)


def read_stream(
    client: redis.Redis, key: str, after: str, block_s: float, count: int = 64
) -> list[tuple[str, dict[bytes, bytes]]]:
    """Entries of a stream after the id `after`, waiting at most `block_s` for the first (0 = not at all)."""
    block_ms = max(1, round(block_s * 1000)) if block_s > 0 else None
    reply: Any = client.xread({key: after}, count=count, block=block_ms)
    streams = reply.items() if isinstance(reply, dict) else reply or ()
    found: list[tuple[str, dict[bytes, bytes]]] = []
    for _, entries in streams:
        batch = entries[0] if entries and isinstance(entries[0], list) else entries  # RESP3 nests once more
        found.extend((_text(entry_id), fields) for entry_id, fields in batch)
    return found


def last_id(client: redis.Redis, key: str) -> str:
    """Id of the newest entry of a stream, "0" when it has none."""
    newest: Any = client.xrevrange(key, count=1)
    return _text(newest[0][0]) if newest else "0"


def _text(raw: bytes | str) -> str:
    return raw if isinstance(raw, str) else raw.decode()


def unpack_map(raw: bytes, what: str) -> dict[str, Any]:
    """A msgpack map with text keys, or SyncError."""
    try:
        value = msgpack.unpackb(raw)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise SyncError(f"{what}: not msgpack ({error})") from error
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise SyncError(f"{what}: not a map")
    return value


class Outage:
    """How long Redis has been away. Waits with backoff, and raises SyncError after `retry_s`."""

    def __init__(self, retry_s: float, who: str) -> None:
        self._retry_s, self._who = retry_s, who
        self._since: float | None = None
        self._wait_s = FIRST_WAIT_S

    def over(self) -> None:
        if self._since is not None:
            log.info("%s: Redis answers again after %.1f s", self._who, time.monotonic() - self._since)
        self._since, self._wait_s = None, FIRST_WAIT_S

    def wait(self, error: redis.RedisError, stop: threading.Event) -> None:
        """Wait a little; raises at once what will not pass."""
        if not passing(error):
            raise SyncError(f"{self._who}: Redis refuses: {error}") from error
        now = time.monotonic()
        if self._since is None:
            self._since = now
            log.warning("%s: Redis does not answer (%s); trying again for %g s", self._who, error, self._retry_s)
        if now - self._since > self._retry_s:
            raise SyncError(
                f"{self._who}: Redis did not answer for {self._retry_s:g} s ({error}); is it still running?"
            ) from error
        stop.wait(self._wait_s)
        self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
