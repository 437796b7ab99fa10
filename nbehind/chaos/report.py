"""From what the runs left to the report, and to the list of guarantees that do not hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbehind.chaos import ledger, verify
from nbehind.chaos.drive import REFERENCE, Disturbed
from nbehind.chaos.scenario import STALL_S, Options
from nbehind.run_folder import RunFolder


def judge(options: Options, run: Disturbed, reference: list[ledger.Step] | None) -> tuple[dict[str, Any], list[str]]:
    """The report, and each guarantee that does not hold as a line."""
    from trainer_svc.service import FINAL_MODEL

    config, injector = run.config, run.injector
    found = verify.check_history(run.history, config.sampling.groups_per_step, options.n_behind)
    summary = RunFolder(config.run_dir).read_summary()
    disturbances = [*injector.spans(), *run.pauses]  # a machine that stands still is one too
    stall_s, stall_at = verify.longest_stall(verify.progress_times(run.lines), disturbances, run.begun, run.ended)
    raw_s, _ = verify.longest_stall(verify.progress_times(run.lines), [], run.begun, run.ended)
    difference = None if reference is None else verify.first_difference(run.history, reference)
    if difference == "" and not _same_files(
        config.run_dir / FINAL_MODEL, config.run_dir.with_name(REFERENCE) / FINAL_MODEL
    ):
        difference = "the files of the final weights differ"
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
        "machine_paused_s": round(sum(stop - start for start, stop in run.pauses), 1),
        "zombies_woken": run.notes.zombies,
        "unexpected_exits": run.notes.unexpected,
        "processes_left_over": len(run.left),
        "shared_memory_left_over": run.shared_memory_left,
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
        (run.shared_memory_left == 0, f"{run.shared_memory_left} files of dead processes were left in shared memory"),
        (not run.notes.unexpected, f"services ended on their own: {'; '.join(run.notes.unexpected)}"),
        (not run.notes.stayed, f"trainers that woke up beside their successor: {'; '.join(run.notes.stayed)}"),
        (not report["difference"], f"not as undisturbed: {report['difference']}"),
    ]  # fmt: skip
    return [line for holds, line in checks if not holds] + run.problems


def _same_files(ours: Path, reference: Path) -> bool:
    """Are the final weights of both runs the same bytes?"""
    one, two = ({p.name: p.read_bytes() for p in folder.iterdir()} for folder in (ours, reference))
    return bool(one) and one == two
