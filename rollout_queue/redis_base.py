"""What both sides of the queue on Redis share: the connection, its repeats, the state of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import redis
from redis.client import Pipeline

from rollout_queue.connection import MAX_BLOCK_S, Outage, repeat
from rollout_queue.exchange import Command, get_values
from rollout_queue.keys import Keys
from rollout_queue.messages import RunState
from rollout_queue.scripts import Script

T = TypeVar("T")


class RedisSide:
    """One service's connection to the keys of a run. Thread-safe."""

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        lease_s: float,
        max_attempts: int,
        max_body_bytes: int,
        body_ttl_s: int = 86_400,
        retry_s: float = 60.0,
    ) -> None:
        self._client = client
        self._keys = keys
        self._lease_ms = max(1, round(lease_s * 1000))
        self._max_attempts = max_attempts
        self._max_body_bytes = max_body_bytes
        self._body_ttl_s = body_ttl_s
        self._retry_s = retry_s
        self._outage = Outage()
        self._base_keys = [keys.run_state, keys.open, keys.requests, keys.rollouts, keys.dead]

    def state(self) -> RunState:
        def ask(pipe: Pipeline) -> None:
            pipe.hmget(self._keys.run_state, ["incarnation", "published", "floor", "ended"])
            pipe.exists(self._keys.trainer_alive)

        (inc, published, floor, ended), alive = self._read(ask)
        published = -1 if published is None else int(published)
        return RunState(int(inc or 0), published, int(floor or 0), text(ended or b""), bool(alive))

    def _repeat(self, call: Callable[[], T]) -> T:
        return repeat(self._client, call, self._retry_s, self._outage)

    def _run(
        self, script: Script, args: list[Any], extra_keys: Sequence[str] = (), first: Command | None = None
    ) -> Any:
        """Run the script, in one round trip with the command `first`."""
        keys = [*self._base_keys, *extra_keys]
        return self._repeat(lambda: script.run(self._client, keys, args, first))

    def _waiting(self, stream: str, after: str, seconds: float) -> Command:
        """A command that waits until the stream has an entry after `after`, at most `seconds`."""
        block_ms = max(1, round(min(seconds, MAX_BLOCK_S) * 1000))
        return ("XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", stream, after)

    def _read(self, ask: Callable[[Pipeline], None]) -> list[Any]:
        """The answers to what `ask` puts into one transaction."""

        def once() -> list[Any]:
            pipe = self._client.pipeline(transaction=True)  # a failed one is empty afterwards
            ask(pipe)
            return pipe.execute()

        return self._repeat(once)

    def _values(self, keys: Sequence[str]) -> list[memoryview | None]:
        return self._repeat(lambda: get_values(self._client, keys))

    def _delete(self, keys: Iterable[str]) -> None:
        names = list(keys)
        if names:
            self._repeat(lambda: self._client.unlink(*names))


def text(raw: bytes | str) -> str:
    return raw if isinstance(raw, str) else raw.decode("utf-8", "replace")


def milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
