"""The clipped policy-gradient loss over the flat completion tokens of a micro-batch. Pure functions.

M = completion tokens of all sequences of the micro-batch together, n = its sequences. Every token carries its final
weight in the minibatch's average, so the loss of a minibatch is the sum over its micro-batches, however it was cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Normalisation = Literal["token", "sample"]

# exp of more would swamp the batch in fp32; beyond it a token is clipped or broken and gives no gradient
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Sums over the M tokens, detached: divide by the minibatch's tokens to get means."""

    clipped: Tensor  # tokens whose gradient the clip cut off
    ratio: Tensor
    ratio_max_dev: Tensor  # max |ratio − 1|, not a sum
    kl_reference: Tensor  # k3, 0 without reference
    kl_sampler: Tensor  # k3 of KL(policy that sampled ‖ trained policy)
    neg_logprob: Tensor  # −Σ log π of the sampled tokens


def token_weights(lengths_n: Tensor, kind: Normalisation, denominator: int) -> Tensor:
    """[M] float32 weight of each token in the average.

    - token: 1 / denominator, the denominator being the tokens of the whole *minibatch* (DAPO, arXiv:2503.14476, eq. 8).
    - sample: 1 / (denominator · tokens of its sample), the denominator being the samples of the minibatch
      (GRPO, arXiv:2402.03300, eq. 3, over all groups).
    """
    if denominator < 1:
        raise ValueError(f"denominator must be at least 1, got {denominator}")
    if kind == "token":
        return torch.full((int(lengths_n.sum()),), 1.0 / denominator, device=lengths_n.device)
    if kind == "sample":
        return (1.0 / (denominator * lengths_n.double())).float().repeat_interleave(lengths_n)
    raise ValueError(f"unknown loss {kind!r}; use token or sample")


def k3(log_ratio: Tensor) -> Tensor:
    """Schulman's unbiased, never negative KL(π ‖ q) estimate of samples of π: exp(d) − 1 − d with d = log q − log π.

    http://joschu.net/blog/kl-approx.html
    """
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(bounded) - bounded


def policy_loss(
    logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    weights_M: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    reference_M: Tensor | None = None,
    beta: float = 0.0,
) -> tuple[Tensor, TokenTerms]:
    """Σ weight · (−min(ratio · A, clip(ratio, 1 − clip_low, 1 + clip_high) · A) + beta · k3), and its terms.

    Clipped surrogate of PPO with separate bounds (DAPO, arXiv:2503.14476, eq. 8); KL as in eq. 4 of arXiv:2402.03300.
    The ratio is computed in fp32 (fp64 for fp64 input); log ratios are held within ±20. Gradient flows through `logprobs_M` only.
    """
    if logprobs_M.dtype != torch.float64:
        logprobs_M = logprobs_M.float()
    log_ratio = logprobs_M - old_logprobs_M
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    per_token = -torch.minimum(ratio * advantages_M, clipped_ratio * advantages_M)
    kl = torch.zeros((), device=logprobs_M.device)
    if reference_M is not None:
        kl_M = k3(reference_M - logprobs_M)
        per_token = per_token + beta * kl_M
        kl = kl_M.detach().sum()
    loss = (per_token * weights_M).sum()
    with torch.no_grad():
        cut = ((advantages_M > 0) & (ratio > 1 + clip_high)) | ((advantages_M < 0) & (ratio < 1 - clip_low))
        terms = TokenTerms(
            clipped=cut.sum(),
            ratio=ratio.sum(),
            ratio_max_dev=(ratio - 1).abs().max() if len(ratio) else torch.zeros((), device=ratio.device),
            kl_reference=kl,
            kl_sampler=k3(log_ratio).sum(),
            neg_logprob=-logprobs_M.sum(),
        )
    return loss, terms
