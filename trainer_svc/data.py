"""The data set: read once, checked and tokenized before the run starts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbehind.config import DataConfig
from nbehind.tokenizer import Tokenizer
from rollout_queue.errors import MessageError
from rollout_queue.wire import pack, plain
from trainer_svc.data_sources import Bad, BadItem, Draft, Message, open_source
from trainer_svc.errors import DataError

log = logging.getLogger(__name__)

SHOWN = 20
PROGRESS_ITEMS = 10_000
SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt. `payload` holds plain types only: messages, gt_answer, the other keys of its line."""

    id: str
    prompt_ids: NDArray[np.int32]  # [P]
    payload: dict[str, Any]


def load_items(config: DataConfig, tokenizer: Tokenizer, max_prompt_tokens: int) -> list[Item]:
    """Every usable item of `config.source`, in its order.

    DataError if there is no such source, if nothing is left, or, with on_bad_item = "refuse", if any item is bad:
    then the first of them are named with file and line, and all are counted by kind.
    """
    items: list[Item] = []
    bad: list[Bad] = []
    counts: Counter[str] = Counter()
    seen: dict[str, str] = {}  # id -> where
    for number, entry in enumerate(open_source(config), 1):
        outcome = entry if isinstance(entry, Bad) else make_item(entry, config, tokenizer, max_prompt_tokens, seen)
        if isinstance(outcome, Item):
            items.append(outcome)
        else:
            counts[outcome.kind] += 1
            if len(bad) < SHOWN:
                bad.append(outcome)
        if number % PROGRESS_ITEMS == 0:
            log.info("%d items read from %s, %d of them usable", number, config.source, len(items))
    _report(config, len(items), bad, counts)
    sizes = [len(item.prompt_ids) for item in items]
    log.info(
        "%d items from %s; prompt tokens: least %d, mean %.1f, most %d",
        len(items), config.source, min(sizes), sum(sizes) / len(sizes), max(sizes),
    )  # fmt: skip
    return items


def make_item(
    draft: Draft, config: DataConfig, tokenizer: Tokenizer, max_prompt_tokens: int, seen: dict[str, str]
) -> Item | Bad:
    """The tokenized item, or what is wrong with it. `seen` (id -> where) gets its id."""
    try:
        messages = with_system_prompt(draft.messages, config.system_prompt)
        payload = {**draft.payload, "messages": messages}
        if not any(m["content"].strip() for m in draft.messages if m["role"] not in SYSTEM_ROLES):
            raise BadItem("empty prompt", "the messages hold no text")
        _check_sendable({"v": 1, "id": draft.id, "payload": payload})
        ids = encode(tokenizer, messages)
        if len(ids) > max_prompt_tokens:
            raise BadItem(
                "over-long prompt",
                f"{len(ids)} tokens, but {max_prompt_tokens} are left by "
                "model.max_context - sampling.max_new_tokens: shorten it, or raise model.max_context",
            )
        if draft.id in seen:
            raise BadItem("duplicate id", f"id {draft.id!r} is that of {seen[draft.id]}")
    except BadItem as error:
        return Bad(draft.where, error.kind, str(error))
    seen[draft.id] = draft.where
    return Item(draft.id, np.asarray(ids, dtype=np.int32), payload)


def with_system_prompt(messages: Sequence[Message], system_prompt: str) -> list[Message]:
    """The messages, after a system message if they have none and `system_prompt` is not empty."""
    if not system_prompt or any(m["role"] in SYSTEM_ROLES for m in messages):
        return list(messages)
    return [{"role": "system", "content": system_prompt}, *messages]


def encode(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Prompt ids, at least one. BadItem if the chat template refuses the messages."""
    try:
        ids = tokenizer.encode_chat(messages)
    except Exception as error:
        roles = ", ".join(m["role"] for m in messages)
        raise BadItem("refused by the chat template", f"roles {roles}: {type(error).__name__}: {error}") from error
    if not ids:
        raise BadItem("empty prompt", "no tokens")
    return ids


def _check_sendable(fields: dict[str, Any]) -> None:
    try:
        plain(fields, "it")
        pack(fields)
    except (MessageError, UnicodeError) as error:
        raise BadItem("cannot be sent", str(error)) from None


def _report(config: DataConfig, usable: int, bad: Sequence[Bad], counts: Counter[str]) -> None:
    """Raise, or log what was skipped."""
    total = usable + counts.total()
    if not total:
        raise DataError(f"data.source = {config.source} is empty: it needs at least one item")
    if not counts:
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    lines = [f"{b.where}: {b.kind}: {b.reason}" for b in bad]
    if counts.total() > len(bad):
        lines.append(f"and {counts.total() - len(bad)} more")
    what = f"data.source = {config.source}: {counts.total()} of {total} items cannot be used ({kinds})"
    if config.on_bad_item == "refuse":
        raise DataError("\n  ".join([f'{what}; correct them, or set data.on_bad_item = "skip":', *lines]))
    if not usable:
        raise DataError("\n  ".join([f"{what}, so none is left:", *lines]))
    for line in lines:
        log.warning("skipped %s", line)
    log.warning("%s; skipped", what)
