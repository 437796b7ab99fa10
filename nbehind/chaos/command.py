"""`nbehind chaos`: a real training run under the injector, the same run undisturbed, and the verdict.

disturbed: start ─▶ faults ─▶ calm ─▶ trainer asked to leave ─▶ resumed to a fixed last step ─▶ everybody leaves
reference: the same config and number of steps, without faults and waits ─▶ verify ─▶ report
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nbehind.chaos import ledger, verify
from nbehind.chaos.actors import Actors, left_over
from nbehind.chaos.faults import durations
from nbehind.chaos.injector import TICK_S, Injector
from nbehind.chaos.plan import plan
from nbehind.config import Config
from nbehind.config_load import config_of
from nbehind.errors import EXIT_FAILED, EXIT_OK, InputError, NbehindError
from nbehind.guardian import Guardian
from nbehind.run_folder import RunFolder
from trainer_svc.service import FINAL_MODEL
from weight_sync.shm_files import clean

START_S = {"fake": 60.0, "vllm": 300.0}  # longest wait for the first step
STALL_S = {"fake": 30.0, "vllm": 120.0}  # longest time without a step that is allowed: a vLLM engine starts for 40 s
LEAVE_S = 60.0
AFTER_STEPS = 3  # after the last fault, and again after the resume that ends the run
REFERENCE_STEP_S = 2.0  # longest that a step of the undisturbed run may take on average


@dataclass(frozen=True, slots=True)
class Options:
    minutes: float
    seed: int
    backend: Literal["fake", "vllm"] = "fake"
    json_file: Path | None = None
    keep: Path | None = None
    n_behind: int = 0
    order: Literal["strict", "ready"] = "strict"
    only: tuple[str, ...] = ()  # kinds of faults; () = all


def chaos_config(folder: Path, options: Options, name: str) -> Config:
    """A small run of many short steps, with a checkpoint every ten."""
    fake = options.backend == "fake"
    return config_of(
        {
            "run": {
                "name": name, "dir": folder / "runs", "seed": options.seed, "max_steps": 10**9,
                "n_behind": options.n_behind, "order": options.order, "stall_s": 15.0, "give_up_s": 300.0, "drain_s": 10.0,
            },
            "model": {"path": "fake" if fake else "demo"},
            "sampling": {"groups_per_step": 4, "num_generations": 4, "max_new_tokens": 16},
            "trainer": {
                "engine": "fake" if fake else "torch", "lr": 0.002 if fake else 1e-4, "fake_step_s": 0.05,
                "reconcile_s": 2.0,
            },
            "producer": {
                "backend": options.backend, "max_requests": 4, "lease_s": 3.0, "request_timeout_s": 60.0,
                "fake_generate_s": 0.1, "fake_sigma": 1.0,
            },
            "sync": {"join_timeout_s": 5.0, "transfer_timeout_s": 5.0},
            "checkpoint": {"every_steps": 10, "keep": 2},
            "metrics": {"step_ledger": True, "rollouts_per_step": 1},
        },
        "chaos",
    )  # fmt: skip


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


def chaos(options: Options, say: Callable[[str], None] = lambda line: None) -> tuple[dict[str, Any], list[str]]:
    """Run it; returns the report and the guarantees that failed, each as a line."""
    with _folder(options.keep) as folder:
        with Guardian() as guardian:
            disturbed = _disturbed(folder, options, guardian, say)
            reference: list[ledger.Step] | None = None
            if options.backend == "fake" and options.n_behind == 0:
                say(f"the same {disturbed.steps} steps without faults")
                reference = _undisturbed(folder, options, disturbed.steps, guardian)
        return _judge(folder, options, disturbed, reference)


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
    notes: Any
    left: list[str]


def _disturbed(folder: Path, options: Options, guardian: Guardian, say: Callable[[str], None]) -> Disturbed:
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
        left = [line for line in left_over(folder) if "valkey-server" not in line]
        for place in actors.places.values():
            if place.child:
                problems.append(f"{place.child.name} did not leave at the end of the run")
    watch.look()
    history = ledger.surviving(watch.lines)
    left += left_over(folder)
    return Disturbed(config, injector, watch.lines, history, steps, begun, ended, problems, actors.notes, left)


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


def _undisturbed(folder: Path, options: Options, steps: int, guardian: Guardian) -> list[ledger.Step]:
    config = chaos_config(folder, options, "undisturbed")
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


def _judge(
    folder: Path, options: Options, run: Disturbed, reference: list[ledger.Step] | None
) -> tuple[dict[str, Any], list[str]]:
    config, injector = run.config, run.injector
    found = verify.check_history(run.history, config.sampling.groups_per_step, options.n_behind)
    summary = RunFolder(config.run_dir).read_summary()
    stall_s, stall_at = verify.longest_stall(verify.progress_times(run.lines), injector.spans(), run.begun, run.ended)
    raw_s, _ = verify.longest_stall(verify.progress_times(run.lines), [], run.begun, run.ended)
    difference = None if reference is None else verify.first_difference(run.history, reference)
    if difference == "" and not _same_files(folder, run.config.run_dir.parent):
        difference = "the files of the final weights differ"
    clean(Path("/dev/shm"))  # noqa: S108 - what killed producers left is removed by the next one; here is none
    report: dict[str, Any] = {
        "minutes": options.minutes,
        "seed": options.seed,
        "backend": options.backend,
        "n_behind": options.n_behind,
        "order": options.order,
        "faults": dict(sorted(injector.done.items())),
        "faults_total": sum(injector.done.values()),
        "fault_kinds": len(injector.done),
        "skipped": dict(sorted(injector.skipped.items())),
        "steps": found.steps,
        "steps_trained_in_all": sum(isinstance(line, ledger.Step) for line in run.lines),
        "trainer_lives": verify.lives(run.lines),
        **{k: summary.get(k) for k in ("issued", "trained", "filtered", "dead_lettered", "open")},
        "trained_twice": found.trained_twice,
        "lost": found.lost,
        "lag_violations": found.lag_violations,
        "longest_stall_s": round(stall_s, 1),
        "longest_stall_at_s": round(stall_at - run.begun, 1),
        "longest_time_between_steps_s": round(raw_s, 1),
        "zombies_woken": run.notes.zombies,
        "unexpected_exits": run.notes.unexpected,
        "processes_left_over": len(run.left),
        "weights_equal": None if difference is None else not difference,
        "difference": difference,
    }
    return report, _failures(report, found, run, STALL_S[options.backend])


def _failures(report: dict[str, Any], found: verify.History, run: Disturbed, stall_limit_s: float) -> list[str]:
    """Every guarantee that does not hold, as a line."""
    resolved = sum(report[k] or 0 for k in ("trained", "filtered", "dead_lettered", "open"))
    checks = [
        (found.trained_twice == 0, f"{found.trained_twice} requests were trained twice"),
        (found.lost == 0, f"{found.lost} requests were lost"),
        (found.steps_missing == 0 and found.steps == run.steps, f"{found.steps} of {run.steps} steps are in the history"),
        (found.lag_violations == 0, f"{found.lag_violations} groups were trained outside of the bound"),
        (report["issued"] == resolved, f"conservation: issued {report['issued']}, resolved and open {resolved}"),
        (report["trained"] == found.trained, f"the trainer counts {report['trained']} trained, its ledger {found.trained}"),
        (report["open"] == 0, f"{report['open']} requests were open at the end"),
        (report["longest_stall_s"] <= stall_limit_s,
         f"no step for {report['longest_stall_s']} s, {report['longest_stall_at_s']} s after the beginning; allowed: {stall_limit_s:g} s"),
        (report["processes_left_over"] == 0, f"processes left over: {run.left}"),
        (not run.notes.unexpected, f"services ended on their own: {'; '.join(run.notes.unexpected)}"),
        (not run.notes.stayed, f"trainers that woke up beside their successor: {'; '.join(run.notes.stayed)}"),
        (not report["difference"], f"not as undisturbed: {report['difference']}"),
    ]  # fmt: skip
    return [line for holds, line in checks if not holds] + run.problems


def _same_files(folder: Path, runs: Path) -> bool:
    """Are the final weights of both runs the same bytes?"""
    one, two = (
        {p.name: p.read_bytes() for p in (runs / name / FINAL_MODEL).iterdir()} for name in ("disturbed", "undisturbed")
    )
    return bool(one) and one == two


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise InputError(f"--keep {keep}: the folder is not empty; give a new one")
        yield keep.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="nbehind-chaos-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(options: Options) -> int:
    """Run, print the report as JSON, write it where it is wanted. EXIT_FAILED when a guarantee does not hold."""
    began = time.monotonic()
    report, failures = chaos(options, lambda line: _say(f"{time.monotonic() - began:6.1f} s  {line}"))
    report = {**report, "passed": not failures, "failures": failures}
    text = json.dumps(report, indent=2) + "\n"
    sys.stdout.write(text)
    if options.json_file is not None:
        options.json_file.write_text(text)
    for line in failures:
        _say(f"FAILED: {line}")
    return EXIT_FAILED if failures else EXIT_OK


def _say(line: str) -> None:
    sys.stderr.write(f"nbehind chaos: {line}\n")
    sys.stderr.flush()
