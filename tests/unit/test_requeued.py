"""Re-queued prompts of dead requests: who rolls them out, and when they are forgotten."""

from __future__ import annotations

import numpy as np

from rollout_queue.memory_queue import MemoryQueue
from rollout_queue.messages import DeadLetter, RequestId
from trainer_svc.data import Item
from trainer_svc.requeued import Requeued

ITEMS = [Item(name, np.zeros(1, np.int32), {}) for name in ("a", "b c", "d")]
FIRST, SECOND, THIRD = (RequestId(4, slot, 1) for slot in range(3))


def queue(*items: str) -> MemoryQueue:
    made = MemoryQueue()
    for number, item in enumerate(items):
        made.broker.bury("request", "slow", f"1.{number}.0", b"")
        assert made.requeue(made.dead_letters(1)[0], item)
    assert not made.requeue(DeadLetter("never", "request", "", "", b""), "a")
    assert not made.dead_letters()
    return made


def test_the_oldest_goes_to_the_next_replacement() -> None:
    requeued = Requeued(queue("b c", "a"), ITEMS)
    assert requeued.item(FIRST) is None
    for request in (FIRST, SECOND, THIRD):
        requeued.draw(request)
    assert [requeued.item(request) for request in (FIRST, SECOND, THIRD)] == [1, 0, None]


def test_a_prompt_of_other_data_is_passed_over() -> None:
    requeued = Requeued(queue("gone", "d"), ITEMS)
    requeued.draw(FIRST)
    assert requeued.item(FIRST) == 2


def test_forgotten_only_when_a_checkpoint_covers_it() -> None:
    transport = queue("a", "d")
    requeued = Requeued(transport, ITEMS)
    requeued.draw(FIRST)
    covered = requeued.drawn()
    requeued.draw(SECOND)
    assert len(transport.requeued()) == 2
    requeued.forget(covered)
    requeued.forget(covered)
    assert [mark.partition(" ")[2] for mark in transport.requeued()] == ["d"]
    assert (requeued.item(FIRST), requeued.item(SECOND)) == (0, 2)


def test_a_trainer_that_dies_before_its_checkpoint_draws_it_again() -> None:
    transport = queue("a")
    Requeued(transport, ITEMS).draw(FIRST)
    later = Requeued(transport, ITEMS)
    later.restore({})
    later.draw(SECOND)
    assert later.item(SECOND) == 0


def test_a_checkpoint_keeps_who_rolls_out_what_and_nothing_is_drawn_twice() -> None:
    transport = queue("a", "d")
    requeued = Requeued(transport, ITEMS)
    requeued.draw(FIRST)
    requeued.draw(SECOND)
    requeued.resolved(SECOND)
    state = requeued.as_dict()
    later = Requeued(transport, ITEMS)
    later.restore({**state, "9.9.1": "5 gone"})
    assert (later.item(FIRST), later.item(SECOND), later.item(RequestId(9, 9, 1))) == (0, None, None)
    later.draw(THIRD)
    assert later.item(THIRD) == 2
