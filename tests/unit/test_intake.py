"""What the trainer makes of deliveries, on the queue in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from queue_samples import group

from nbehind.config import Config
from rollout_queue.errors import OutOfMemory
from rollout_queue.memory_broker import MemoryBroker
from rollout_queue.memory_queue import MemoryQueue
from rollout_queue.messages import Request, RequestId, Version
from trainer_svc.data import Item
from trainer_svc.evaluation import Evaluation
from trainer_svc.intake import Intake
from trainer_svc.order import DataOrder

GENERATIONS = 2


class Versions:
    """A publisher of which only the history is known."""

    def __init__(self, history: dict[int, str]) -> None:
        self._history = history

    def history(self) -> dict[int, str]:
        return self._history

    def given(self, member: str) -> set[int]:
        return set(self._history)

    def troubles(self) -> dict[str, str]:
        return {}

    def members(self) -> dict[str, int]:
        return {}


def config() -> Config:
    return Config.model_validate(
        {
            "run": {"max_steps": 50, "n_behind": 2, "order": "ready"},
            "model": {"path": "fake"}, "trainer": {"engine": "fake"}, "producer": {"backend": "fake"},
            "sampling": {"groups_per_step": 2, "num_generations": GENERATIONS},
        }
    )  # fmt: skip


def intake(
    broker: MemoryBroker, history: dict[int, str], incarnation: int, kind: type[MemoryQueue] = MemoryQueue
) -> tuple[Intake, MemoryQueue]:
    queue = kind(broker)
    items = [Item(f"i{k}", np.arange(3, dtype=np.int32), {"gt_answer": "1"}) for k in range(4)]
    order = DataOrder(num_items=4, groups_per_step=2, seed=0, shuffle=False, epochs=0, max_steps=50)
    made = Intake(config(), queue, Versions(history), items, order, ())
    made.incarnation = queue.claim(incarnation)
    return made, queue


def test_groups_of_a_discarded_history_are_asked_for_again_and_count_as_nobodys_failure() -> None:
    """The checkpoint of step 3 is gone on from; versions 4 and 5 of the life before it do not exist any more."""
    broker = MemoryBroker()
    before, queue = intake(broker, {3: "a", 4: "b", 5: "c"}, 1)
    before.window.restore([], 5)
    before.issue_up_to(3)  # steps 5
    old = {lease.request.id: lease for lease in queue.lease("p", 5, 4, 0.0, 1)}
    kept, gone = (old[RequestId(5, slot)] for slot in (0, 1))
    queue.commit(kept, dataclasses.replace(group(kept), versions=(Version(1, 3, "a"),)))
    queue.commit(gone, dataclasses.replace(group(gone), versions=(Version(1, 5, "c"),)))

    after, queue = intake(broker, {3: "a"}, 2)
    after.window.restore([RequestId(5, 0), RequestId(5, 1)], 6)
    after.reissue_restored(3)
    assert [h.id for h in after.window.delivered()] == [RequestId(5, 0)]
    (lease,) = queue.lease("p", 3, 4, 0.0, 2)
    assert (lease.request.id, lease.request.min_version, lease.request.failures) == (RequestId(5, 1), 3, 0)


class FullQueue(MemoryQueue):
    """Takes no request, as a server whose memory is full."""

    def issue(self, requests: Sequence[Request]) -> None:
        raise OutOfMemory("the queue is full")


def test_a_full_queue_costs_an_evaluation_but_not_the_trainer(tmp_path: Path) -> None:
    made, full = intake(MemoryBroker(), {0: "a"}, 1, FullQueue)
    items = [Item("e0", np.arange(3, dtype=np.int32), {"gt_answer": "1"})]
    order = DataOrder(num_items=4, groups_per_step=2, seed=0, shuffle=False, epochs=0, max_steps=50)
    settings = config().model_copy(update={"run": config().run.model_copy(update={"dir": tmp_path})})
    made.evaluation = Evaluation(settings, full, items, order, made.sampling)
    made.evaluate(0)
    assert made.evaluation.open_steps() == {0}
    made.reconcile(0.0)  # nothing of it is in the queue: it ends without a result
    assert made.evaluation.open_steps() == set() and made.evaluation.results == []
