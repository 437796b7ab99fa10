"""Starts the trainer: connects, claims the run, loads data and engine, opens the weight channel, trains."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from nbehind.config import Config
from nbehind.hello import hello
from nbehind.models import prepare_model
from nbehind.services import open_queue, sync_settings
from nbehind.stopping import EXIT_INTERRUPTED, StopFlag
from nbehind.tokenizer import Tokenizer, load_tokenizer
from rollout_queue.errors import Fenced
from rollout_queue.metrics import serve
from trainer_svc import checkpoint
from trainer_svc.data import Item, load_items
from trainer_svc.durability import Durability
from trainer_svc.engine import Engine
from trainer_svc.errors import DataError
from trainer_svc.evaluation import Evaluation
from trainer_svc.heartbeat import Heartbeat
from trainer_svc.intake import Intake
from trainer_svc.jsonl import write_text_atomic
from trainer_svc.order import DataOrder
from trainer_svc.recorder import Recorder
from trainer_svc.saver import Saver
from trainer_svc.service import TrainerService
from trainer_svc.step_ledger import StepLedger
from trainer_svc.telemetry import Telemetry
from weight_sync.publisher import Publisher

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
INCARNATION = "incarnation.json"
PORT = "trainer.port"  # of /metrics and /healthz


def make_engine(config: Config, folder: Path, total_updates: int) -> Engine:
    """The engine that the config names; only its own heavy imports happen."""
    if config.trainer.engine == "fake":
        from trainer_svc.fake_engine import FakeEngine

        return FakeEngine(config.run.seed, config.trainer.lr, config.trainer.fake_step_s)
    from trainer_svc.torch_engine import TorchEngine

    return TorchEngine(folder, config, total_updates)


def make_order(config: Config, num_items: int) -> DataOrder:
    order = DataOrder(
        num_items=num_items,
        groups_per_step=config.sampling.groups_per_step,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        epochs=config.data.epochs,
        max_steps=config.run.max_steps,
    )
    if not order.total_steps():
        raise DataError("the run has no steps: set run.max_steps or data.epochs above 0")
    return order


def load_eval_items(config: Config, tokenizer: Tokenizer) -> list[Item]:
    """Held-out items; a procedural source is drawn with the next seed."""
    if not config.eval.every_steps:
        return []
    seed = config.data.seed if config.eval.source else config.data.seed + 1
    source = config.eval.source or config.data.source
    data = config.data.model_copy(update={"source": source, "seed": seed, "size": config.eval.size})
    return load_items(data, tokenizer, config.model.max_context - config.sampling.max_new_tokens)[: config.eval.size]


def last_incarnation(run_dir: Path) -> int:
    """The newest incarnation that the run folder knows, 0 without one."""
    path = run_dir / INCARNATION
    return int(json.loads(path.read_text())["incarnation"]) if path.exists() else 0


class Trainer:
    """Everything one life of the trainer holds open."""

    def __init__(self, config: Config, redis_url: str, resume: bool, stop: StopFlag) -> None:
        self._config = config
        self._stop = stop
        self.folder = prepare_model(config.model.path)
        self.tokenizer: Tokenizer = load_tokenizer(config.model.path, self.folder)
        self.items = load_items(config.data, self.tokenizer, config.model.max_context - config.sampling.max_new_tokens)
        self.eval_items = load_eval_items(config, self.tokenizer)
        self.order = make_order(config, len(self.items))
        self.restored = checkpoint.newest(config.run_dir / CHECKPOINTS) if resume else None
        if resume and self.restored is None:
            log.warning("no complete checkpoint in %s: training begins at step 0", config.run_dir / CHECKPOINTS)
        self.client, self.keys, self.queue = open_queue(config, redis_url)
        self.telemetry = Telemetry()
        self.web = serve(
            self.telemetry.registry, config.metrics.host, config.metrics.trainer_port, self.telemetry.health
        )
        log.info("metrics on port %d", self.web.port)
        self.incarnation = self.queue.claim(last_incarnation(config.run_dir) + 1)
        self.telemetry.claimed(self.incarnation)
        config.run_dir.mkdir(parents=True, exist_ok=True)
        write_text_atomic(config.run_dir / PORT, f"{self.web.port}\n")
        write_text_atomic(config.run_dir / INCARNATION, json.dumps({"incarnation": self.incarnation}))
        self.heartbeat = Heartbeat(self.queue)
        self.publisher = Publisher(
            self.client, self.keys, self.incarnation, hello(config, self.tokenizer, self.folder), sync_settings(config)
        )
        self.engine = make_engine(config, self.folder, self.order.total_steps() * config.trainer.updates_per_step)

    def train(self) -> str:
        """Until the end; returns the exit reason."""
        config, meta = self._config, None
        self.heartbeat.start()
        start = time.monotonic()
        self.engine.setup()
        if self.restored is not None:
            path, meta = self.restored
            self.engine.load_state(path)
            log.info("resumed from %s", path)
        log.info("engine ready after %.1f s", time.monotonic() - start)
        self.publisher.start()
        intake = Intake(config, self.queue, self.publisher, self.items, self.order, self.tokenizer.eos_ids)
        intake.incarnation = self.incarnation
        if config.eval.every_steps:
            intake.evaluation = Evaluation(config, self.queue, self.eval_items, self.order, intake.sampling)
            intake.evaluation.restore(int(meta["step"]) if meta else 0)
        begins_at, parent = (int(meta["step"]), int(meta["incarnation"])) if meta else (0, 0)
        recorder = Recorder(
            config.run_dir,
            int(config.metrics.rollouts_max_mb * 2**20),
            begins_at,
            StepLedger(config.run_dir, self.incarnation, parent, begins_at) if config.metrics.step_ledger else None,
        )
        saver = Saver(config.run_dir / CHECKPOINTS, config.checkpoint.keep, self._guard)
        durability = Durability(config, self.queue, self.engine, intake, self.publisher, saver, self.heartbeat.check)
        service = TrainerService(
            config,
            self.queue,
            self.publisher,
            self.engine,
            intake,
            durability,
            recorder,
            self.telemetry,
            self.tokenizer,
            self.order.total_steps(),
            self._stop,
            self.heartbeat,
        )
        reason = "error"
        try:
            reason = service.run(meta)
        except Exception as error:
            reason = f"error: {error}"
            raise
        finally:
            durability.close()
            recorder.summary(config.run.name, reason, self._extra(intake))
        return reason

    def _guard(self) -> None:
        """Raise when a newer trainer owns the run: by Redis, or by the run folder where Redis is gone."""
        self.heartbeat.beat()
        newest = last_incarnation(self._config.run_dir)
        if newest > self.incarnation:
            raise Fenced(f"incarnation {newest} owns the run folder {self._config.run_dir}; this is {self.incarnation}")

    def _extra(self, intake: Intake) -> dict[str, Any]:
        return {
            "incarnation": self.incarnation,
            "reissued": intake.reissued,
            "refused": intake.refused,
            "n_behind": self._config.run.n_behind,
            "order": self._config.run.order,
            **({"eval": intake.evaluation.results, "eval_best": intake.evaluation.best} if intake.evaluation else {}),
            **intake.ledger.as_dict(),
        }

    def close(self) -> None:
        self.publisher.close(timeout_s=5.0)
        self.heartbeat.close()
        self.engine.close()
        self.web.close()
        self.client.close()


def main(config: Config, redis_url: str, resume: bool = False) -> int:
    """Run the trainer; returns the exit code. Errors reach the caller (nbehind/errors.py gives codes)."""
    stop = StopFlag()
    stop.install()
    trainer = Trainer(config, redis_url, resume, stop)
    try:
        reason = trainer.train()
    finally:
        trainer.close()
    return 0 if reason == "done" else EXIT_INTERRUPTED
