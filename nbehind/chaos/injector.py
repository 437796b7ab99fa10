"""Carries the plan out: begins each fault at its time, and goes on with it when its wait is over. One thread, short ticks."""

from __future__ import annotations

import heapq
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nbehind.chaos.actors import Actors
from nbehind.chaos.faults import KINDS, Skipped, Waits
from nbehind.chaos.plan import Fault
from nbehind.chaos.verify import Span

log = logging.getLogger(__name__)

TICK_S = 0.05
AGAIN_S = 1.0  # a fault whose victim is not there yet tries again ...
PATIENCE_S = 15.0  # ... for so long


@dataclass(slots=True)
class Running:
    """A fault under way; the site of its deed. Times in seconds since the epoch."""

    fault: Fault
    actors: Actors
    rng: random.Random
    tries_until: float = 0.0  # monotonic seconds
    begun: float | None = None
    spans: list[Span] = field(default_factory=list)

    def calm(self) -> None:
        if self.begun is not None:
            self.spans.append((self.begun, time.time()))
            self.begun = None

    def disturb(self) -> None:
        self.begun = self.begun or time.time()


class Injector:
    """What was done: `done` by kind, `skipped` by kind, and when faults were in effect."""

    def __init__(self, actors: Actors, faults: Sequence[Fault], say: Callable[[str], None]) -> None:
        self._actors = actors
        self._say = say
        self.done: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self._spans: list[Span] = []
        self._running: list[Running] = []
        self._began = time.monotonic()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        for fault in faults:
            self._at(self._began + fault.at_s, lambda fault=fault: self._begin(fault))  # type: ignore[misc]

    def spans(self) -> list[Span]:
        """When faults were in effect, those under way up to now."""
        now = time.time()
        return self._spans + [s for r in self._running for s in [*r.spans, *([(r.begun, now)] if r.begun else [])]]

    def run(self, until_s: float, each: Callable[[], None]) -> None:
        """Work until `until_s` seconds after the beginning and every fault has ended. `each` is called every tick."""
        while self._due or self._running or time.monotonic() - self._began < until_s:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            self._actors.tend()
            each()
            time.sleep(TICK_S)

    def _at(self, when: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (when, self._count, what))

    def _begin(self, fault: Fault) -> None:
        running = Running(fault, self._actors, random.Random(fault.draw), time.monotonic() + PATIENCE_S)
        self._running.append(running)
        self._try(running)

    def _try(self, running: Running) -> None:
        running.disturb()
        self._go_on(running, KINDS[running.fault.kind].deed(running, running.fault.seconds), first=True)

    def _go_on(self, running: Running, deed: Waits, first: bool = False) -> None:
        kind = running.fault.kind
        try:
            wait_s = next(deed)
        except StopIteration:
            self._end(running)
            return
        except Skipped:
            if first and time.monotonic() < running.tries_until:
                running.begun = None
                self._at(time.monotonic() + AGAIN_S, lambda: self._try(running))
                return
            if first:
                self.skipped[kind] += 1
                running.begun = None
            self._end(running)
            return
        if first:
            self.done[kind] += 1
            self._say(f"fault: {kind} ({running.fault.seconds:.1f} s)")
        self._at(time.monotonic() + wait_s, lambda: self._go_on(running, deed))

    def _end(self, running: Running) -> None:
        running.calm()
        self._spans += running.spans
        self._running.remove(running)
