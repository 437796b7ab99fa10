import math

import pytest
import torch

from trainer_svc.loss import MAX_LOG_RATIO, k3, policy_loss, token_weights

# Four tokens, all with log π_old = −1, clip 0.8 … 1.2:
#   token  ratio  A    min(ratio·A, clip·A)         −min
#   0      1.5   +1    min(1.5, 1.2)   =  1.2       −1.2   cut off: no gradient
#   1      0.5   +1    min(0.5, 0.8)   =  0.5       −0.5   d/dlogπ = −ratio·A = −0.5
#   2      0.5   −1    min(−0.5, −0.8) = −0.8       +0.8   cut off: no gradient
#   3      1.5   −1    min(−1.5, −1.2) = −1.5       +1.5   d/dlogπ = +1.5
RATIOS = (1.5, 0.5, 0.5, 1.5)
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -1.0])
OLD = torch.full((4,), -1.0)


def new_logprobs() -> torch.Tensor:
    return (OLD + torch.tensor(RATIOS).log()).requires_grad_()


def loss_of(logprobs, weights, **extra):
    return policy_loss(logprobs, OLD, ADVANTAGES, weights, **{"clip_low": 0.2, "clip_high": 0.2, **extra})


def test_token_level_golden():
    logprobs = new_logprobs()
    loss, terms = loss_of(logprobs, token_weights(torch.tensor([1, 3]), "token", 4))
    # (−1.2 − 0.5 + 0.8 + 1.5) / 4 = 0.15
    assert loss.item() == pytest.approx(0.15, abs=1e-6)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -0.5 / 4, 0.0, 1.5 / 4]))
    assert terms.clipped.item() == 2
    assert terms.ratio.item() == pytest.approx(4.0)
    assert terms.ratio_max_dev.item() == pytest.approx(0.5)
    assert terms.neg_logprob.item() == pytest.approx(4 - 2 * math.log(1.5) - 2 * math.log(0.5))


def test_sample_level_golden():
    # samples of 1 and 3 tokens: −1.2/2 + (−0.5 + 0.8 + 1.5)/(2·3) = −0.6 + 0.3 = −0.3
    loss, _ = loss_of(new_logprobs(), token_weights(torch.tensor([1, 3]), "sample", 2))
    assert loss.item() == pytest.approx(-0.3, abs=1e-6)


def test_clip_bounds_are_separate():
    # upper bound 2: token 0 is no longer cut: −1.5; lower bound 0.6: token 2 becomes 0.4 → min(−0.5, −0.4) = −0.5
    loss, terms = loss_of(new_logprobs(), torch.ones(4), clip_low=0.6, clip_high=1.0)
    assert loss.item() == pytest.approx(-1.5 - 0.5 + 0.5 + 1.5, abs=1e-6)
    assert terms.clipped.item() == 0


def test_k3_golden_and_its_gradient():
    # d = log q − log π = ±ln 2: e^d − 1 − d = 2 − 1 − 0.693147 = 0.306853 and 0.5 − 1 + 0.693147 = 0.193147
    values = k3(torch.tensor([math.log(2), -math.log(2), 0.0]))
    torch.testing.assert_close(values, torch.tensor([0.306853, 0.193147, 0.0]), atol=1e-6, rtol=0)
    logprobs = OLD.clone().requires_grad_()
    reference = OLD + math.log(2)
    loss, terms = policy_loss(
        logprobs, OLD, torch.zeros(4), torch.ones(4), clip_low=0.2, clip_high=0.2, reference_M=reference, beta=0.1
    )
    assert loss.item() == pytest.approx(0.1 * 4 * 0.306853, abs=1e-6)
    assert terms.kl_reference.item() == pytest.approx(4 * 0.306853, abs=1e-5)
    loss.backward()
    # d/dlogπ (e^d − 1 − d) = 1 − e^d = −1
    torch.testing.assert_close(logprobs.grad, torch.full((4,), -0.1))


def test_without_reference_no_kl():
    _, terms = loss_of(new_logprobs(), torch.ones(4))
    assert terms.kl_reference.item() == 0
    # k3 of the sampler: ratio − 1 − ln ratio, summed: 2·(0.5 − ln 1.5) + 2·(−0.5 − ln 0.5)
    assert terms.kl_sampler.item() == pytest.approx(-2 * math.log(1.5) - 2 * math.log(0.5), abs=1e-5)


def test_cutting_a_minibatch_into_micro_batches_changes_nothing():
    lengths = torch.tensor([1, 3])
    for kind, denominator in (("token", 4), ("sample", 2)):
        whole, _ = loss_of(new_logprobs(), token_weights(lengths, kind, denominator))
        parts = 0.0
        for i, part in enumerate((slice(0, 1), slice(1, 4))):
            weights = token_weights(lengths[i : i + 1], kind, denominator)
            loss, _ = policy_loss(
                new_logprobs()[part], OLD[part], ADVANTAGES[part], weights, clip_low=0.2, clip_high=0.2
            )
            parts += loss.item()
        assert parts == pytest.approx(whole.item(), abs=1e-6)


def test_the_ratio_of_bf16_logprobs_is_fp32():
    old = torch.tensor([-1.0001])
    loss, _ = policy_loss(
        torch.tensor([-1.0], dtype=torch.bfloat16), old, torch.ones(1), torch.ones(1), clip_low=0.2, clip_high=0.2
    )
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(-math.exp(0.0001), abs=1e-7)  # bf16 would give −1


def test_absurd_ratios_stay_finite():
    logprobs = torch.tensor([-0.1, -500.0], requires_grad=True)
    old = torch.tensor([-500.0, -0.1])
    for sign in (1.0, -1.0):
        loss, terms = policy_loss(
            logprobs, old, torch.full((2,), sign), torch.ones(2), clip_low=0.2, clip_high=0.2, reference_M=old, beta=0.1
        )
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()
        assert terms.ratio_max_dev.item() == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-3)


def test_nan_is_not_hidden():
    loss, _ = loss_of(torch.tensor([math.nan, -1, -1, -1]), torch.ones(4))
    assert math.isnan(loss.item())


def test_no_tokens_and_refusals():
    empty = torch.zeros(0)
    loss, terms = policy_loss(empty, empty, empty, empty, clip_low=0.2, clip_high=0.2)
    assert (loss.item(), terms.ratio_max_dev.item()) == (0, 0)
    with pytest.raises(ValueError, match="denominator"):
        token_weights(torch.tensor([1]), "token", 0)
    with pytest.raises(ValueError, match="unknown loss"):
        token_weights(torch.tensor([1]), "group", 1)  # type: ignore[arg-type]
