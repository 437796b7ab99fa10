"""The rewards that ship, and the checks of their options."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from producer_svc.errors import RewardError
from producer_svc.rewards import tags, verifiers
from producer_svc.rewards.answers import Check

IN_LOOP: dict[str, Callable[..., Check]] = {"exact": tags.exact, "think_answer": tags.think_answer}
IN_WORKERS: dict[str, Callable[..., Check]] = {
    "boxed_math": verifiers.boxed_math,
    "regex": verifiers.regex,
    "reasoning_gym": verifiers.reasoning_gym,
}
TYPES: dict[str, tuple[type, ...]] = {"bool": (bool,), "str": (str,), "int": (int,), "float": (float, int)}


def make_check(name: str, options: Mapping[str, Any]) -> Check:
    """The shipped reward `name` itself."""
    make = (IN_LOOP | IN_WORKERS)[name]
    check_options(name, make, options)
    return make(**options)


def check_options(name: str, make: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """RewardError for an option that the reward does not have, that has the wrong type, or that is missing."""
    known = inspect.signature(make).parameters
    for key, value in options.items():
        if key not in known:
            raise RewardError(f"reward.options.{key}: {name} has no such option; {near_name(key, list(known))}")
        wanted = str(known[key].annotation)
        if isinstance(value, bool) != (wanted == "bool") or not isinstance(value, TYPES[wanted]):
            raise RewardError(f"reward.options.{key} = {value!r}: must be a {wanted}")
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in options:
            raise RewardError(f"reward.options.{key} is missing: {name} needs it")


def near_name(name: str, known: list[str]) -> str:
    """A hint for a name that is not in `known`."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"there is {', '.join(known) or 'none'}"
