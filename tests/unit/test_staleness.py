"""The staleness bound. s = step, v = version, lag = s − v; the bound is n_behind."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from queue_samples import group, request

from rollout_queue import staleness
from rollout_queue.errors import StalenessError
from rollout_queue.messages import Group, Lease, Version

HISTORY = {number: f"sum-{number}" for number in range(10)}
bounds = st.integers(0, 8)
steps = st.integers(0, 1000)


def mixed(*numbers: int) -> Group:
    """A group of one sample with one token of each of these versions."""
    lease = Lease(request(0, 1), "p1", "1-1")
    return dataclasses.replace(
        group(lease, lengths=(len(numbers),)),
        versions=tuple(Version(1, number, HISTORY.get(number, "?")) for number in numbers),
        spans=np.array([(0, index, index, index + 1) for index in range(len(numbers))], np.int32),
    )


@given(steps, bounds)
def test_what_may_begin_can_be_trained(step: int, n_behind: int) -> None:
    oldest = staleness.min_version(step, n_behind)
    assert 0 <= step - oldest <= n_behind
    assert staleness.deadline(oldest, n_behind) >= step
    assert oldest == 0 or staleness.deadline(oldest - 1, n_behind) < step


@given(steps, bounds)
def test_windows_open_when_their_oldest_version_is_out(published: int, n_behind: int) -> None:
    last = staleness.last_open_step(published, n_behind)
    assert staleness.min_version(last, n_behind) <= published
    assert staleness.min_version(last + 1, n_behind) > published


@given(steps, bounds)
def test_the_floor_is_what_the_next_step_can_train(step: int, n_behind: int) -> None:
    floor = staleness.floor_after(step, n_behind)
    assert floor == staleness.min_version(step + 1, n_behind)
    assert staleness.deadline(floor, n_behind) >= step + 1


@pytest.mark.parametrize(
    ("step_done", "published", "n_behind", "every", "due"),
    [
        (0, 0, 1, 1, True),  # every version
        (0, 0, 1, 2, False),  # version 1: not of the period, step 1 may still begin with version 0
        (1, 0, 1, 2, True),  # version 2: of the period
        (0, 0, 0, 5, True),  # on-policy: step 1 needs version 1
        (2, 0, 2, 9, True),  # step 3 needs version 1
        (1, 0, 2, 9, False),
        (2, 1, 2, 9, False),
    ],
)
def test_when_a_version_is_due(step_done: int, published: int, n_behind: int, every: int, due: bool) -> None:
    assert staleness.must_publish(step_done, published, n_behind, every) is due


@given(bounds, st.integers(1, 9))
def test_published_in_time_the_window_never_closes(n_behind: int, every: int) -> None:
    published = 0
    for step in range(30):
        assert staleness.min_version(step, n_behind) <= published
        if staleness.must_publish(step, published, n_behind, every):
            published = step + 1


class TestCheckGroup:
    def test_lags_of_every_token(self) -> None:
        # step 6 with tokens of versions 5, 6, 4: lags 1, 0, 2
        assert staleness.check_group(6, 2, mixed(5, 6, 4), HISTORY).tolist() == [1, 0, 2]
        assert staleness.token_lags(6, mixed(5, 6, 4)).dtype == np.int32

    def test_one_token_too_old(self) -> None:
        with pytest.raises(StalenessError, match="lag 3 at step 7 exceeds n_behind = 2"):
            staleness.check_group(7, 2, mixed(7, 7, 4, 7), HISTORY)

    def test_on_policy(self) -> None:
        assert staleness.check_group(3, 0, mixed(3, 3), HISTORY).tolist() == [0, 0]
        with pytest.raises(StalenessError, match="exceeds"):
            staleness.check_group(4, 0, mixed(3), HISTORY)

    def test_a_version_of_the_future(self) -> None:
        with pytest.raises(StalenessError, match="token of version 5 at step 4"):
            staleness.check_group(4, 3, mixed(5), HISTORY)

    def test_a_version_that_was_never_given_out(self) -> None:
        with pytest.raises(StalenessError, match="p1 is stamped with version 11"):
            staleness.check_group(11, 3, mixed(11), HISTORY)

    def test_a_version_of_another_history(self) -> None:
        forged = dataclasses.replace(mixed(5), versions=(Version(1, 5, "other"),))
        with pytest.raises(StalenessError, match=r"other.*expected sum-5"):
            staleness.check_group(5, 3, forged, HISTORY)

    def test_listed_versions_count_even_without_tokens(self) -> None:
        extra = dataclasses.replace(mixed(5), versions=(Version(1, 5, "sum-5"), Version(1, 77, "x")))
        with pytest.raises(StalenessError, match="77"):
            staleness.check_group(5, 3, extra, HISTORY)

    def test_a_group_without_tokens(self) -> None:
        lease = Lease(request(0, 1), "p1", "1-1")
        empty = dataclasses.replace(group(lease, lengths=(0, 0)), versions=(Version(1, 5, "sum-5"),))
        assert staleness.check_group(5, 0, empty, HISTORY).tolist() == []
