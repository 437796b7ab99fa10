"""How adapters travel (LoRA, arXiv:2106.09685): two tensors a layer, whose product is added to the layer's own weight."""

from __future__ import annotations

import torch

DOWN, UP = ".lora_A.weight", ".lora_B.weight"  # [rank, in] and [out, rank] of a layer whose weight is [out, in]


def merged(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float) -> torch.Tensor:
    """The layer's whole weight, W0 + scale · B A, float32 [out, in]."""
    return torch.addmm(weight.float(), up.float(), down.float(), alpha=scale)
