"""What a run leaves to read: metrics.jsonl (a line a step), rollouts.jsonl (samples), summary.json.

All numbers of the summary come from the lines of metrics.jsonl, so a resumed run is summed up as one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_queue.messages import Group
from trainer_svc.intake import Taken
from trainer_svc.jsonl import read_rows, write_text_atomic
from trainer_svc.step_ledger import StepLedger

if TYPE_CHECKING:
    import torch

METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts.jsonl"
SUMMARY = "summary.json"
OVERLAP_SHARE = 0.5  # of a step's groups that must have been generated while a step trained


def overlaps(group: Group, trained: Iterable[tuple[float, float]]) -> bool:
    """Was any part of the generation inside one of the training intervals (seconds since the epoch)?"""
    return any(group.started_at < end and start < group.generated_at for start, end in trained)


def summarize(rows: Sequence[Mapping[str, Any]], *, run: str, exit_reason: str) -> dict[str, Any]:
    """The summary of the steps in `rows` (see docs/metrics.md); first and last = means of the first and last tenth."""
    tenth = max(1, len(rows) // 10)
    rewards = [float(r["reward_mean"]) for r in rows]
    lags: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for row in rows:
        lags.update(row["lag_histogram"])
        seconds.update({k: float(v) for k, v in row["seconds"].items()})
    later = [bool(r["overlapped"]) for r in rows[1:]]
    tokens = sum(int(r["tokens"]) for r in rows)
    counters = rows[-1]["counters"] if rows else {}
    return {
        "run": run,
        "exit_reason": exit_reason,
        "steps": len(rows),
        "reward_mean_first": sum(rewards[:tenth]) / tenth if rows else None,
        "reward_mean_last": sum(rewards[-tenth:]) / tenth if rows else None,
        "lag_max": max((int(lag) for lag in lags), default=0),
        "lag_histogram": dict(sorted(lags.items(), key=lambda kv: int(kv[0]))),
        **{k: counters.get(k, 0) for k in ("issued", "trained", "filtered", "dead_lettered", "open")},
        "overlapped_steps": sum(later) / len(later) if later else 0.0,
        "seconds": {k: round(v, 3) for k, v in seconds.items()},
        "tokens": tokens,
        "tokens_per_second": tokens / seconds["total"] if seconds["total"] else 0.0,
    }


class Recorder:
    """Appends to the files of a run folder. `resume_at`: steps from there on are of a lost future and are cut off."""

    def __init__(
        self, folder: Path, rollouts_max_bytes: int, resume_at: int = 0, ledger: StepLedger | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._rollouts_max_bytes = rollouts_max_bytes
        self._ledger = ledger
        kept = (json.dumps(r) + "\n" for r in read_rows(folder / METRICS) if r["step"] < resume_at)
        write_text_atomic(folder / METRICS, "".join(kept))
        self._trained: list[tuple[float, float]] = []

    def trained(self, start: float, end: float) -> None:
        """Note a training interval (seconds since the epoch); the last few are enough for what is open."""
        self._trained = [*self._trained[-15:], (start, end)]

    def account(
        self, step: int, taken: Sequence[Taken], weights: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    ) -> None:
        """For an independent judge, if one is to come (step_ledger.py)."""
        if self._ledger is not None:
            self._ledger.trained(step, taken, weights())

    def overlapped(self, groups: Sequence[Group]) -> bool:
        """Were most of the groups generated while an earlier step trained?"""
        return sum(overlaps(g, self._trained) for g in groups) >= OVERLAP_SHARE * len(groups) > 0

    def step(self, row: dict[str, Any]) -> None:
        with (self._folder / METRICS).open("a") as file:
            file.write(json.dumps(row) + "\n")

    def rollouts(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append samples; past the size limit the file becomes rollouts.1.jsonl and a new one begins."""
        path = self._folder / ROLLOUTS
        if path.exists() and path.stat().st_size > self._rollouts_max_bytes // 2:
            path.replace(path.with_suffix(".1.jsonl"))
        with path.open("a") as file:
            file.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)

    def summary(self, run: str, exit_reason: str, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Write and return summary.json."""
        summary = {**summarize(read_rows(self._folder / METRICS), run=run, exit_reason=exit_reason), **extra}
        write_text_atomic(self._folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
        return summary
