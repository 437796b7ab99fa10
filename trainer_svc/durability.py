"""When a checkpoint is written, and what may leave Redis because of it.

step done ─▶ due? ─▶ snapshot (a copy in memory) ─▶ saver thread ─▶ durable ─▶ ack and delete what it covers
                                                                retention budget spent, Redis full ─▶ the oldest go early
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from nbehind.config import Config
from rollout_queue.messages import DeadNotice, GroupHeader
from rollout_queue.queue import TrainerQueue
from rollout_queue.staleness import min_version
from trainer_svc.engine import Engine
from trainer_svc.evaluation import best_checkpoint
from trainer_svc.intake import Intake
from trainer_svc.saver import Saver
from weight_sync.publisher import Publisher

log = logging.getLogger(__name__)

RELIEF_S = 1.0  # between two looks at whether Redis is full
WARN_EVERY_S = 30.0
ENTRY_BYTES = 1024  # what Redis and this process hold of a group besides body and header


class Durability:
    """Owns the checkpoints of a run, and the consumed groups that wait for one."""

    def __init__(
        self,
        config: Config,
        queue: TrainerQueue,
        engine: Engine,
        intake: Intake,
        publisher: Publisher,
        saver: Saver,
        fence: Callable[[], None],
    ) -> None:
        self._config = config
        self._queue = queue
        self._engine = engine
        self._intake = intake
        self._publisher = publisher
        self._saver = saver
        self._fence = fence
        self._covered = 0  # the first so many retained groups are covered by the checkpoint being written
        self._drawn: list[str] = []  # re-queued prompts that it covers
        self._owed = False  # one was due while another was still being written
        self._best_written: int | None = None  # the step that best.json names
        self._relieved_at = self._warned_at = float("-inf")
        self.saved_step = -1

    def after_step(self, step: int) -> None:
        """Collect what has become durable, begin what is due, free what is over the budget. Never waits for the disk."""
        self._collect(self._saver.finished())
        self._protect_best()
        every = self._config.checkpoint.every_steps
        self._owed = self._owed or bool(every and step % every == 0)
        if self._owed and not self._saver.busy:
            self._begin(step)
        self.release_past(int(self._config.redis.retention_mb * 2**20))

    def finish(self, step: int) -> None:
        """Make `step` durable, and wait for it."""
        self._collect(self._saver.finished(wait=True))
        if self.saved_step != step:
            self._begin(step)
            self._collect(self._saver.finished(wait=True))
        self._protect_best()
        self._saver.prune()

    def close(self) -> None:
        self._saver.close()

    def relieve(self) -> None:
        """Called while the trainer waits: free what has become durable and, when Redis is full, the older half of the rest."""
        if time.monotonic() - self._relieved_at < RELIEF_S:
            return
        self._relieved_at = time.monotonic()
        self._collect(self._saver.finished())
        if not self._queue.memory_full():
            return
        kept = len(self._intake.retained)
        if kept:
            log.warning("Redis is full: %d of %d consumed groups go before their checkpoint", (kept + 1) // 2, kept)
            self._release((kept + 1) // 2)
        elif time.monotonic() - self._warned_at > WARN_EVERY_S:
            self._warned_at = time.monotonic()
            log.warning(
                "Redis is full, and nothing can be released: raise its maxmemory, "
                "or lower run.n_behind, sampling.groups_per_step or sampling.num_generations"
            )

    def release_past(self, budget_bytes: int) -> None:
        """The oldest consumed groups beyond the budget go early: after a crash they are generated again."""
        retained = self._intake.retained
        total = sum(_bytes(h) for h in retained)
        early = 0
        while total > budget_bytes:
            total -= _bytes(retained[early])
            early += 1
        self._release(early)

    def _begin(self, step: int) -> None:
        self._fence()
        self._intake.ledger.check(len(self._intake.window))
        self._owed = False
        self._covered = len(self._intake.retained)
        self._drawn = self._intake.requeued.drawn()
        self._saver.begin(step, self._engine.snapshot(), self._meta(step))

    def _protect_best(self) -> None:
        """The best evaluated checkpoint outlives the newest ones, and so does one whose evaluation is under way."""
        evaluation = self._intake.evaluation
        if evaluation is None:
            return
        best = evaluation.best
        self._saver.protected = evaluation.open_steps() | ({best["step"]} if best else set())
        if best and best["step"] != self._best_written and best_checkpoint(self._saver.root, best):
            self._best_written = best["step"]

    def _collect(self, step: int | None) -> None:
        if step is not None:
            self.saved_step = step
            self._release(self._covered)
            self._intake.requeued.forget(self._drawn)

    def _release(self, count: int) -> None:
        if count:
            self._queue.release(self._intake.retained[:count])
            del self._intake.retained[:count]
            self._covered = max(0, self._covered - count)

    def _meta(self, step: int) -> Mapping[str, Any]:
        oldest = min_version(step, self._config.run.n_behind)
        return {
            "incarnation": self._intake.incarnation,
            "step": step,
            "ledger": self._intake.ledger.as_dict(),
            "open": [str(r) for r in self._intake.window.ids()],
            "requeued": self._intake.requeued.as_dict(),
            "next_step_to_issue": self._intake.window.next_step_to_issue,
            "history": {str(v): c for v, c in self._publisher.history().items() if v >= oldest},
        }


def _bytes(item: GroupHeader | DeadNotice) -> int:
    return ENTRY_BYTES + (item.body_bytes + len(item.raw) if isinstance(item, GroupHeader) else 0)
