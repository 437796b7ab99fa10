"""Which faults a seed gives."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbehind.chaos.faults import KINDS, durations
from nbehind.chaos.plan import plan

LEASE_S = 3.0


def test_a_seed_gives_the_same_faults_and_another_one_others() -> None:
    kinds = durations(LEASE_S)
    assert plan(7, 600.0, kinds) == plan(7, 600.0, kinds)
    assert plan(7, 600.0, kinds) != plan(8, 600.0, kinds)


@given(seed=st.integers(0, 10**6))
def test_ten_minutes_have_enough_faults_of_every_kind(seed: int) -> None:
    faults = plan(seed, 600.0, durations(LEASE_S))
    counts = Counter(f.kind for f in faults)
    assert len(faults) >= 75 and set(counts) == set(KINDS)  # some may find no victim; 60 are wanted
    assert max(counts.values()) - min(counts.values()) <= 1
    assert [f.at_s for f in faults] == sorted(f.at_s for f in faults)
    assert faults[-1].at_s < 540
    for fault in faults:
        shortest, longest = durations(LEASE_S)[fault.kind]
        assert shortest <= fault.seconds <= longest


def test_some_overlap() -> None:
    faults = plan(1, 600.0, durations(LEASE_S))
    assert any(b.at_s < a.at_s + a.seconds for a, b in itertools.pairwise(faults))


@pytest.mark.parametrize(("total_s", "kinds"), [(0.0, {"a": (0.0, 1.0)}), (10.0, {})])
def test_nothing_to_plan(total_s: float, kinds: dict[str, tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="nothing to plan"):
        plan(1, total_s, kinds)
