"""Rewards whose time is not bounded by the length of the text: boxed_math, regex, reasoning_gym. For the worker processes.

Their libraries are imported when the reward is made, which happens in a worker only.
"""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Mapping
from typing import Any

from producer_svc.errors import RewardError
from producer_svc.rewards.answers import Check, Score, gold_answer, same_answer
from producer_svc.rewards.gym_entry import decode_entry
from producer_svc.rewards.tags import tagged_answer

log = logging.getLogger(__name__)

BOX = re.compile(r"\\boxed\s*\{")
BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
GYM_KEY = "reasoning_gym"


# --- boxed_math
def boxed_math() -> Check:
    """1 if what stands in the last \\boxed{} equals the answer, mathematically. Parts: boxed, correct."""
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    config = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(latex: str) -> list[Any]:
        return list(parse(f"\\boxed{{{latex}}}", config, fallback_mode="no_fallback", parsing_timeout=None))

    def check(text: str, payload: Mapping[str, Any]) -> Score:
        gold = bare_latex(gold_answer(payload))
        answer = last_boxed(text)
        if answer is None:
            return 0.0, {"boxed": 0.0, "correct": 0.0}
        correct = same_answer(answer, gold) or bool(verify(read(gold), read(answer), timeout_seconds=None))
        return float(correct), {"boxed": 1.0, "correct": float(correct)}

    return check


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{…} that is closed; None without one. Innermost if nested."""
    end = len(text)
    for start in reversed([match.end() for match in BOX.finditer(text)]):
        inside = _until_closed(text, start, end)
        if inside is not None:
            return inside.strip()
        end = start
    return None


def _until_closed(text: str, start: int, end: int) -> str | None:
    depth = 1
    for brace in BRACES.finditer(text, start, end):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start : brace.start()]
    return None


def bare_latex(gold: str) -> str:
    """The answer without \\boxed{} or dollar signs around it."""
    boxed = last_boxed(gold)
    return (gold if boxed is None else boxed).strip().strip("$").strip()


# --- regex
def regex(
    *, pattern: str, group: int = -1, ignore_case: bool = False, first: bool = False, multiline: bool = False
) -> Check:
    """With a group in `pattern`: 1 if its text in the last (or first) match equals the answer. Without: 1 if it matches.

    `group`: which one, 0 = the whole match; -1 = the first one if there is any. Parts: matched, correct (with a group).
    """
    flags = (re.IGNORECASE if ignore_case else 0) | (re.MULTILINE if multiline else 0)
    try:
        compiled = re.compile(pattern, flags)
    except (re.error, RecursionError, OverflowError) as error:
        raise RewardError(f"reward.options.pattern = {pattern!r} is no regular expression: {error}") from error
    if not -1 <= group <= compiled.groups:
        raise RewardError(f"reward.options.group = {group}: the pattern has {compiled.groups} groups")
    compared = group if group >= 0 else min(1, compiled.groups) or None

    def check(text: str, payload: Mapping[str, Any]) -> Score:
        matches = compiled.finditer(text)
        match = next(matches, None) if first else next(iter(deque(matches, maxlen=1)), None)
        if compared is None:
            return float(match is not None), {"matched": float(match is not None)}
        found = match.group(compared) if match else None
        correct = found is not None and same_answer(found, gold_answer(payload), ignore_case)
        return float(correct), {"matched": float(match is not None), "correct": float(correct)}

    return check


# --- reasoning_gym
def reasoning_gym(*, tags: bool = True) -> Check:
    """What the task's own verifier says, from 0 to 1. `tags`: it sees the text of the last answer tags if there are any.

    Parts: solved (1 if the verifier is fully content), failed (1 if it raised).
    """
    import reasoning_gym as gym

    from producer_svc.rewards.no_eval import guard_module

    verifiers: dict[str, Any] = {}

    def verifier(task: str, options: Mapping[str, Any]) -> Any:
        key = json.dumps([task, options], sort_keys=True)
        if key not in verifiers:
            made = gym.create_dataset(task, **options)
            guard_module(made)
            verifiers[key] = made
        return verifiers[key]

    def check(text: str, payload: Mapping[str, Any]) -> Score:
        entry = payload.get(GYM_KEY)
        if not isinstance(entry, Mapping) or not {"task", "options", "entry"} <= set(entry):
            raise RewardError('reward.name = "reasoning_gym" needs data.source = "reasoning_gym:TASK"')
        judge = verifier(entry["task"], entry["options"])
        tagged = tagged_answer(text) if tags else None
        answer = text.strip() if tagged is None else tagged
        try:
            total = float(judge.score_answer(answer, decode_entry(entry["entry"])))
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # noqa: BLE001  # the answer is not one that it can read
            log.debug("the verifier of %s raised %r", entry["task"], error)
            return 0.0, {"solved": 0.0, "failed": 1.0}
        return total, {"solved": float(total >= 1.0), "failed": 0.0}

    return check
