"""Every kind of fault, as a generator: it does something, yields how many seconds to wait, and undoes it.

A fault is in effect from its first line to its end, but for the time between `site.calm()` and `site.disturb()`.
"""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import redis

from nbehind.chaos.actors import AOF, RESTART_S, Actors, send
from nbehind.process import Child

SUCCESSOR_S = 0.5  # from stopping a trainer to the start of the one that goes on
EXTRA = "producer-7"


class Skipped(Exception):
    """There was nothing that the fault could be done to."""


class Site(Protocol):
    """What a fault works on."""

    actors: Actors
    rng: random.Random

    def calm(self) -> None:
        """What was done so far is undone: the run should go on from here."""
        ...

    def disturb(self) -> None:
        """The fault goes on."""
        ...


Waits = Iterator[float]
Deed = Callable[[Site, float], Waits]


def kill_trainer(site: Site, seconds: float) -> Waits:
    """kill -9; another resumes its run."""
    if not site.actors.kill("trainer", seconds):
        raise Skipped
    yield seconds


def zombie_trainer(site: Site, seconds: float) -> Waits:
    """Stopped; another resumes its run; then it wakes up."""
    old = site.actors.bury_trainer()
    if old is None:
        raise Skipped
    yield SUCCESSOR_S
    site.actors.start("trainer")
    site.calm()
    yield seconds
    site.disturb()
    site.actors.wake(old)


def pause_trainer(site: Site, seconds: float) -> Waits:
    """Stopped for a while."""
    yield from _pause(site.actors.alive("trainer"), seconds)


def kill_producer(site: Site, seconds: float) -> Waits:
    """kill -9; another starts in its place."""
    if not site.actors.kill(_some_producer(site), seconds):
        raise Skipped
    yield seconds


def pause_producer(site: Site, seconds: float) -> Waits:
    """Stopped for less than its lease."""
    yield from _pause(site.actors.alive(_some_producer(site)), seconds)


def hang_producer(site: Site, seconds: float) -> Waits:
    """Stopped for longer than its lease: its requests are taken over, then it wakes up."""
    yield from _pause(site.actors.alive(_some_producer(site)), seconds)


def replace_producer(site: Site, seconds: float) -> Waits:
    """SIGTERM; when it has left, another starts."""
    name = _some_producer(site)
    if not site.actors.ask_to_leave(name):
        raise Skipped
    for _ in range(60):
        yield 0.5
        if site.actors.alive(name) is None:
            break
    yield seconds
    if site.actors.alive(name) is None:
        site.actors.start(name)


def extra_producer(site: Site, seconds: float) -> Waits:
    """One more joins, and leaves again."""
    if EXTRA in site.actors.places:
        raise Skipped
    site.actors.start(EXTRA)
    site.calm()
    yield seconds
    site.disturb()
    site.actors.remove(EXTRA)


def empty_redis(site: Site, seconds: float) -> Waits:
    """kill -9; starts again with nothing."""
    _kill_redis(site)
    yield seconds
    site.actors.restart_redis(None)


def crash_redis(site: Site, seconds: float) -> Waits:
    """kill -9; starts again with its append-only file."""
    _kill_redis(site)
    yield seconds
    site.actors.restart_redis(site.actors.redis.folder / AOF)


def rewind_redis(site: Site, seconds: float) -> Waits:
    """kill -9; starts again with what it held some seconds before, like a replica that lagged."""
    own, copy = site.actors.redis.folder / AOF, site.actors.folder / "aof-copy"
    shutil.rmtree(copy, ignore_errors=True)
    if not site.actors.redis.pid or not own.is_dir():
        raise Skipped
    shutil.copytree(own, copy)
    site.calm()
    yield seconds
    site.disturb()
    _kill_redis(site)
    yield 0.5
    site.actors.restart_redis(copy)


def flush_redis(site: Site, seconds: float) -> Waits:
    """FLUSHALL, scripts included."""
    with _talking(site) as client:
        client.flushall()
        client.script_flush()
    yield 0.0


def drop_clients(site: Site, seconds: float) -> Waits:
    """CLIENT KILL of every connection."""
    with _talking(site) as client:
        client.client_kill_filter(_type="normal", skipme=True)
    yield 0.0


def fill_redis(site: Site, seconds: float) -> Waits:
    """maxmemory below what is used: every write that needs memory is refused."""
    limit = str(int(site.actors.config.redis.embedded_max_mb * 2**20))
    with _talking(site) as client:
        client.config_set("maxmemory", "1")
    yield seconds
    with _talking(site) as client:
        client.config_set("maxmemory", limit)


def silence(site: Site, seconds: float) -> Waits:
    """The network between one service and Redis swallows everything; connections stay open."""
    yield from _proxy(site, seconds, "silent")


def cut_off(site: Site, seconds: float) -> Waits:
    """One service loses its connections to Redis, and gets no new ones."""
    yield from _proxy(site, seconds, "cut")


def garbage(site: Site, seconds: float) -> Waits:
    """Entries that are no messages, in the streams of rollouts and requests."""
    rng, keys = site.rng, site.actors.keys
    junk = rng.randbytes(rng.randrange(200))
    id_ = f"{rng.randrange(50)}.{rng.randrange(4)}.0"
    rollouts: list[dict[str, bytes | str]] = [
        {"junk": junk},
        {"group": f"{id_}|1|0", "header": junk},
        {"group": junk, "header": junk},
        {"dead": junk, "reason": "none"},
        {"dead": f"{id_}|0", "reason": "forged"},
    ]
    with _talking(site) as client:
        for fields in rollouts:
            client.xadd(keys.rollouts, fields)  # type: ignore[arg-type]
        client.xadd(keys.requests, {"junk": junk})
        client.xadd(keys.sync_acks, {"a": junk})
        client.xadd(keys.sync_calls, {"c": junk})
    yield 0.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A deed, and how long it lasts: seconds, or shares of the lease."""

    deed: Deed
    shortest: float
    longest: float
    of_lease: bool = False


KINDS: Mapping[str, Kind] = {
    "kill_trainer": Kind(kill_trainer, RESTART_S, 2.0),
    "zombie_trainer": Kind(zombie_trainer, 3.0, 15.0),
    "pause_trainer": Kind(pause_trainer, 0.5, 12.0),
    "kill_producer": Kind(kill_producer, RESTART_S, 3.0),
    "pause_producer": Kind(pause_producer, 0.1, 0.8, of_lease=True),
    "hang_producer": Kind(hang_producer, 1.5, 3.0, of_lease=True),
    "replace_producer": Kind(replace_producer, 0.1, 1.0),
    "extra_producer": Kind(extra_producer, 5.0, 20.0),
    "empty_redis": Kind(empty_redis, 0.0, 3.0),
    "crash_redis": Kind(crash_redis, 0.0, 3.0),
    "rewind_redis": Kind(rewind_redis, 0.5, 5.0),
    "flush_redis": Kind(flush_redis, 0.0, 0.0),
    "drop_clients": Kind(drop_clients, 0.0, 0.0),
    "fill_redis": Kind(fill_redis, 1.0, 6.0),
    "silence": Kind(silence, 1.0, 8.0),
    "cut_off": Kind(cut_off, 0.5, 6.0),
    "garbage": Kind(garbage, 0.0, 0.0),
}


def durations(lease_s: float) -> dict[str, tuple[float, float]]:
    """Kind -> shortest and longest, in seconds."""
    scale = {True: lease_s, False: 1.0}
    return {n: (k.shortest * scale[k.of_lease], k.longest * scale[k.of_lease]) for n, k in KINDS.items()}


# --- parts of deeds
def _some_producer(site: Site) -> str:
    names = site.actors.producers()
    if not names:
        raise Skipped
    return site.rng.choice(names)


def _pause(child: Child | None, seconds: float) -> Waits:
    if child is None:
        raise Skipped
    send(child, signal.SIGSTOP)
    yield seconds
    send(child, signal.SIGCONT)


def _kill_redis(site: Site) -> None:
    if not site.actors.redis.pid:
        raise Skipped
    site.actors.redis.kill()


def _proxy(site: Site, seconds: float, mode: Literal["silent", "cut"]) -> Waits:
    proxy = site.actors.proxies[site.rng.choice(sorted(site.actors.proxies))]
    proxy.set(mode)
    yield seconds
    proxy.set("open")


class _talking:
    """A client of the server; a server that is down skips the fault."""

    def __init__(self, site: Site) -> None:
        self._open = site.actors.client()

    def __enter__(self) -> redis.Redis:
        return self._open.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._open.__exit__(None, None, None)
        if isinstance(error, redis.RedisError):
            raise Skipped from error
