"""Evaluation beside training: requests of held-out prompts go through the same queue and producers, in ids of their own.

    step done, due ─▶ issue (step, EVAL_SLOT + i) ─▶ … ─▶ take ─▶ all there ─▶ mean reward ─▶ best checkpoint

Never waited for by a step, not part of conservation, and not trained. `min_version` is the evaluated version; a producer
that already has a newer one answers with that, so `version_max` tells what was really measured.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbehind.config import Config
from rollout_queue.messages import DeadNotice, GroupHeader, OpenState, Request, RequestId, Sampling
from rollout_queue.queue import TrainerQueue
from trainer_svc.data import Item
from trainer_svc.jsonl import read_rows, write_text_atomic
from trainer_svc.order import DataOrder

log = logging.getLogger(__name__)

EVAL_SLOT = 10**9  # slots from here on are evaluation requests
RESULTS = "eval.jsonl"


def is_evaluation(request: RequestId) -> bool:
    return request.slot >= EVAL_SLOT


@dataclass(slots=True)
class _Round:
    """One evaluation under way."""

    open: set[RequestId]
    rewards: list[float] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)


class Evaluation:
    """Owns evaluation requests and their results; `best` is the step with the highest mean reward so far."""

    def __init__(
        self, config: Config, queue: TrainerQueue, items: Sequence[Item], order: DataOrder, sampling: Sampling
    ) -> None:
        self._config = config
        self._queue = queue
        self._items = items
        self._order = order
        self._sampling = dataclasses.replace(
            sampling, num_generations=config.eval.num_generations, temperature=config.eval.temperature
        )
        self._path = config.run_dir / RESULTS
        self._rounds: dict[int, _Round] = {}
        self.results: list[dict[str, Any]] = []

    def restore(self, step: int) -> None:
        """Results of the surviving history up to `step`; later ones are of a lost future."""
        self.results = [r for r in read_rows(self._path) if r["step"] <= step]
        write_text_atomic(self._path, "".join(json.dumps(r) + "\n" for r in self.results))

    @property
    def best(self) -> dict[str, Any] | None:
        return max(self.results, key=lambda r: (r["reward_mean"], r["step"]), default=None)

    def open_steps(self) -> set[int]:
        """Steps whose evaluation is under way."""
        return set(self._rounds)

    def due(self, step: int) -> bool:
        return bool(self._items) and self._config.eval.every_steps > 0 and step % self._config.eval.every_steps == 0

    def begin(self, step: int, incarnation: int) -> list[Request]:
        """The requests that measure version `step`, which must be published."""
        ids = [RequestId(step, EVAL_SLOT + i) for i in range(len(self._items))]
        self._rounds[step] = _Round(set(ids))
        return [
            Request(
                id=request_id,
                incarnation=incarnation,
                min_version=step,
                seed=self._order.request_seed(request_id._replace(step=0)),
                prompt_ids=item.prompt_ids,
                sampling=self._sampling,
                item_id=item.id,
                payload=item.payload,
            )
            for request_id, item in zip(ids, self._items, strict=True)
        ]

    def take(self, arrival: GroupHeader | DeadNotice) -> None:
        """An evaluation request was answered (or given up)."""
        entry = self._rounds.get(arrival.id.step)
        if entry is not None and arrival.id in entry.open:
            entry.open.discard(arrival.id)
            if isinstance(arrival, GroupHeader):
                (group,) = self._queue.fetch([arrival])
                if group is not None:
                    entry.rewards += [float(r) for r in group.rewards]
                    entry.versions |= {v.number for v in group.versions}
        self._queue.release([arrival])
        self._close_finished()

    def compare(self, census: Mapping[RequestId, OpenState]) -> None:
        """Requests that the queue has lost are not measured."""
        for entry in self._rounds.values():
            entry.open &= census.keys()
        self._close_finished()

    def give_up(self) -> None:
        """The run ends: close what is under way with what is there."""
        for step, entry in self._rounds.items():
            if entry.open:
                log.warning("evaluation of step %d ends without %d of its answers", step, len(entry.open))
            self._queue.withdraw(entry.open)
            entry.open.clear()
        self._close_finished()

    def _close_finished(self) -> None:
        for step in [s for s, r in self._rounds.items() if not r.open]:
            entry = self._rounds.pop(step)
            if not entry.rewards:
                continue
            result = {
                "step": step,
                "reward_mean": sum(entry.rewards) / len(entry.rewards),
                "samples": len(entry.rewards),
                "version_max": max(entry.versions),
            }
            self.results.append(result)
            with self._path.open("a") as file:
                file.write(json.dumps(result) + "\n")
            log.info(
                "evaluation of step %d: mean reward %.4f over %d samples",
                step,
                result["reward_mean"],
                result["samples"],
            )


def best_checkpoint(root: Path, best: Mapping[str, Any]) -> bool:
    """Write root/best.json for the best evaluated checkpoint; False while that checkpoint is not there yet."""
    if not (root / f"step-{best['step']:06d}").is_dir():
        return False
    write_text_atomic(root / "best.json", json.dumps(dict(best)) + "\n")
    return True
