"""The window's decisions, and a simulation of whole runs: whatever the timing, no lag above n_behind, nothing stuck."""

import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_queue.messages import GroupHeader, OpenState, RequestId, Version
from rollout_queue.staleness import floor_after, min_version, must_publish
from trainer_svc.order import DataOrder
from trainer_svc.window import Window


def order(groups: int = 2, steps: int = 6, **changes: object) -> DataOrder:
    values = {"num_items": 50, "groups_per_step": groups, "seed": 0, "shuffle": True, "epochs": 0, "max_steps": steps}
    return DataOrder(**{**values, **changes})  # type: ignore[arg-type]


def header(request: RequestId, version: int = 0, attempt: int = 0, entry: str = "1-0") -> GroupHeader:
    return GroupHeader(
        id=request, incarnation=1, attempt=attempt, producer="p", versions=(Version(1, version, "c"),), num_tokens=1,
        equal_rewards=False, body_bytes=1, entry=entry, raw=b"", body_key="",
    )  # fmt: skip


def test_steps_open_with_the_published_version():
    window = Window(order(), n_behind=1)
    assert [r.step for r in window.open_steps(0)] == [0, 0, 1, 1]
    assert window.open_steps(0) == []
    assert window.open_steps(1) == [RequestId(2, 0), RequestId(2, 1)]
    assert window.open_steps(100)[-1] == RequestId(5, 1)  # the run has six steps


def test_strict_takes_exactly_the_groups_of_the_step_in_request_order():
    window = Window(order(), n_behind=1)
    window.open_steps(0)
    assert window.deliver(header(RequestId(1, 0)))
    assert window.deliver(header(RequestId(0, 1)))
    assert window.choose_strict(0) is None
    assert window.deliver(header(RequestId(0, 0)))
    chosen = window.choose_strict(0)
    assert chosen is not None and [h.id for h in chosen] == [RequestId(0, 0), RequestId(0, 1)]


def test_a_group_counts_once():
    window = Window(order(), n_behind=0)
    window.open_steps(0)
    assert window.deliver(header(RequestId(0, 0)))
    assert not window.deliver(header(RequestId(0, 0), attempt=1))
    assert not window.deliver(header(RequestId(3, 0)))  # not open
    window.resolve([RequestId(0, 0)])
    assert not window.deliver(header(RequestId(0, 0)))


def test_a_replacement_takes_the_slot():
    window = Window(order(), n_behind=0)
    window.open_steps(0)
    assert window.replace(RequestId(0, 1)) == RequestId(0, 1, 1)
    window.deliver(header(RequestId(0, 0)))
    assert window.choose_strict(0) is None
    window.deliver(header(RequestId(0, 1, 1)))
    assert len(window.choose_strict(0) or []) == 2


def test_ready_waits_for_groups_at_their_deadline_and_fills_up_with_the_nearest():
    window = Window(order(), n_behind=1)
    window.open_steps(1)  # steps 0, 1, 2
    window.resolve([RequestId(0, 0), RequestId(0, 1)])
    for request, version in ((RequestId(1, 0), 1), (RequestId(2, 0), 1), (RequestId(2, 1), 1)):
        window.deliver(header(request, version))
    late = RequestId(1, 1)
    assert window.choose_ready(1, {late: 0}) is None  # began with version 0: its deadline is step 1
    window.deliver(header(late, 0))
    chosen = window.choose_ready(1, {late: 0})
    assert chosen is not None and [h.id for h in chosen] == [RequestId(1, 0), late]


def test_census():
    window = Window(order(), n_behind=0)
    window.open_steps(0)
    state = OpenState(attempt=3, state="leased", start_version=0, owner="p")
    census = {RequestId(0, 0): state, RequestId(9, 9): state, RequestId(8, 8): state}
    assert window.missing(census) == [RequestId(0, 1)]
    assert window.strangers(census, retained=[RequestId(8, 8)]) == [RequestId(9, 9)]
    window.note_attempts(census)
    assert window.reopen(RequestId(0, 0), failed=True).attempt == 4
    assert window[RequestId(0, 0)].failures == 1


def simulate(seed: int, n_behind: int, kind: str, publish_every: int, producers: int, groups: int, steps: int) -> int:
    """One run with random durations and producers that take new versions late; returns the greatest lag trained."""
    rng = random.Random(seed)
    data = order(groups, steps)
    window = Window(data, n_behind)
    queue: list[RequestId] = []
    started: dict[RequestId, int] = {}
    running: list[tuple[float, int, RequestId, int]] = []
    versions = [0] * producers
    busy = [False] * producers
    now, floor, published, lag_max = 0.0, 0, 0, 0
    queue += window.open_steps(0)

    def begin() -> None:
        for p in range(producers):
            if busy[p] or not queue:
                continue
            if min_version(queue[0].step, n_behind) <= versions[p] and versions[p] >= floor:
                request = queue.pop(0)
                started[request] = versions[p]
                busy[p] = True
                heapq.heappush(running, (now + rng.lognormvariate(0, 1), p, request, versions[p]))

    for step in range(steps):
        chosen = None
        for _ in range(10_000):
            for p in range(producers):
                if versions[p] < published and rng.random() < 0.3:
                    versions[p] = published
            begin()
            if kind == "strict":
                chosen = window.choose_strict(step)
            elif window.enough(step):
                floor = max(floor, floor_after(step, n_behind))
                chosen = window.choose_ready(step, started)
            if chosen:
                break
            if running:
                now, p, request, version = heapq.heappop(running)
                busy[p] = False
                assert window.deliver(header(request, version, entry=str(request)))
        assert chosen, f"step {step} is stuck"
        assert len(chosen) == groups
        for h in chosen:
            lag_max = max(lag_max, step - h.oldest_version)
            assert 0 <= step - h.oldest_version <= n_behind
        window.resolve(h.id for h in chosen)
        if must_publish(step, published, n_behind, publish_every):
            published = step + 1
            queue += window.open_steps(published)
    assert len(window) == 0
    return lag_max


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6), n_behind=st.integers(0, 4), kind=st.sampled_from(["strict", "ready"]),
    period=st.integers(1, 5), producers=st.integers(1, 9), groups=st.integers(1, 5),
)  # fmt: skip
def test_no_timing_breaks_the_bound_or_gets_stuck(seed, n_behind, kind, period, producers, groups):
    simulate(seed, n_behind, kind, min(period, n_behind + 1), producers, groups, steps=12)


@pytest.mark.parametrize("kind", ["strict", "ready"])
def test_the_bound_is_used_not_just_kept(kind):
    assert max(simulate(s, 2, kind, 1, 6, 4, 12) for s in range(5)) == 2
