import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_svc.logprobs import Filter, Head, token_logprobs

M, H, V = 23, 8, 31
F64 = torch.float64


def make(bias=False, dtype=F64, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(M, H, generator=g, dtype=F64).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=g, dtype=F64).to(dtype).requires_grad_()
    bias_V = torch.randn(V, generator=g, dtype=F64).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(0, V, (M,), generator=g)
    return hidden, weight, bias_V, targets


def direct(hidden, head: Head, targets, rule: Filter):
    """Full logits and autograd, filters as documented: top-k, then top-p over what is left, the target always kept."""
    logits = hidden @ head.weight_VH.T
    if head.bias_V is not None:
        logits = logits + head.bias_V
    logits = logits * head.scale
    if head.softcap:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logits = logits / rule.temperature
    keep = torch.ones_like(logits, dtype=torch.bool)
    for row in range(len(logits)):
        order = logits[row].detach().argsort(descending=True).tolist()
        order = order[: rule.top_k or len(order)]
        probs = logits[row].detach()[order].softmax(0).tolist()
        kept, mass = [], 0.0
        for token, p in zip(order, probs, strict=True):
            if rule.top_p < 1 and mass >= rule.top_p:
                break
            kept.append(token)
            mass += p
        keep[row] = False
        keep[row, [*kept, int(targets[row])]] = True
    return logits.masked_fill(~keep, -torch.inf).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


RULES = [
    Filter(),
    Filter(temperature=0.6),
    Filter(temperature=1.7, top_k=5),
    Filter(top_p=0.7),
    Filter(temperature=0.8, top_p=0.9, top_k=10),
    Filter(top_k=1),
    Filter(top_k=10_000, top_p=1e-9),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("scale", "softcap", "bias"), [(1.0, 0.0, False), (0.25, 0.0, True), (1.0, 2.0, False), (3.0, 5.0, True)]
)
def test_values_and_gradients_equal_the_direct_computation(rule, scale, softcap, bias):
    hidden, weight, bias_V, targets = make(bias)
    inputs = [t for t in (hidden, weight, bias_V) if t is not None]
    head = Head(weight, bias_V, scale, softcap)
    upstream = torch.randn(M, generator=torch.Generator().manual_seed(1), dtype=F64)
    expected = direct(hidden, head, targets, rule)
    expected_grads = torch.autograd.grad(expected, inputs, upstream)
    for chunk in (1, 7, M, 1000):
        got = token_logprobs(hidden, head, targets, rule, chunk)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
        grads = torch.autograd.grad(got, inputs, upstream)
        for a, b in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_gradcheck():
    hidden, weight, bias_V, targets = make(bias=True)
    assert torch.autograd.gradcheck(
        lambda h, w, b: token_logprobs(h, Head(w, b, 0.5, 4.0), targets, Filter(0.7), 5), (hidden, weight, bias_V)
    )


def test_tied_weight_gets_both_gradients():
    _, weight, _, targets = make()
    ids = torch.arange(M) % V
    tied = token_logprobs(weight[ids], Head(weight), targets, Filter(), 4).sum()
    plain = (weight[ids] @ weight.T).log_softmax(-1).gather(1, targets[:, None]).sum()
    torch.testing.assert_close(*(torch.autograd.grad(x, weight)[0] for x in (tied, plain)))


def test_a_cut_target_stays_finite_with_a_gradient():
    # two tokens, logits 10 and −10; top_k = 1 keeps token 0 only; token 1 is counted as kept beside it
    weight = torch.tensor([[10.0], [-10.0]], dtype=F64)
    hidden = torch.ones(1, 1, dtype=F64, requires_grad=True)
    got = token_logprobs(hidden, Head(weight), torch.tensor([1]), Filter(top_k=1), 8)
    # log(e^−10 / (e^−10 + e^10)) = −20 to nine digits, d/dh = −20 · (1 − 2e-9)
    assert got.item() == pytest.approx(-20.0, abs=1e-7)
    (gradient,) = torch.autograd.grad(got, hidden)
    assert gradient.item() == pytest.approx(-20.0, abs=1e-6)


class Sizes(TorchDispatchMode):
    """Notes the elements of every tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen.extend(t.numel() for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor))
        return out


@pytest.mark.parametrize("rule", [Filter(), Filter(0.7, 0.9, 50)])
def test_memory_is_bounded_by_the_chunk(rule):
    tokens, vocabulary, chunk = 4096, 1000, 16
    hidden = torch.randn(tokens, 2, requires_grad=True)
    weight = torch.randn(vocabulary, 2, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    with Sizes() as sizes:
        loss = token_logprobs(hidden, Head(weight), targets, rule, chunk).sum()
        torch.autograd.backward(loss)
    assert max(sizes.seen) == chunk * vocabulary
    assert weight.grad is not None


def test_bf16_weights_give_fp32_logprobs_close_to_exact():
    hidden, weight, _, targets = make(dtype=torch.bfloat16)
    got = token_logprobs(hidden, Head(weight), targets, Filter(), 5)
    assert got.dtype == torch.float32
    exact = direct(hidden.double(), Head(weight.double()), targets, Filter())
    torch.testing.assert_close(got.double(), exact, rtol=0.02, atol=0.05)
    torch.autograd.backward(got.sum())
    assert weight.grad.dtype == hidden.grad.dtype == torch.bfloat16


def test_frozen_parts_no_tokens_and_refusal():
    hidden, weight, _, targets = make()
    only_hidden = token_logprobs(hidden, Head(weight.detach()), targets, Filter(), 5)
    torch.autograd.backward(only_hidden.sum())
    assert hidden.grad is not None
    none = token_logprobs(hidden[:0], Head(weight), targets[:0], Filter(top_p=0.5), 5)
    torch.autograd.backward(none.sum())
    assert none.shape == (0,)
    assert not weight.grad.any()
    with pytest.raises(ValueError, match="chunk"):
        token_logprobs(hidden, Head(weight), targets, Filter(), 0)


def test_nan_is_not_hidden():
    hidden, weight, _, targets = make()
    spoiled = hidden.detach().clone()
    spoiled[3] = torch.nan
    for rule in RULES:
        got = token_logprobs(spoiled, Head(weight), targets, rule, 5)
        assert got[3].isnan()
        assert got[4:].isfinite().all()
