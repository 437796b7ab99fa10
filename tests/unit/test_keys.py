"""Keys of a run."""

from __future__ import annotations

import dataclasses
import inspect

from rollout_queue.keys import Keys
from rollout_queue.messages import RequestId


def all_keys(run: str) -> list[str]:
    keys = Keys(run)
    plain = [name for name, _ in inspect.getmembers(Keys, lambda member: isinstance(member, property))]
    return [
        *(getattr(keys, name) for name in plain),
        keys.body(RequestId(1, 2, 3), 4, 5),
        keys.producer_alive("p1"),
        keys.member_alive("p1"),
    ]


def test_all_share_one_hash_tag() -> None:
    for key in all_keys("a-run"):
        assert key.startswith("nbehind:{a-run}:")
        assert key.count("{") == key.count("}") == 1


def test_all_differ_within_and_between_runs() -> None:
    keys = all_keys("a") + all_keys("b") + all_keys("a.b")
    assert len(set(keys)) == len(keys)


def test_bodies_differ_by_everything_that_makes_an_attempt() -> None:
    keys = Keys("a")
    places = [(1, 2, 3, 4, 5), (1, 2, 3, 4, 6), (1, 2, 3, 5, 5), (1, 2, 4, 4, 5), (12, 3, 0, 4, 5), (1, 23, 0, 4, 5)]
    bodies = {keys.body(RequestId(*place[:3]), *place[3:]) for place in places}
    assert len(bodies) == len(places)


def test_names_cannot_break_the_tag_of_another_key() -> None:
    keys = Keys("a")
    assert keys.producer_alive("trainer") != keys.trainer_alive
    assert keys.producer_alive("x") != keys.member_alive("x")
    assert dataclasses.is_dataclass(keys)
