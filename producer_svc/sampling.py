"""Drawing tokens from logits, and the logprobs of the distribution drawn from. B = rows, V = vocabulary."""

from __future__ import annotations

import torch

from producer_svc.generation import sample_seed
from rollout_queue.messages import Request, Sampling


def sampled_logprobs(logits_BV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[B, V] log-probabilities after temperature, then top-k, then top-p of what top-k left; -inf for what is cut off.

    Order and ties as in vLLM: all logits equal to the k-th stay; top-p keeps the smallest set whose mass reaches p.
    """
    scaled_BV = logits_BV.float() / sampling.temperature
    if 0 < sampling.top_k < scaled_BV.shape[-1]:
        kth_B1 = scaled_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        scaled_BV = scaled_BV.masked_fill(scaled_BV < kth_B1, float("-inf"))
    if sampling.top_p < 1:
        sorted_BV, order_BV = scaled_BV.sort(dim=-1)
        cut_BV = sorted_BV.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        cut_BV[:, -1] = False
        scaled_BV = scaled_BV.masked_fill(cut_BV.scatter(1, order_BV, cut_BV), float("-inf"))
    return scaled_BV.log_softmax(-1)


def uniforms(request: Request, length: int) -> torch.Tensor:
    """[N, length] in [0, 1): the random numbers of the request's samples, whatever they are batched with."""
    rows = []
    for sample in range(request.sampling.num_generations):
        generator = torch.Generator().manual_seed(sample_seed(request.seed, sample))
        rows.append(torch.rand(length, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


def draw(logprobs_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """[B] token ids by inversion of the distribution function; a token of probability 0 is never drawn."""
    mass_BV = logprobs_BV.double().exp().cumsum(-1)
    target_B1 = (uniforms_B.to(mass_BV) * mass_BV[:, -1])[:, None]
    return torch.searchsorted(mass_BV, target_B1, right=True)[:, 0].clamp_(max=mass_BV.shape[-1] - 1)
