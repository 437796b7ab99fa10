"""The optimizer with fp32 weights, and its state on disk as safetensors and JSON: nothing is unpickled."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nbehind.config import TrainerConfig
from trainer_svc.errors import CheckpointError

FORMAT = 1
SHARD_BYTES = 1 << 30
INDEX = "state.json"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Optimizer:
    """AdamW on fp32 weights. A model in bf16 gets fp32 copies to train, since updates of a usual size vanish in bf16 rounding, and its gradients are summed in fp32.

    Weight decay applies to matrices only, not to biases and norms.
    """

    def __init__(self, model: Any, config: TrainerConfig) -> None:
        self._params: dict[str, Any] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.weights: dict[str, Tensor] = {
            name: p if p.dtype == torch.float32 else p.detach().float() for name, p in self._params.items()
        }
        for name, param in self._params.items():
            if self.weights[name] is not param:
                param.register_post_accumulate_grad_hook(self._collect(self.weights[name]))
        matrices = [w for w in self.weights.values() if w.ndim >= 2]
        others = [w for w in self.weights.values() if w.ndim < 2]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )

    @staticmethod
    def _collect(weight: Tensor) -> Any:
        def move(param: Tensor) -> None:
            assert param.grad is not None
            weight.grad = param.grad.float() if weight.grad is None else weight.grad.add_(param.grad)
            param.grad = None

        return move

    def grad_norm(self) -> Tensor:
        return torch.nn.utils.get_total_norm([w.grad for w in self.weights.values() if w.grad is not None])

    def step(self, lr: float, max_norm: float, norm: Tensor) -> None:
        """Clip by the global norm and update. Weights without any gradient count as having one of zero."""
        if all(w.grad is None for w in self.weights.values()):
            for weight in self.weights.values():
                weight.grad = torch.zeros_like(weight)
        torch.nn.utils.clip_grads_with_norm_(self.weights.values(), max_norm, norm)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.zero_grad()
        self._publish()

    def zero_grad(self) -> None:
        for name, param in self._params.items():
            param.grad = self.weights[name].grad = None

    @torch.no_grad()
    def _publish(self) -> None:
        for name, param in self._params.items():
            if self.weights[name] is not param:
                param.copy_(self.weights[name])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(kind.name, tensor) of everything that decides the next update."""
        for name, weight in self.weights.items():
            yield f"weight.{name}", weight.detach()
            for moment, value in self._adamw.state.get(weight, {}).items():
                yield f"{moment}.{name}", value

    @torch.no_grad()
    def restore(self, stored: dict[str, Tensor]) -> None:
        """Inverse of `tensors`. Raises CheckpointError on weights that are missing, unknown or of another shape; nothing is changed then."""
        wanted = {f"weight.{name}": weight.shape for name, weight in self.weights.items()}
        found = {key: tensor.shape for key, tensor in stored.items() if key.startswith("weight.")}
        if wanted != found:
            odd = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
            raise CheckpointError(
                f"the checkpoint is of another model: {odd[0]!r} differs ({len(odd)} in all); set model.path and lora.* as before"
            )
        self._adamw.state.clear()
        for name, weight in self.weights.items():
            weight.copy_(stored[f"weight.{name}"])
            # copies: what safetensors returns may be a mapping of the file, which pruning deletes
            moments = {m: stored[key].clone().to(weight.device) for m in MOMENTS if (key := f"{m}.{name}") in stored}
            if moments:
                self._adamw.state[weight] = moments
        self.zero_grad()
        self._publish()


def write_state(folder: Path, tensors: Iterable[tuple[str, Tensor]], info: dict[str, Any]) -> None:
    """Tensors in shards of about 1 GiB, then the index with `info`. OSError when the disk refuses."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[str] = []
    shard: dict[str, Tensor] = {}

    def flush() -> None:
        files.append(f"state-{len(files):05d}.safetensors")
        with disk_errors(folder):
            save_file(shard, folder / files[-1])
        shard.clear()

    for name, tensor in tensors:
        shard[name] = tensor.detach().contiguous()
        if sum(t.nbytes for t in shard.values()) >= SHARD_BYTES:
            flush()
    flush()
    (folder / INDEX).write_text(json.dumps({"format": FORMAT, "files": files, "info": info}))


def read_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, info) of write_state. Raises CheckpointError when something is missing, damaged or of another format."""
    try:
        index = json.loads((folder / INDEX).read_text())
        if index["format"] != FORMAT:
            raise CheckpointError(f"{folder} has state format {index['format']}, this version reads {FORMAT}")
        tensors: dict[str, Tensor] = {}
        for file in index["files"]:
            with safe_open(folder / Path(file).name, framework="pt") as opened:
                tensors.update((key, opened.get_tensor(key)) for key in opened.keys())  # noqa: SIM118 (not a dict)
        return tensors, dict(index["info"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read the training state in {folder}: {error}; use an older checkpoint"
        ) from error


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """safetensors reports a full disk as an error of its own: make it the OSError that it is."""
    try:
        yield
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        number = int(found.group(1)) if found else errno.EIO
        raise OSError(number, os.strerror(number) if found else str(error), str(path)) from error
