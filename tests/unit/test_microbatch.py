import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_svc.microbatch import FULL_ENOUGH_TOKENS, plan_micro_batches, split_groups


def shapes(lengths, bound):
    return [[lengths[i] for i in batch] for batch in plan_micro_batches(lengths, bound).batches]


def test_by_hand():
    # longest first; 5 + 5 fit into 10, the 4 beside them would make 15; 4, 2 → width 4, 8 tokens; a third would make 12
    assert shapes([2, 5, 4, 5, 1], 10) == [[5, 5], [4, 2], [1]]
    plan = plan_micro_batches([2, 5, 4, 5, 1], 10)
    assert (plan.tokens, plan.padded_tokens) == (17, 10 + 8 + 1)
    assert plan.pad_share == pytest.approx(2 / 19)


def test_longer_than_the_bound_is_alone():
    assert shapes([100, 3, 3, 100], 10) == [[100], [100], [3, 3]]


def test_no_waste_where_lengths_differ_much():
    lengths = [1000] * 4 + [10] * 100
    plan = plan_micro_batches(lengths, 1_000_000)
    assert plan.pad_share == 0
    assert [len(b) for b in plan.batches] == [4, 100]


def test_small_batches_are_not_cut_up():
    lengths = list(range(1, 20))
    assert sum(lengths) * 2 < FULL_ENOUGH_TOKENS
    assert len(plan_micro_batches(lengths, 8192).batches) == 1


def test_empty_and_refused():
    empty = plan_micro_batches([], 10)
    assert (empty.batches, empty.pad_share) == ((), 0.0)
    with pytest.raises(ValueError, match="at least 1"):
        plan_micro_batches([3, 0], 10)
    with pytest.raises(ValueError, match="at least 1"):
        plan_micro_batches([3], 0)


@given(st.lists(st.integers(1, 700), max_size=80), st.integers(1, 3000), st.randoms(use_true_random=False))
def test_every_sequence_once_within_the_bound_in_any_order(lengths, bound, shuffler: random.Random):
    plan = plan_micro_batches(lengths, bound)
    assert sorted(i for b in plan.batches for i in b) == list(range(len(lengths)))
    for batch in plan.batches:
        padded = len(batch) * max(lengths[i] for i in batch)
        assert padded <= bound or len(batch) == 1
    assert plan.padded_tokens == sum(len(b) * max(lengths[i] for i in b) for b in plan.batches)
    assert 0 <= plan.pad_share < 1
    other = list(lengths)
    shuffler.shuffle(other)
    assert shapes(other, bound) == shapes(lengths, bound)


def test_groups_are_split_evenly_and_whole():
    assert [list(r) for r in split_groups(5, 2)] == [[0, 1], [2, 3, 4]]
    assert [list(r) for r in split_groups(4, 1)] == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match="updates_per_step"):
        split_groups(3, 4)
    with pytest.raises(ValueError, match="updates_per_step"):
        split_groups(3, 0)


@given(st.integers(1, 200), st.data())
def test_split_covers_all_groups(groups, data):
    updates = data.draw(st.integers(1, groups))
    parts = split_groups(groups, updates)
    assert [g for part in parts for g in part] == list(range(groups))
    assert {len(p) for p in parts} <= {groups // updates, groups // updates + 1}
