"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): a layer computes with W0 + (alpha / rank) · B A, and W0 is frozen.

model ─▶ Adapters: its layers get A and B ─┬─▶ named: what is trained, sent and checkpointed
                                           └─▶ merged: whole weights, for models that are saved
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nbehind.config import LoraConfig
from trainer_svc.errors import TrainerError
from trainer_svc.torch_model import named_weights
from trainer_svc.torch_state import disk_errors
from weight_sync.adapters import DOWN, UP, merged

ADAPTER = "default"  # PEFT's name for the only one
BASE = ".base_layer."  # PEFT puts the layer that it wraps there
PREFIX = "base_model.model."  # of the names in an adapter file


class Adapters:
    """The adapters of a model, which computes with them from now on. TrainerError when no layer can have one."""

    def __init__(self, model: Any, config: LoraConfig, source: str) -> None:
        """`source` is named in the files as the model that the adapters belong to."""
        from peft import LoraConfig as PeftLora
        from peft import inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        head = model.get_output_embeddings()
        linear = {
            n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head
        }
        unknown = [name for name in config.target_modules if name not in linear]
        if unknown or not linear:
            raise TrainerError(
                f"lora.target_modules = {list(config.target_modules)}: {unknown[0] if unknown else type(model).__name__} has no "
                f"linear layer that could get an adapter (the output head cannot); choose from {', '.join(sorted(linear))}"
            )
        self._peft = PeftLora(
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=0.0,
            target_modules=list(config.target_modules) or sorted(linear),
            task_type="CAUSAL_LM",
            base_model_name_or_path=source,
        )
        inject_adapter_in_model(self._peft, model, ADAPTER)
        self._model = model
        self._scale = config.scale
        self._layers: dict[str, Any] = {n: m for n, m in model.named_modules() if isinstance(m, LoraLayer)}

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor), for a layer of shape [out, in]: `<layer>.lora_A.weight` [rank, in] and `<layer>.lora_B.weight` [out, rank]."""
        for name, layer in self._layers.items():
            yield name + DOWN, layer.lora_A[ADAPTER].weight.detach()
            yield name + UP, layer.lora_B[ADAPTER].weight.detach()

    @staticmethod
    def name_of(parameter: str) -> str:
        """The name in named() of a parameter of the model."""
        return parameter.replace(f".{ADAPTER}.", ".")

    @torch.no_grad()
    def merged(self, trained: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, tensor) of the whole model, as if it had been trained without adapters: W0 + scale · B A in W0's dtype.

        `trained` holds the tensors of named().
        """
        for name, tensor in named_weights(self._model):
            if ".lora_" in name:
                continue
            layer = name.removesuffix(".weight").removesuffix(".base_layer")
            if layer + DOWN in trained:
                down, up = (trained[layer + end].to(tensor.device) for end in (DOWN, UP))
                tensor = merged(tensor, down, up, self._scale).to(tensor.dtype)
            yield name.replace(BASE, "."), tensor

    def write(self, folder: Path, trained: Mapping[str, Tensor]) -> None:
        """In PEFT's format, for PeftModel.from_pretrained. OSError when the disk refuses."""
        folder.mkdir(parents=True, exist_ok=True)
        self._peft.save_pretrained(str(folder))
        tensors = {PREFIX + name: tensor.cpu().contiguous() for name, tensor in trained.items()}
        with disk_errors(folder):
            save_file(tensors, folder / "adapter_model.safetensors")
