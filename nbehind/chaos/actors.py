"""The run's processes as the injector's victims: Redis, a trainer, producers, each behind a proxy of its own.

tend(): whoever died gets a successor (the trainer with --resume); whoever left on its own although nobody asked is noted
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import redis

from nbehind.chaos.leftovers import MARK
from nbehind.chaos.proxy import Proxy, ProxyLoop
from nbehind.config import Config
from nbehind.config_load import dump_config
from nbehind.embedded import EmbeddedRedis
from nbehind.environment import environment_of
from nbehind.errors import EXIT_INTERRUPTED
from nbehind.guardian import Guardian
from nbehind.process import Child, describe_exit
from rollout_queue.connection import connect
from rollout_queue.keys import Keys
from trainer_svc.step_ledger import LEDGER

AOF = "appendonlydir"
RESTART_S = 0.5  # from a death to its successor
ZOMBIE_LEAVES_S = 30.0  # a trainer that wakes up beside its successor must be gone by then
ABORT_S = 0.5
REDIS_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Zombie:
    """A trainer that was stopped while a successor began. `since`: it is awake and the successor has claimed the run (monotonic seconds)."""

    child: Child
    awake: bool = False
    since: float | None = None


@dataclass(slots=True)
class Place:
    """Where one service lives: its process, or when the next one starts (monotonic seconds)."""

    name: str
    child: Child | None = None
    start_at: float | None = None
    leaving: bool = False  # it was asked to


@dataclass(slots=True)
class Notes:
    """What happened on its own; `unexpected` and `stayed` must be empty in the end."""

    unexpected: list[str] = field(default_factory=list)  # services that ended although nobody asked
    stayed: list[str] = field(default_factory=list)  # zombies that did not leave
    zombies: int = 0


class Actors:
    """Starts, kills, stops and restarts. As a context manager: nothing of it is left in the end."""

    def __init__(
        self, folder: Path, config: Config, guardian: Guardian, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.folder = folder
        self._say = say
        self.config = config
        self.notes = Notes()
        self.zombies: list[Zombie] = []
        self._guardian = guardian
        self._lives = 0
        self._config_file = folder / f"{config.run.name}.toml"
        self._config_file.write_text(dump_config(config))
        self.redis = EmbeddedRedis(folder / f"redis-{config.run.name}", config.redis.embedded_max_mb, persistence=True)
        self._loop = ProxyLoop()
        self.proxies: dict[str, Proxy] = {}
        self.places: dict[str, Place] = {}
        self._overrides: list[str] = []
        self.owner = 0  # pid of the trainer that claimed the run last
        self.settled = False  # nobody gets a successor any more

    @property
    def ledger(self) -> Path:
        return self.config.run_dir / LEDGER

    @property
    def pauses(self) -> list[tuple[float, float]]:
        """When not even this process could run (seconds since the epoch)."""
        return list(self._loop.pauses)

    @property
    def keys(self) -> Keys:
        return Keys(self.config.run.name)

    # --- services
    def start_all(self) -> None:
        self.start("trainer")
        for index in range(self.config.producer.count):
            self.start(f"producer-{index}")

    def start(self, name: str) -> Child:
        """Start the service `trainer` or `producer-N` in its place."""
        place = self.places.setdefault(name, Place(name))
        if name not in self.proxies:
            self.proxies[name] = Proxy(self._loop, self.redis.port)
        self._lives += 1
        log = self.folder / "logs" / f"{self.config.run.name}-{name}.{self._lives}.log"
        child = Child(f"{name}.{self._lives}", self._command(name), log, self._environment(name))
        self._guardian.add(child.pid)
        self._say(f"{child.name} starts (pid {child.pid})")
        place.child, place.start_at, place.leaving = child, None, False
        return child

    def _command(self, name: str) -> list[str]:
        url = f"redis://127.0.0.1:{self.proxies[name].port}/0"
        service, _, index = name.partition("-")
        more = ["--index", index] if index else ["--resume"]
        sets = [part for override in self._overrides for part in ("--set", override)]
        return [sys.executable, "-m", "nbehind", service, str(self._config_file), "--redis", url, *more, *sets]

    def _environment(self, name: str) -> Mapping[str, str]:
        env = environment_of(self.config, "trainer" if name == "trainer" else "producer")
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), env.get("PYTHONPATH", "")]))
        return {**env, MARK: str(self.folder), "PYTHONPATH": path}

    def override(self, assignment: str) -> None:
        """`section.key=value` for what is started from now on."""
        self._overrides.append(assignment)

    def alive(self, name: str) -> Child | None:
        """The service's process, None while there is none."""
        place = self.places.get(name)
        return place.child if place and place.child and place.child.poll() is None else None

    def producers(self) -> list[str]:
        return sorted(name for name in self.places if name.startswith("producer-") and self.alive(name))

    def kill(self, name: str, restart_after_s: float) -> bool:
        """SIGKILL to all of the service's session; its successor starts later. False when there is nothing to kill."""
        child = self.alive(name)
        if child is None:
            return False
        child.kill()
        self._ended(child)
        self.places[name].child = None
        self.places[name].start_at = time.monotonic() + restart_after_s
        return True

    def ask_to_leave(self, name: str) -> bool:
        """SIGTERM. Whether it gets a successor is decided by `remove` or `start`."""
        child = self.alive(name)
        if child is None:
            return False
        self.places[name].leaving = True
        child.ask_to_leave()
        return True

    def remove(self, name: str) -> None:
        """The service leaves, and gets no successor."""
        if not self.ask_to_leave(name):
            self.places.pop(name, None)

    def bury_trainer(self) -> Child | None:
        """The trainer becomes a zombie: it is stopped, and does not hold its place any more.

        Only one that owns the run: one that is still starting would claim it when it wakes up, and rightly go on.
        """
        child = self.alive("trainer")
        if child is None or child.pid != self.owner:
            return None
        send(child, signal.SIGSTOP)
        self.zombies.append(Zombie(child))
        self.notes.zombies += 1
        self.places["trainer"].child = None
        self.places["trainer"].start_at = None
        return child

    def wake(self, child: Child) -> None:
        send(child, signal.SIGCONT)
        self._say(f"{child.name} wakes up")
        for zombie in self.zombies:
            if zombie.child is child:
                zombie.awake = True

    # --- Redis
    @contextlib.contextmanager
    def client(self) -> Iterator[redis.Redis]:
        """A connection past the proxies, impatient."""
        client = connect(
            self.redis.tcp_url, socket_timeout_s=REDIS_TIMEOUT_S, connect_timeout_s=REDIS_TIMEOUT_S, name="chaos"
        )
        try:
            yield client
        finally:
            client.close()

    def restart_redis(self, data: Path | None) -> None:
        """Start the killed server again with the append-only files of `data`, or with nothing."""
        own = self.redis.folder / AOF
        if data != own:
            shutil.rmtree(own, ignore_errors=True)
            if data is not None:
                shutil.copytree(data, own)
        self.redis.restart()

    # --- the clock
    def tend(self) -> None:
        """To be called often: successors of the dead, and the end of zombies."""
        now = time.monotonic()
        for place in list(self.places.values()):
            self._tend(place, now)
        for zombie in list(self.zombies):
            self._tend_zombie(zombie, now)

    def _tend(self, place: Place, now: float) -> None:
        child = place.child
        if child is not None and (code := child.poll()) is not None:
            self._ended(child)
            place.child = None
            if place.leaving:
                expected: tuple[int, ...] = (0, EXIT_INTERRUPTED, -signal.SIGTERM)  # the last while it started
                if place.name.startswith("producer-") and not self.settled:
                    self.places.pop(place.name, None)
            else:
                expected = (0,) if self.settled else ()
                place.start_at = now + RESTART_S
            if code not in expected:
                last = " | ".join(child.last_lines(2))[-300:]
                self.notes.unexpected.append(f"{child.name}: {describe_exit(code)}: {last}")
        if place.start_at is not None and now >= place.start_at and not self.settled:
            self.start(place.name)

    def _tend_zombie(self, zombie: Zombie, now: float) -> None:
        code = zombie.child.poll()
        if code is not None:
            self._ended(zombie.child)
            self.zombies.remove(zombie)
            if zombie.awake and code in (0, EXIT_INTERRUPTED):
                self.notes.stayed.append(f"{zombie.child.name} woke up and ended with {describe_exit(code)}, no error")
        elif zombie.awake and zombie.since is None and self.owner != zombie.child.pid:
            zombie.since = now
        elif zombie.since is not None and now - zombie.since > ZOMBIE_LEAVES_S:
            self.notes.stayed.append(f"{zombie.child.name} still lived {ZOMBIE_LEAVES_S:g} s after it woke up")
            send(zombie.child, signal.SIGABRT)  # its log gets a traceback of every thread
            time.sleep(ABORT_S)
            zombie.child.kill()

    def _ended(self, child: Child) -> None:
        self._guardian.drop(child.pid)
        self._say(f"{child.name} has ended: {describe_exit(child.code or 0)}")

    # --- the end
    def close(self) -> None:
        """Kill what is left. Bounded, may be repeated."""
        children = [p.child for p in self.places.values() if p.child] + [z.child for z in self.zombies]
        for child in children:
            child.kill()
            self._ended(child)
        self.places.clear()
        self.zombies.clear()
        for proxy in self.proxies.values():
            proxy.close()
        self.proxies.clear()
        if not self._loop.loop.is_closed():
            self._loop.close()
        self.redis.close()

    def __enter__(self) -> Actors:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def send(child: Child, number: signal.Signals) -> None:
    """A signal to every process of the service's session, if there is one."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
