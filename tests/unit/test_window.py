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


def test_an_older_attempt_does_not_bring_an_earlier_deadline_than_its_reissue():
    window = Window(order(), n_behind=2)
    window.open_steps(2)
    request = RequestId(4, 0)
    assert window.deliver(header(request, version=2))
    window.reopen(request, published=4, failed=False)
    assert not window.deliver(header(request, version=2))
    assert window.deliver(header(request, version=4))


def test_a_replacement_takes_the_slot():
    window = Window(order(), n_behind=0)
    window.open_steps(0)
    assert window.replace(RequestId(0, 1), 0) == RequestId(0, 1, 1)
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
    assert window.choose_ready(1, 1, 1, {late: 0}) == (1, None)  # began with version 0: its deadline is step 1
    window.deliver(header(late, 0))
    _, chosen = window.choose_ready(1, 1, 1, {late: 0})
    assert chosen is not None and [h.id for h in chosen] == [RequestId(1, 0), late]


def test_ready_does_not_let_old_groups_pile_up():
    """n_behind = 2, one group a step. Two groups began with version 0 (deadline 2). Training the younger ones at steps 1
    and 2 would leave both for step 2, which trains only one: step 1 must wait for one of them."""
    window = Window(order(groups=1), n_behind=2)
    window.open_steps(1)  # steps 0..3
    window.resolve([RequestId(0, 0)])
    window.deliver(header(RequestId(3, 0), 1))
    old = {RequestId(1, 0): 0, RequestId(2, 0): 0}
    assert window.choose_ready(1, 0, 1, old) == (0, None)
    window.deliver(header(RequestId(2, 0), 0))
    _, chosen = window.choose_ready(1, 0, 1, old)
    assert chosen is not None and [h.id for h in chosen] == [RequestId(2, 0)]


def test_ready_raises_the_floor_when_requests_not_begun_could_come_too_late():
    window = Window(order(groups=1), n_behind=2)
    window.open_steps(1)
    window.resolve([RequestId(0, 0)])
    window.deliver(header(RequestId(3, 0), 1))
    # 1.0 and 2.0 have not begun: from version 0 both would be due at step 2, from version 1 at step 3.
    floor, chosen = window.choose_ready(1, 0, 1, {})
    assert floor == 1 and chosen is not None


def test_census():
    window = Window(order(), n_behind=0)
    window.open_steps(0)
    state = OpenState(attempt=3, state="leased", start_version=0, owner="p")
    census = {RequestId(0, 0): state, RequestId(9, 9): state, RequestId(8, 8): state}
    assert window.missing(census) == [RequestId(0, 1)]
    assert window.strangers(census, retained=[RequestId(8, 8)]) == [RequestId(9, 9)]
    window.note_attempts(census)
    assert window.reopen(RequestId(0, 0), 2, failed=True).attempt == 4
    assert window[RequestId(0, 0)].min_version == 2
    assert window[RequestId(0, 0)].failures == 1


class Simulation:
    """A run with random durations, producers that take new versions late, and leases that are taken over."""

    def __init__(self, seed: int, n_behind: int, kind: str, producers: int, groups: int, steps: int) -> None:
        self.rng = random.Random(seed)
        self.n_behind, self.kind, self.steps, self.groups = n_behind, kind, steps, groups
        self.window = Window(order(groups, steps), n_behind)
        self.queue: list[tuple[RequestId, int]] = []  # request, oldest version
        self.started: dict[RequestId, int] = {}
        self.running: list[tuple[float, int, RequestId, int]] = []
        self.versions = [0] * producers
        self.busy: set[int] = set()
        self.now, self.floor, self.published, self.lag_max = 0.0, 0, 0, 0

    def open(self) -> None:
        self.queue += [(r, min_version(r.step, self.n_behind)) for r in self.window.open_steps(self.published)]

    def producers_move(self) -> None:
        for p, version in enumerate(self.versions):
            if version < self.published and self.rng.random() < 0.3:
                self.versions[p] = self.published
            if p in self.busy or not self.queue:
                continue
            request, oldest = self.queue[0]
            if self.versions[p] >= max(self.floor, oldest):
                self.queue.pop(0)
                self.busy.add(p)
                self.started[request] = self.versions[p]
                heapq.heappush(self.running, (self.now + self.rng.lognormvariate(0, 1), p, request, self.versions[p]))

    def something_ends(self) -> None:
        if not self.running:
            return
        self.now, p, request, version = heapq.heappop(self.running)
        self.busy.remove(p)
        if self.rng.random() < 0.1:  # died: taken over later, never with older weights
            self.queue.append((request, version))
        else:
            assert self.window.deliver(header(request, version, entry=str(request)))

    def choose(self, step: int) -> list[GroupHeader] | None:
        if self.kind == "strict":
            return self.window.choose_strict(step)
        if not self.window.enough(step):
            return None
        self.floor = max(self.floor, floor_after(step, self.n_behind))
        while True:
            needed, chosen = self.window.choose_ready(step, self.floor, self.published, self.started)
            if needed == self.floor:
                return chosen
            self.floor = needed

    def run(self, publish_every: int) -> int:
        """The greatest lag trained."""
        self.open()
        for step in range(self.steps):
            for _ in range(10_000):
                self.producers_move()
                if chosen := self.choose(step):
                    break
                self.something_ends()
            assert chosen, f"step {step} is stuck"
            assert len(chosen) == self.groups
            lags = [step - h.oldest_version for h in chosen]
            assert min(lags) >= 0 and max(lags) <= self.n_behind
            self.lag_max = max(self.lag_max, *lags)
            self.window.resolve(h.id for h in chosen)
            if must_publish(step, self.published, self.n_behind, publish_every):
                self.published = step + 1
                self.open()
        assert len(self.window) == 0
        return self.lag_max


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6), n_behind=st.integers(0, 4), kind=st.sampled_from(["strict", "ready"]),
    period=st.integers(1, 5), producers=st.integers(1, 9), groups=st.integers(1, 5),
)  # fmt: skip
def test_no_timing_breaks_the_bound_or_gets_stuck(seed, n_behind, kind, period, producers, groups):
    Simulation(seed, n_behind, kind, producers, groups, steps=12).run(min(period, n_behind + 1))


@pytest.mark.parametrize("kind", ["strict", "ready"])
def test_the_bound_is_used_not_just_kept(kind):
    assert max(Simulation(s, 2, kind, 6, 4, 12).run(1) for s in range(5)) == 2
