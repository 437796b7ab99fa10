"""The trainer: one process that owns the data order, the policy and the truth about every open request.

    claim ─▶ data ─▶ engine ─▶ publish 0 (or the checkpoint's version) ─▶ issue the window
      ┌──────────────────────────────────────────────────────────────────────┘
      ▼
    wait for the batch of step s ─▶ advantages ─▶ engine.train_step ─▶ publish s+1 ─▶ issue ─▶ checkpoint ─▶ release
      ▲                                                                                            │
      └────────────────────────────────────────── s := s + 1 ◀────────────────────────────────────┘
    end: last checkpoint, final model, summary, declare the run ended

consumes: rollout headers and bodies.  produces: requests, weight versions, checkpoints.
waits for: deliveries only (intake.py); publishing and heartbeats run in threads of their own.
ends: at the last step, on SIGTERM (drained, checkpoint saved), on Stalled, Fenced or any error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nbehind.config import Config
from nbehind.stopping import StopFlag
from nbehind.tokenizer import Tokenizer
from rollout_queue.messages import RequestId
from rollout_queue.queue import TrainerQueue
from rollout_queue.staleness import min_version, must_publish
from trainer_svc.batch import make_batch
from trainer_svc.durability import Durability
from trainer_svc.engine import Engine
from trainer_svc.errors import TrainerError
from trainer_svc.heartbeat import Heartbeat
from trainer_svc.intake import Intake, Taken
from trainer_svc.ledger import Ledger
from trainer_svc.phases import PhaseClock
from trainer_svc.recorder import Recorder
from trainer_svc.rows import rollout_row, step_row
from trainer_svc.telemetry import Telemetry
from weight_sync.publisher import Publisher

log = logging.getLogger(__name__)

FINAL_MODEL = "final"


class TrainerService:
    """The step loop over its collaborators; see the picture above."""

    def __init__(
        self,
        config: Config,
        queue: TrainerQueue,
        publisher: Publisher,
        engine: Engine,
        intake: Intake,
        durability: Durability,
        recorder: Recorder,
        telemetry: Telemetry,
        tokenizer: Tokenizer,
        total_steps: int,
        stop: StopFlag,
        heartbeat: Heartbeat,
    ) -> None:
        self._config = config
        self._queue = queue
        self._publisher = publisher
        self._engine = engine
        self._intake = intake
        self._durability = durability
        self._recorder = recorder
        self._telemetry = telemetry
        self._tokenizer = tokenizer
        self._total_steps = total_steps
        self._stop = stop
        self._heartbeat = heartbeat
        self.step = 0
        self.published = -1
        self._clock = PhaseClock()

    # --- the flow
    def run(self, restored: Mapping[str, Any] | None) -> str:
        """Train until the end; returns the exit reason ("done" or "interrupted")."""
        if restored is not None:
            self._restore(restored)
        self._publish()
        if restored is not None:
            self._intake.reissue_restored(self.published)
        self._intake.issue_up_to(self.published)
        log.info("training begins at step %d of %d", self.step, self._total_steps)
        while self.step < self._total_steps:
            if not self._one_step():
                return self._end("interrupted")
        return self._end("done")

    def _one_step(self) -> bool:
        """Train one step; False when the run is to stop."""
        self._clock.restart()
        with self._clock.phase("wait"):
            taken = self._intake.wait_for_batch(self.step, self._stopping, self._on_stall)
        if taken is None:
            return False
        overlapped = self._recorder.overlapped([t.group for t in taken])
        stats = self._train(taken)
        self.step += 1
        with self._clock.phase("publish"):
            more = self.step < self._total_steps
            if more and must_publish(
                self.step - 1, self.published, self._config.run.n_behind, self._config.run.publish_every
            ):
                self._publish()
                self._intake.issue_up_to(self.published)
            self._evaluate_if_due()
        with self._clock.phase("checkpoint"):
            self._durability.after_step(self.step)
        self._record(taken, stats, overlapped)
        return True

    def _stopping(self) -> bool:
        self._publisher.check()
        self._heartbeat.check()
        self._durability.relieve()
        return self._stop()

    def _on_stall(self, waited_s: float) -> None:
        self._telemetry.stalled(waited_s, self._intake.who_waits(self.step))

    def _train(self, taken: Sequence[Taken]) -> Mapping[str, float]:
        self._heartbeat.check()
        batch = make_batch(self.step, taken, self._config)
        start = time.time()
        with self._clock.phase("train"):
            stats = self._engine.train_step(batch)
        self._heartbeat.beat()  # a trainer that was stopped meanwhile must leave no trace of this step
        self._recorder.trained(start, time.time())
        self._recorder.account(self.step, taken, self._engine.named_weights)
        return stats

    def _publish(self) -> None:
        """Hand the weights of version `step` over, then let every service know that they are out."""
        self._publisher.publish(self.step, self._engine.named_weights())
        self.published = self.step
        self._queue.announce(self.published)
        self._publisher.prune(below=min_version(self.step, self._config.run.n_behind))

    def _restore(self, meta: Mapping[str, Any]) -> None:
        self.step = self._durability.saved_step = int(meta["step"])
        self._intake.ledger = Ledger.from_dict(meta["ledger"])
        self._intake.window.restore((RequestId.parse(r) for r in meta["open"]), int(meta["next_step_to_issue"]))
        self._intake.requeued.restore(meta.get("requeued", {}))
        self._publisher.seed_history({int(v): str(c) for v, c in meta["history"].items()})

    def _evaluate_if_due(self) -> None:
        evaluation = self._intake.evaluation
        if evaluation is not None and evaluation.due(self.step):
            if self.published < self.step:
                self._publish()
            self._intake.evaluate(self.step)

    # --- what is left to read
    def _record(self, taken: Sequence[Taken], stats: Mapping[str, float], overlapped: bool) -> None:
        row = step_row(self.step - 1, self.published, taken, stats, overlapped, self._clock.seconds(), self._intake)
        row["producers"] = len(self._publisher.members())
        self._recorder.step(row)
        self._recorder.rollouts(self._sampled(taken))
        self._telemetry.step(row)

    def _sampled(self, taken: Sequence[Taken]) -> list[dict[str, Any]]:
        return [rollout_row(self.step - 1, t, self._tokenizer) for t in taken[: self._config.metrics.rollouts_per_step]]

    def _end(self, reason: str) -> str:
        """Last checkpoint and final model, conservation, summary; only "done" tells the producers to leave."""
        self._heartbeat.check()
        if reason == "done":
            self._intake.finish_evaluations(self._stopping, self._config.producer.request_timeout_s)
        self._durability.finish(self.step)
        self._engine.save_model(self._config.run_dir / FINAL_MODEL)
        self._intake.ledger.check(len(self._intake.window))
        log.info("%s after %d steps: %s", reason, self.step, self._intake.ledger.line())
        if reason == "done":
            if self._intake.ledger.open:
                raise TrainerError(f"the run ended with open requests: {self._intake.ledger.line()}")
            self._queue.finish(reason)
        return reason
