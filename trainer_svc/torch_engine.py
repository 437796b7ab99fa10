"""The training engine on plain torch: one process, one device.

One update: minibatch ─▶ micro-batches ─▶ hidden states ─▶ logprobs in chunks ─▶ loss ─▶ backward (sums) ─▶ clip ─▶ AdamW
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nbehind.config import Config
from nbehind.hello import adapters as adapters_identity
from trainer_svc.adapters import Adapters
from trainer_svc.engine import TrainBatch, TrainSequence
from trainer_svc.errors import CheckpointError, TrainerError, TrainingError
from trainer_svc.logprobs import Filter, Head, token_logprobs
from trainer_svc.loss import TokenTerms, policy_loss, token_weights
from trainer_svc.microbatch import plan_micro_batches, split_groups
from trainer_svc.schedule import learning_rate
from trainer_svc.torch_batch import StepStats, Tokens, check_batch
from trainer_svc.torch_model import check_head, head_of, hidden_states, load_model, named_weights, write_model
from trainer_svc.torch_state import Optimizer, read_state, write_state

log = logging.getLogger(__name__)

RATIO_TOLERANCE = 1e-3  # fp32, on policy: what sampler and trainer may differ by


class TorchEngine:
    """Implements trainer_svc.engine.Engine. `total_updates` is the length of the learning rate schedule."""

    def __init__(self, model_folder: Path, config: Config, total_updates: int) -> None:
        self._folder, self._config, self._total = model_folder, config, total_updates
        self.updates = 0
        sampling = config.sampling
        self._filter = Filter(sampling.temperature, sampling.top_p, sampling.top_k)
        self._model: Any = None
        self._reference: Any = None
        self._adapters: Adapters | None = None
        self._added_to = "none"
        self._optimizer: Optimizer | None = None
        self._told = False

    def setup(self) -> None:
        trainer, started = self._config.trainer, time.monotonic()
        torch.set_num_threads(trainer.threads)
        torch.manual_seed(self._config.run.seed)
        device = _device(trainer.device)
        dtype = torch.float32 if trainer.dtype == "float32" else torch.bfloat16
        self._model = load_model(self._folder, dtype, device, trainer.gradient_checkpointing)
        check_head(self._model)
        log.info("model %s loaded in %.1f s", self._folder.name, time.monotonic() - started)
        if self._config.algo.beta > 0:  # from the folder, never from a checkpoint: a resumed run keeps its reference
            self._reference = copy.deepcopy(self._model).requires_grad_(False)
        if self._config.lora.rank:
            self._adapters = Adapters(self._model, self._config.lora, self._config.model.path)
            self._added_to = adapters_identity(self._config.lora, self._folder)
        self._optimizer = Optimizer(self._model, trainer)
        count = sum(w.numel() for w in self._optimizer.weights.values())
        log.info(
            "engine ready in %.1f s: %s, %.3g M trained parameters, %s on %s, %d threads%s",
            time.monotonic() - started, type(self._model).__name__, count / 1e6, trainer.dtype, device, trainer.threads,
            ", with reference" if self._reference is not None else "",
        )  # fmt: skip

    def train_step(self, batch: TrainBatch) -> Mapping[str, float]:
        sequences = check_batch(batch, self._model.get_input_embeddings().weight.shape[0])
        try:
            minibatches = split_groups(batch.num_groups, self._config.trainer.updates_per_step)
        except ValueError as error:
            raise TrainingError(f"step {batch.step}: {error}") from error
        stats = StepStats()
        for groups in minibatches:
            self._update(batch.step, [s for s in sequences if s.group in groups], stats)
        if batch.on_policy:
            self._compare_with_sampler(batch.step, stats.ratio_max_dev_first)
        return stats.summary()

    def _compare_with_sampler(self, step: int, deviation: float) -> None:
        exact = self._config.model.dtype == self._config.trainer.dtype == "float32"
        if exact and deviation > RATIO_TOLERANCE and not self._told:
            self._told = True
            log.warning(
                "step %d is on policy, but the importance ratio is off by %.2g: sampler and trainer disagree; compare "
                "their weights, temperature, top_p and top_k (said once)",
                step,
                deviation,
            )

    def _update(self, step: int, sequences: list[TrainSequence], stats: StepStats) -> None:
        """One optimizer update, or TrainingError and weights as before."""
        assert self._optimizer is not None
        config = self._config.trainer
        where = f"step {step}, update {stats.updates}"
        try:
            loss = self._accumulate(where, sequences, stats)
            norm = self._optimizer.grad_norm()
            if not math.isfinite(float(norm)):
                raise TrainingError(
                    f"{where}: the gradient is not finite ({self._blame(sequences)}); lower trainer.lr or check the rewards"
                )
        except torch.OutOfMemoryError as error:
            self._optimizer.zero_grad()
            raise TrainingError(
                f"{where}: out of memory; lower trainer.tokens_per_micro_batch or trainer.logprob_chunk"
            ) from error
        except TrainingError:
            self._optimizer.zero_grad()
            raise
        stats.lr = learning_rate(
            self.updates,
            self._total,
            peak=config.lr,
            warmup=config.warmup_steps,
            kind=config.schedule,
            min_ratio=config.min_lr_ratio,
        )
        self._optimizer.step(stats.lr, config.max_grad_norm, norm)
        self.updates += 1
        stats.updates += 1
        stats.loss += loss
        stats.grad_norm += float(norm)

    def _accumulate(self, where: str, sequences: list[TrainSequence], stats: StepStats) -> float:
        """Sum the gradients of all micro-batches; returns the minibatch's loss."""
        tokens = sum(len(s.logprobs) for s in sequences)
        if tokens == 0:
            raise TrainingError(f"{where}: no completion tokens to train on; check the producers' completions")
        denominator = tokens if self._config.algo.loss == "token" else len(sequences)
        total = 0.0
        for number, (members, trained) in enumerate(self._plan(sequences, stats)):
            micro = Tokens.of(members, self._model.device)
            with torch.set_grad_enabled(trained):
                loss, terms = self._loss(micro, denominator)
            value = float(loss.detach())
            if not math.isfinite(value):
                raise TrainingError(
                    f"{where}, micro-batch {number}: the loss is {value}; lower trainer.lr or check the logprobs"
                )
            if trained:
                torch.autograd.backward(loss)
            stats.add(terms)
            total += value
        stats.tokens += tokens
        return total

    def _plan(self, sequences: list[TrainSequence], stats: StepStats) -> Iterator[tuple[list[TrainSequence], bool]]:
        """(sequences, needs a gradient) of each micro-batch. Zero advantages without a KL term have a gradient of zero: a forward pass for the statistics is enough."""
        silent = [self._config.algo.beta == 0 and not s.advantages.any() for s in sequences]
        for trained in (True, False):
            some = [s for s, quiet in zip(sequences, silent, strict=True) if quiet != trained]
            plan = plan_micro_batches([len(s.token_ids) - 1 for s in some], self._config.trainer.tokens_per_micro_batch)
            stats.input_tokens += plan.tokens
            stats.padded_tokens += plan.padded_tokens
            yield from (([some[i] for i in indices], trained) for indices in plan.batches)

    def _loss(self, micro: Tokens, denominator: int) -> tuple[Tensor, TokenTerms]:
        algo = self._config.algo
        logprobs = self._logprobs(self._model, micro)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = self._logprobs(self._reference, micro)
        weights = token_weights(micro.lengths_n, algo.loss, denominator)
        return policy_loss(
            logprobs, micro.old_logprobs_M, micro.advantages_M, weights,
            clip_low=algo.clip_low, clip_high=algo.clip_high, reference_M=reference, beta=algo.beta,
        )  # fmt: skip

    def _logprobs(self, model: Any, micro: Tokens) -> Tensor:
        hidden = hidden_states(model, micro.ids_nL).flatten(0, 1)[micro.rows_M]
        head: Head = head_of(model)
        return token_logprobs(hidden, head, micro.targets_M, self._filter, self._config.trainer.logprob_chunk)

    def _blame(self, sequences: list[TrainSequence]) -> str:
        """Which micro-batch has a gradient that is not finite: computed again, one by one."""
        assert self._optimizer is not None
        for number, (members, trained) in enumerate(self._plan(sequences, StepStats())):
            if trained:
                self._optimizer.zero_grad()
                torch.autograd.backward(self._loss(Tokens.of(members, self._model.device), 1)[0])
                if not math.isfinite(float(self._optimizer.grad_norm())):
                    return f"micro-batch {number}"
        return "the sum of micro-batches that are each finite"

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self._model) if self._adapters is None else self._adapters.named()

    def save_model(self, folder: Path) -> None:
        self._write_model(folder, dict(self.named_weights()))

    def _write_model(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """The model with `weights`, those of named_weights(); adapters are merged into it and lie beside it, in `adapter/`."""
        adapters = self._adapters
        write_model(self._model, self._folder, folder, weights if adapters is None else dict(adapters.merged(weights)))
        if adapters is not None:
            adapters.write(folder / "adapter", weights)

    def snapshot(self) -> Callable[[Path], None]:
        assert self._optimizer is not None
        info = {"updates": self.updates, "adapters": self._added_to}
        copies = {n: t.detach().to("cpu", copy=True) for n, t in [*self._optimizer.tensors(), *_rng_tensors()]}
        masters = {Adapters.name_of(n): copies[f"weight.{n}"] for n in self._optimizer.weights}
        weights = {
            n: masters[n].to(t.dtype) if n in masters else t.detach().to("cpu", copy=True)
            for n, t in self.named_weights()
        }

        def write(folder: Path) -> None:
            write_state(folder, copies.items(), info)
            self._write_model(folder / "model", weights)

        return write

    def load_state(self, folder: Path) -> None:
        assert self._optimizer is not None
        tensors, info = read_state(folder)
        if "rng.cpu" not in tensors or not isinstance(info.get("updates"), int):
            raise CheckpointError(f"the training state in {folder} is not whole; use an older checkpoint")
        if info.get("adapters", self._added_to) != self._added_to:
            raise CheckpointError(
                f"the checkpoint's adapters have {info['adapters']}, the config's {self._added_to}; set model.path and lora.* as before"
            )
        self._optimizer.restore(tensors)
        self.updates = info["updates"]
        torch.set_rng_state(tensors["rng.cpu"])
        if "rng.cuda" in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["rng.cuda"])

    def close(self) -> None:
        self._model = self._reference = self._optimizer = self._adapters = None


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise TrainerError("trainer.device = 'cuda', but torch finds no CUDA device; set it to 'auto' or 'cpu'")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _rng_tensors() -> Iterator[tuple[str, Tensor]]:
    yield "rng.cpu", torch.get_rng_state()
    if torch.cuda.is_available():
        yield "rng.cuda", torch.cuda.get_rng_state()
