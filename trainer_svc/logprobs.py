"""Log-probabilities of given tokens without the logits of the batch.

M = tokens, H = hidden size, V = vocabulary. Logits exist for one chunk of tokens at a time, in the forward and again
in the backward pass, which computes their gradient in closed form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Head:
    """How a model turns hidden states into logits: softcap(scale · (h Wᵀ + b))."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float = 0.0  # 0 = none, else cap · tanh(logits / cap), as in Gemma

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """[C, V] logits, computed in the model's dtype and returned in fp32 (fp64 stays)."""
        out = torch.nn.functional.linear(hidden_CH, self.weight_VH, self.bias_V)
        out = out if out.dtype == torch.float64 else out.float()
        if self.scale != 1.0:
            out = out.mul_(self.scale)
        if self.softcap:
            out = out.div_(self.softcap).tanh_().mul_(self.softcap)
        return out


@dataclass(frozen=True, slots=True)
class Filter:
    """The distribution that was sampled: softmax(logits / temperature), cut to top_k, then to top_p, renormalised.

    Order and ties as in vLLM: top-k keeps everything equal to the k-th logit; top-p keeps the smallest set of most
    likely tokens whose probability (after top-k) reaches top_p. The token in question always counts as kept: under
    the weights that sampled it, it was; under newer weights that would cut it, its logprob stays finite and keeps a gradient.
    """

    temperature: float = 1.0
    top_p: float = 1.0  # 1 = off
    top_k: int = 0  # 0 = off

    @property
    def cuts(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0

    def threshold(self, scaled_CV: Tensor) -> Tensor:
        """[C, 1] the least logit that is kept."""
        vocabulary = scaled_CV.shape[-1]
        top_k = min(self.top_k or vocabulary, vocabulary)
        if self.top_p >= 1.0:
            return scaled_CV.topk(top_k, dim=-1).values[:, -1:]
        ordered = scaled_CV.sort(dim=-1, descending=True).values
        kth = ordered[:, top_k - 1 : top_k]
        probs = ordered.masked_fill(ordered < kth, -torch.inf).softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs  # probability of all that is more likely
        kept = (before < self.top_p) & (ordered >= kth)
        kept[:, 0] = True
        return ordered.masked_fill(~kept, torch.inf).amin(dim=-1, keepdim=True)


def token_logprobs(hidden_MH: Tensor, head: Head, targets_M: Tensor, filter_: Filter, chunk: int) -> Tensor:
    """[M] fp32 log-probability of `targets_M` under the sampled distribution; gradient to hidden states, weight and bias.

    At most `chunk` rows of logits exist at a time. Equal to log_softmax of the full logits up to rounding.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    function: Any = _TokenLogprobs
    result: Tensor = function.apply(hidden_MH, head.weight_VH, head.bias_V, head, targets_M, filter_, chunk)
    return result


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _scaled(head: Head, hidden_CH: Tensor, filter_: Filter) -> Tensor:
    logits = head.logits(hidden_CH)
    return logits if filter_.temperature == 1.0 else logits.div_(filter_.temperature)


def _cut(scaled_CV: Tensor, threshold_C1: Tensor, targets_C1: Tensor) -> Tensor:
    """Everything below the threshold but the target becomes −inf, in place."""
    at_target = scaled_CV.gather(1, targets_C1)
    return scaled_CV.masked_fill_(scaled_CV < threshold_C1, -torch.inf).scatter_(1, targets_C1, at_target)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        head: Head,
        targets_M: Tensor,
        filter_: Filter,
        chunk: int,
    ) -> Tensor:
        kind = torch.float64 if hidden_MH.dtype == torch.float64 else torch.float32
        total = len(targets_M)
        logprobs = torch.empty(total, dtype=kind, device=hidden_MH.device)
        normaliser = torch.empty_like(logprobs)
        thresholds = torch.empty((total, 1), dtype=kind, device=hidden_MH.device) if filter_.cuts else None
        for part in _chunks(total, chunk):
            scaled = _scaled(head, hidden_MH[part], filter_)
            targets = targets_M[part, None]
            if thresholds is not None:
                thresholds[part] = filter_.threshold(scaled)
                scaled = _cut(scaled, thresholds[part], targets)
            normaliser[part] = scaled.logsumexp(dim=-1)
            logprobs[part] = scaled.gather(1, targets).squeeze(1) - normaliser[part]
        ctx.save_for_backward(hidden_MH, weight_VH, bias_V, targets_M, normaliser, thresholds)
        ctx.head, ctx.filter, ctx.chunk = (head.scale, head.softcap), filter_, chunk
        return logprobs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MH, weight_VH, bias_V, targets_M, normaliser, thresholds = ctx.saved_tensors
        head = Head(weight_VH, bias_V, *ctx.head)
        # sums over chunks are kept in fp32 whatever the model's dtype
        grad_hidden = torch.empty_like(hidden_MH) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_VH, dtype=normaliser.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias_V, dtype=normaliser.dtype) if ctx.needs_input_grad[2] else None
        for part in _chunks(len(targets_M), ctx.chunk):
            hidden, targets = hidden_MH[part], targets_M[part, None]
            scaled = _scaled(head, hidden, ctx.filter)
            slope = 1 - (scaled * (ctx.filter.temperature / head.softcap)).square_() if head.softcap else None
            if thresholds is not None:
                scaled = _cut(scaled, thresholds[part], targets)
            # d logprob / d scaled = onehot − softmax
            grad = scaled.sub_(normaliser[part, None]).exp_().mul_(-grad_M[part, None])
            grad.scatter_add_(1, targets, grad_M[part, None])
            grad.mul_(head.scale / ctx.filter.temperature)
            if slope is not None:
                grad.mul_(slope)
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            grad = grad.to(weight_VH.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight_VH
            if grad_weight is not None:
                _add_outer(grad_weight, grad, hidden)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight_VH.dtype),
            None if grad_bias is None else grad_bias.to(weight_VH.dtype),
            None,
            None,
            None,
            None,
        )


def _add_outer(total_VH: Tensor, grad_CV: Tensor, hidden_CH: Tensor) -> None:
    if total_VH.dtype == grad_CV.dtype:
        total_VH.addmm_(grad_CV.T, hidden_CH)
    else:
        total_VH += grad_CV.T @ hidden_CH
