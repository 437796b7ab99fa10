"""Comparing an answer with the right one, as texts and as numbers. Pure, linear in the length of the texts."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from producer_svc.errors import RewardError

MAX_NUMBER_CHARS = 200
_GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)
_RATIO = re.compile(r"[+-]?\d+/0*[1-9]\d*", re.ASCII)

Score = tuple[float, dict[str, float]]  # total, parts
Check = Callable[[str, Mapping[str, Any]], Score]  # of a completion's text and the request's payload


def gold_answer(payload: Mapping[str, Any]) -> str:
    """The right answer as text. RewardError if the item has none."""
    value = payload.get("gt_answer")
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or value == "":
        raise RewardError("the item has no gt_answer, which this reward compares with: choose another reward.name")
    return number_text(value) if isinstance(value, float) else str(value).strip()


def number_text(value: float) -> str:
    """As people write it: 3.0 -> "3", 1e-7 -> "0.0000001"."""
    text = format(Decimal(repr(value)), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def same_text(a: str, b: str, ignore_case: bool = False) -> bool:
    """Equal after Unicode composition and without white space around."""
    left, right = (unicodedata.normalize("NFC", text).strip() for text in (a, b))
    return left.casefold() == right.casefold() if ignore_case else left == right


def parse_number(text: str) -> Fraction | None:
    """ "1,000" -> 1000, "3.0" -> 3, "-1/2", "1e3"; None for everything else, and for very long numbers."""
    text = text.strip().replace("\N{MINUS SIGN}", "-")
    if len(text) > MAX_NUMBER_CHARS:
        return None
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    return Fraction(text) if _DECIMAL.fullmatch(text) or _RATIO.fullmatch(text) else None


def same_answer(a: str, b: str, ignore_case: bool = False) -> bool:
    """Equal as texts or as numbers."""
    if same_text(a, b, ignore_case):
        return True
    left = parse_number(a)
    return left is not None and left == parse_number(b)
