"""The processes of a run: started, watched, restarted, and ended in order.

    prepare model ─▶ trainer + producers ─▶ watch ─┬─ trainer done ─▶ producers leave by themselves ─▶ killed past drain_s
                                              ▲    ├─ trainer or a producer for good dead ─▶ ServiceDied ─▶ the rest is ended
                                              │    └─ Ctrl-C, SIGTERM ─▶ trainer drains and saves ─▶ producers ─▶ Interrupted
                             producer dead ───┘ (restart after a backoff)

waits for: deaths of children, signals, the clock; one loop of short ticks, no wait without a deadline but the run itself.
Whatever happens, run() returns or raises only when every process of the run is gone.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from nbehind.config import Config
from nbehind.environment import Kind, environment_of
from nbehind.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, Interrupted, ServiceDied
from nbehind.guardian import Guardian
from nbehind.live import Display
from nbehind.live_data import MetricsTail, ProbeResult, ServiceLine, View
from nbehind.process import Child, describe_exit
from nbehind.run_folder import RunFolder

TICK_S = 0.05
VIEW_S = 0.2
TRIM_S = 5.0
LEFT_GRACE_S = 3.0  # a producer that left with code 0 may know of the end before the supervisor does
LEAVE_S = 5.0  # from SIGTERM to SIGKILL for a producer whose trainer is gone
DRAIN_MARGIN_S = 5.0
MAX_BACKOFF_S = 30.0
SHOWN_LOG_LINES = 12
SERVICE_ERROR = re.compile(r"nbehind \w+: error: (.*)")  # as cli.describe writes it


@dataclass(frozen=True, slots=True)
class ServiceCommands:
    """How each service is started. `model` None: there is nothing to prepare."""

    trainer: Sequence[str]
    producer: Callable[[int], Sequence[str]]  # by index
    model: Sequence[str] | None = None


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP while the context lasts."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Interrupts:
        self._before = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


@dataclass(slots=True)
class Slot:
    """The place of one producer."""

    index: int
    child: Child | None = None
    restarts: int = 0
    start_at: float | None = 0.0  # when to start it, None while it runs or has left
    judge_at: float | None = None  # when to decide about one that left with code 0

    @property
    def name(self) -> str:
        return f"producer-{self.index}"

    def state(self, now: float) -> str:
        if self.start_at is not None:
            return f"restarting in {max(0.0, self.start_at - now):.0f} s (restart {self.restarts})"
        return "running" if self.child is not None and self.child.code is None else "left"


def backoff_s(restarts: int) -> float:
    """Seconds before the n-th restart (n ≥ 1): 1, 2, 4, … 30."""
    return min(MAX_BACKOFF_S, 2.0 ** (restarts - 1))


class Supervisor:
    """One run's processes; see the picture above."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        commands: ServiceCommands,
        display: Display,
        guardian: Guardian,
        interrupts: Interrupts,
        *,
        probe: Callable[[], ProbeResult],
        keep_redis: Callable[[], str],
    ) -> None:
        """`keep_redis` restarts a dead embedded server and returns what it did ('' = nothing); it may raise."""
        self._config = config
        self._folder = folder
        self._commands = commands
        self._display = display
        self._guardian = guardian
        self._interrupts = interrupts
        self._probe = probe
        self._keep_redis = keep_redis
        self._children: list[Child] = []  # alive or not yet dropped from the guardian
        self._trainer: Child | None = None
        self._slots = [Slot(i) for i in range(config.producer.count)]
        self._tail = MetricsTail(folder.metrics)
        self._phase = "starting"
        self._next_view = self._next_trim = 0.0

    # --- the flow
    def run(self) -> None:
        """Until the trainer is done. Raises ServiceDied, Interrupted, or what the embedded Redis raises."""
        try:
            self._prepare_model()
            self._trainer = self._start("trainer", self._commands.trainer, "trainer")
            self._phase = "running"
            self._watch(self._trainer)
            self._phase = "ending"
            self._await(self._producers(), self._config.run.drain_s)
        finally:
            try:
                self._end_producers()
            finally:
                for child in list(self._children):
                    child.kill()
                    self._forget(child)
                self._show()  # the last step may be younger than the last look

    def _prepare_model(self) -> None:
        if self._commands.model is None:
            return
        self._phase = "preparing model"
        child = self._start("model", self._commands.model, "trainer")
        while child.poll() is None:
            if self._interrupts.count:
                raise Interrupted("interrupted while the model was being prepared")
            self._tick()
        self._forget(child)
        if child.code:
            raise self._died(child, "the model could not be prepared")

    def _watch(self, trainer: Child) -> None:
        """Until the trainer has ended well."""
        while trainer.poll() is None:
            if self._interrupts.count:
                self._interrupt(trainer)
            if (done := self._keep_redis()) != "":
                self._display.note(done)
            for slot in self._slots:
                self._look_after(slot)
            self._tick()
        self._forget(trainer)
        if trainer.code == EXIT_INTERRUPTED:
            raise Interrupted("the trainer was asked to stop; its state is saved")
        if trainer.code:
            raise self._died(trainer, "the trainer ended the run")

    def _interrupt(self, trainer: Child) -> None:
        """The trainer drains and saves, unless a second signal comes."""
        self._phase = "stopping"
        self._display.note("stopping: the trainer finishes its step and saves (once more to end at once)")
        seen = self._interrupts.count
        trainer.ask_to_leave()
        self._await([trainer], self._config.run.drain_s + DRAIN_MARGIN_S, seen)
        if trainer.poll() in (0, EXIT_INTERRUPTED):
            raise Interrupted("interrupted; the trainer's state is saved")
        raise Interrupted(
            "interrupted; the trainer was ended before it could save"
            if trainer.code is None or trainer.code < 0
            else f"interrupted; the trainer failed to save: {describe_exit(trainer.code)}, see {trainer.log_file}"
        )

    # --- producers
    def _look_after(self, slot: Slot) -> None:
        """Start, judge or restart one producer."""
        now = time.monotonic()
        if slot.start_at is not None:
            if now >= slot.start_at:
                slot.child = self._start(slot.name, self._commands.producer(slot.index), "producer")
                slot.start_at = None
        elif slot.child is not None and slot.child.poll() is not None:
            if slot.child in self._children:
                self._forget(slot.child)
                slot.judge_at = now + (LEFT_GRACE_S if slot.child.code == 0 else 0.0)
            if slot.judge_at is not None and now >= slot.judge_at:
                slot.judge_at = None
                self._judge(slot, slot.child)

    def _judge(self, slot: Slot, child: Child) -> None:
        """A producer has ended: that is fine after the end of the run, else it is restarted or ends the run."""
        code, allowed = child.code or 0, self._config.producer.max_restarts
        if self._probe().ended:
            return
        if code == EXIT_BAD_INPUT:
            raise self._died(child, f"{slot.name} cannot start")
        if slot.restarts >= allowed:
            raise self._died(
                child, f"{slot.name} ended for good, after {slot.restarts} restarts (producer.max_restarts)"
            )
        slot.restarts += 1
        delay = backoff_s(slot.restarts)
        slot.start_at = time.monotonic() + delay
        why = "left before the end of the run" if code == 0 else f"died: {describe_exit(code)}"
        last = "".join(f"; last line: {line}" for line in child.last_lines(1))
        self._display.note(f"{slot.name} {why}; restart {slot.restarts} of {allowed} in {delay:.0f} s{last}")

    def _producers(self) -> list[Child]:
        return [s.child for s in self._slots if s.child is not None]

    def _end_producers(self) -> None:
        """SIGTERM, then SIGKILL; a second signal to the supervisor means SIGKILL now."""
        if self._interrupts.count > 1:
            return
        running = [c for c in self._producers() if c.poll() is None]
        for child in running:
            child.ask_to_leave()
        self._await(running, LEAVE_S)

    # --- small parts
    def _start(self, name: str, command: Sequence[str], kind: Kind) -> Child:
        child = Child(name, command, self._folder.log_file(name), environment_of(self._config, kind))
        self._guardian.add(child.pid)
        self._children.append(child)
        return child

    def _forget(self, child: Child) -> None:
        self._guardian.drop(child.pid)
        self._children.remove(child)

    def _await(self, children: Iterable[Child], seconds: float, signals_seen: int | None = None) -> None:
        """Until all have ended, `seconds` are over, or one more signal came than `signals_seen` (default: than now)."""
        children = list(children)
        seen = self._interrupts.count if signals_seen is None else signals_seen
        deadline = time.monotonic() + seconds
        while (
            any(c.poll() is None for c in children) and time.monotonic() < deadline and self._interrupts.count <= seen
        ):
            self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        if now >= self._next_trim:
            self._next_trim = now + TRIM_S
            for child in self._children:
                child.trim_log()
        if now >= self._next_view:
            self._next_view = now + VIEW_S
            self._show()
        time.sleep(TICK_S)

    def _show(self) -> None:
        self._tail.read()
        self._display.update(self._view(time.monotonic()))

    def _view(self, now: float) -> View:
        answer = self._probe()
        lines = [ServiceLine(s.name, s.state(now), _newest(s.child)) for s in self._slots]
        if self._trainer is None:
            lines = [ServiceLine(c.name, "running", _newest(c)) for c in self._children]
        else:
            lines.insert(0, ServiceLine("trainer", "running", _newest(self._trainer)))
        run = self._config.run
        phase = "training" if self._phase == "running" and self._tail.rows else self._phase
        return View(run.name, phase, run.max_steps, self._tail.rows, answer.producers, lines, answer.error)

    def _died(self, child: Child, what: str) -> ServiceDied:
        """Why, in the service's own words where it has said them; its last log lines unless those say it all."""
        assert child.code is not None
        lines = child.last_lines(SHOWN_LOG_LINES)
        said = SERVICE_ERROR.fullmatch(lines[-1]) if lines else None
        bad_input = child.code == EXIT_BAD_INPUT
        exit_and_log = f"{describe_exit(child.code)}; whole log: {_short(child.log_file)}"
        message = f"{what}: {said[1]} ({exit_and_log})" if said else f"{what}: {exit_and_log}"
        return ServiceDied(message, [] if said and bad_input else lines, bad_input=bad_input)


def _newest(child: Child | None) -> str:
    return "".join(child.last_lines(1)) if child is not None else ""


def _short(path: Path) -> str:
    """Relative to the working directory where it lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
