"""Drives the runs: the disturbed one from its first step to a clean end, and the undisturbed one beside it.

start ─▶ first step ─▶ faults (injector.py) ─▶ calm ─▶ trainer asked to leave ─▶ resumed to a fixed last step ─▶ all leave
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nbehind.chaos import ledger
from nbehind.chaos.actors import Actors, Notes
from nbehind.chaos.faults import durations
from nbehind.chaos.injector import TICK_S, Injector
from nbehind.chaos.leftovers import left_over, shared_memory_left
from nbehind.chaos.plan import plan
from nbehind.chaos.scenario import AFTER_STEPS, LEAVE_S, REFERENCE_STEP_S, STALL_S, START_S, Options, chaos_config
from nbehind.chaos.verify import Span
from nbehind.config import Config
from nbehind.errors import InputError, NbehindError
from nbehind.guardian import Guardian

REFERENCE = "undisturbed"


class Watch:
    """Follows a run's ledger as it grows."""

    def __init__(self, actors: Actors) -> None:
        self._actors = actors
        self._at = 0
        self.lines: list[ledger.Line] = []

    def look(self) -> None:
        found, self._at = ledger.read(self._actors.ledger, self._at)
        for line in found:
            if isinstance(line, ledger.Life):
                self._actors.owner = line.pid
        self.lines += found

    def steps(self) -> int:
        """Step lines so far, of all lives."""
        self.look()
        return sum(isinstance(line, ledger.Step) for line in self.lines)

    def last_step(self) -> int:
        """The newest step of the newest life, −1 before the first."""
        self.look()
        history = ledger.surviving(self.lines)
        return history[-1].step if history else -1


@dataclass(slots=True)
class Disturbed:
    """What the disturbed run left."""

    config: Config
    injector: Injector
    lines: list[ledger.Line]
    history: list[ledger.Step]
    steps: int
    begun: float
    ended: float
    problems: list[str]
    notes: Notes
    left: list[str]
    shared_memory_left: int
    pauses: list[Span]  # when not even the judge could run


def disturbed(folder: Path, options: Options, guardian: Guardian, say: Callable[[str], None]) -> Disturbed:
    """The run under faults. NbehindError when it does not even begin."""
    config = chaos_config(folder, options, "disturbed")
    total_s = options.minutes * 60
    faults = plan(options.seed, total_s, _kinds(options, config))
    problems: list[str] = []
    with Actors(folder, config, guardian, say) as actors:
        watch = Watch(actors)
        actors.start_all()
        if not _wait(actors, lambda: watch.steps() > 0, START_S[options.backend]):
            raise NbehindError(
                f"the run did not take its first step; its logs are in {folder / 'logs'} (--keep FOLDER)"
            )
        begun = time.time()
        injector = Injector(actors, faults, say)
        injector.run(total_s, watch.look)
        say("no more faults; the run goes on for some steps, and is then ended")
        _wait_for_calm(actors, watch, STALL_S[options.backend], problems)
        ended = time.time()
        steps = _finish(actors, watch, options, problems)
        pauses = actors.pauses
        left = [line for line in left_over(folder) if "valkey-server" not in line]
        for place in actors.places.values():
            if place.child:
                problems.append(f"{place.child.name} did not leave at the end of the run")
    watch.look()
    history = ledger.surviving(watch.lines)
    left += left_over(folder)
    freed = shared_memory_left(config.run.name)
    return Disturbed(
        config, injector, watch.lines, history, steps, begun, ended, problems, actors.notes, left, freed, pauses
    )


def _wait_for_calm(actors: Actors, watch: Watch, stall_s: float, problems: list[str]) -> None:
    """Until the newest trainer owns the run, those before it have left, and some steps are done."""

    def owned() -> bool:
        watch.look()
        child = actors.alive("trainer")
        return child is not None and actors.owner == child.pid and not actors.zombies

    if not _wait(actors, owned, stall_s + LEAVE_S):
        problems.append("the newest trainer did not take over the run")
    calm = watch.steps()
    if not _wait(actors, lambda: watch.steps() >= calm + AFTER_STEPS, stall_s):
        problems.append("no steps after the last fault")


def _kinds(options: Options, config: Config) -> Mapping[str, tuple[float, float]]:
    known = durations(config.producer.lease_s)
    if unknown := sorted(set(options.only) - known.keys()):
        raise InputError(f"--only {','.join(unknown)}: the kinds of faults are {', '.join(known)}")
    return {kind: known[kind] for kind in options.only or known}


def _finish(actors: Actors, watch: Watch, options: Options, problems: list[str]) -> int:
    """End the run cleanly: leave at a checkpoint, resume to a fixed last step, everybody leaves. Returns the number of steps."""
    actors.ask_to_leave("trainer")
    if not _wait(actors, lambda: actors.alive("trainer") is None and not actors.zombies, LEAVE_S):
        problems.append(f"the trainer did not leave within {LEAVE_S:g} s of SIGTERM")
        actors.kill("trainer", 0.0)
    steps = watch.last_step() + 1 + options.n_behind + AFTER_STEPS
    actors.override(f"run.max_steps={steps}")
    actors.settled = True
    actors.start("trainer")
    limit_s = STALL_S[options.backend] + LEAVE_S
    if not _wait(
        actors, lambda: not any(place.child for place in actors.places.values()) and not actors.zombies, limit_s
    ):
        problems.append("the run did not come to its end")
    return steps


def undisturbed(folder: Path, options: Options, steps: int, guardian: Guardian) -> list[ledger.Step]:
    """Its steps. NbehindError when it fails."""
    config = chaos_config(folder, options, REFERENCE)
    run = config.run.model_copy(update={"max_steps": steps})
    producer = config.producer.model_copy(update={"fake_generate_s": 0.0})
    trainer = config.trainer.model_copy(update={"fake_step_s": 0.0})
    quick = config.model_copy(update={"run": run, "producer": producer, "trainer": trainer})
    with Actors(folder, quick, guardian) as actors:
        actors.settled = True
        actors.start_all()
        limit_s = START_S["fake"] + REFERENCE_STEP_S * steps
        if not _wait(actors, lambda: not any(place.child for place in actors.places.values()), limit_s):
            raise NbehindError(f"the undisturbed run did not end within {limit_s:.0f} s")
        if actors.notes.unexpected:
            raise NbehindError(f"the undisturbed run failed: {actors.notes.unexpected[0]}")
        return ledger.surviving(ledger.read(actors.ledger)[0])


def _wait(actors: Actors, condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        actors.tend()
        time.sleep(TICK_S)
    return True
