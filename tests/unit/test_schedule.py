import math
from itertools import pairwise

import pytest

from trainer_svc.schedule import learning_rate


def test_warm_up_then_constant():
    rates = [learning_rate(u, 10, peak=1.0, warmup=4, kind="constant") for u in range(10)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_cosine_by_hand():
    # total 11, no warm-up: update 0 is at the peak, 5 of 10 halfway: 0.1 + 0.9 · 0.5, 10 at min_ratio
    def at(update):
        return learning_rate(update, 11, peak=2.0, warmup=0, kind="cosine", min_ratio=0.1)

    assert at(0) == pytest.approx(2.0)
    assert at(5) == pytest.approx(2.0 * 0.55)
    assert at(10) == pytest.approx(2.0 * 0.1)
    assert at(1000) == pytest.approx(2.0 * 0.1)  # a run that goes on past its plan


def test_cosine_after_warm_up_starts_at_the_peak_and_falls():
    rates = [learning_rate(u, 20, peak=1.0, warmup=5, kind="cosine") for u in range(20)]
    assert rates[4] == rates[5] == 1.0
    assert all(a > b for a, b in pairwise(rates[5:]))


@pytest.mark.parametrize("total", [0, 1, 2, 5])
@pytest.mark.parametrize("warmup", [0, 1, 5, 50])
@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_odd_lengths_stay_in_range(total, warmup, kind):
    for update in range(60):
        rate = learning_rate(update, total, peak=1.0, warmup=warmup, kind=kind)
        assert math.isfinite(rate)
        assert 0 < rate <= 1


def test_refusals():
    with pytest.raises(ValueError, match="negative"):
        learning_rate(-1, 10, peak=1.0, warmup=0, kind="constant")
    with pytest.raises(ValueError, match="unknown schedule"):
        learning_rate(0, 10, peak=1.0, warmup=0, kind="linear")  # type: ignore[arg-type]
