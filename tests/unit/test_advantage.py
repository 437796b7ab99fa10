import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_svc.advantage import advantages

KINDS = ["grpo", "grpo_no_std", "rloo"]


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_golden_values():
    # rewards 2, 0, 0, 2: mean 1, population variance (1+1+1+1)/4 = 1 (the sample variance would be 4/3)
    rewards = f32(2, 0, 0, 2)
    # grpo: (2 − 1)/(1 + 1e-6) = 0.999999
    np.testing.assert_allclose(advantages(rewards, "grpo"), [0.999999, -0.999999, -0.999999, 0.999999], rtol=1e-6)
    # grpo_no_std: 2 − 1 and 0 − 1
    np.testing.assert_array_equal(advantages(rewards, "grpo_no_std"), [1, -1, -1, 1])
    # rloo: 2 − (0+0+2)/3 = 4/3; 0 − (2+0+2)/3 = −4/3
    np.testing.assert_allclose(advantages(rewards, "rloo"), [4 / 3, -4 / 3, -4 / 3, 4 / 3], rtol=1e-6)


def test_unequal_spread():
    # rewards 1, 0, 0: mean 1/3, variance (4/9 + 1/9 + 1/9)/3 = 2/9, std 0.4714045
    np.testing.assert_allclose(advantages(f32(1, 0, 0), "grpo"), [1.4142106, -0.7071053, -0.7071053], rtol=2e-6)
    # leave-one-out: 1 − 0 and 0 − (1 + 0)/2
    np.testing.assert_allclose(advantages(f32(1, 0, 0), "rloo"), [1, -0.5, -0.5], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1e30])
def test_equal_rewards_give_exact_zeros(kind, value):
    result = advantages(f32(*[value] * 7), kind)  # the mean of seven 0.1 is not 0.1
    assert result.dtype == np.float32
    assert not result.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_groups_of_less_than_two_are_refused(kind, rewards):
    with pytest.raises(ValueError, match=r"num_generations >= 2"):
        advantages(f32(*rewards), kind)


def test_bad_rewards_and_kinds_are_refused():
    with pytest.raises(ValueError, match="finite"):
        advantages(f32(0, np.nan), "grpo")
    with pytest.raises(ValueError, match="finite"):
        advantages(f32(0, np.inf), "rloo")
    with pytest.raises(ValueError, match="unknown advantage 'ppo'"):
        advantages(f32(0, 1), "ppo")  # type: ignore[arg-type]


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=32), st.sampled_from(KINDS))
def test_sums_to_zero_and_keeps_the_order(rewards, kind):
    values = advantages(f32(*rewards), kind)
    assert np.isfinite(values).all()
    assert abs(float(values.astype(np.float64).sum())) < 1e-3 * max(1.0, float(np.abs(values).max()))
    better = np.argsort(f32(*rewards), kind="stable")
    assert (np.diff(values[better]) >= -1e-6 * max(1.0, float(np.abs(values).max()))).all()
