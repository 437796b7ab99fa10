"""Rewards by plain string operations, linear in the text: exact, think_answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from producer_svc.rewards.answers import Check, Score, gold_answer, same_answer, same_text

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def exact(*, ignore_case: bool = False, last_line: bool = False, numbers: bool = False) -> Check:
    """1 if the text, stripped, is the answer. `last_line`: only the last line with text counts; `numbers`: 3.0 = 3."""
    same = same_answer if numbers else same_text

    def check(text: str, payload: Mapping[str, Any]) -> Score:
        if last_line:
            text = next((line for line in reversed(text.splitlines()) if line.strip()), "")
        golds = {gold_answer(payload), str(payload["gt_answer"])}  # a float in both of its spellings
        return float(any(same(text, gold, ignore_case) for gold in golds)), {}

    return check


def think_answer(
    *,
    format_weight: float = 0.2,
    correct_weight: float = 0.8,
    ignore_case: bool = False,
    think_prefilled: bool = False,
) -> Check:
    """format_weight · format + correct_weight · correct.

    format: the whole text is <think>…</think><answer>…</answer>, each tag once. correct: what stands in the last answer tags
    equals the answer, as text or number. `think_prefilled`: the prompt already ends with <think>.
    """

    def check(text: str, payload: Mapping[str, Any]) -> Score:
        gold = gold_answer(payload)
        whole = TAGS[0] + text if think_prefilled else text
        answer = tagged_answer(text)
        parts = {
            "format": float(well_formed(whole)),
            "correct": float(answer is not None and same_answer(answer, gold, ignore_case)),
        }
        return format_weight * parts["format"] + correct_weight * parts["correct"], parts

    return check


def tagged_answer(text: str) -> str | None:
    """What stands between the last <answer> and the </answer> after it, stripped; None without them."""
    _, opened, rest = text.rpartition(TAGS[2])
    inside, closed, _ = rest.partition(TAGS[3])
    return inside.strip() if opened and closed else None


def well_formed(text: str) -> bool:
    """<think>…</think>, white space, <answer>…</answer>, nothing else; each tag once, the answer not blank."""
    text = text.strip()
    if any(text.count(tag) != 1 for tag in TAGS) or not (text.startswith(TAGS[0]) and text.endswith(TAGS[3])):
        return False
    _, _, after = text.partition(TAGS[1])
    return after.lstrip().startswith(TAGS[2]) and bool(tagged_answer(text))
