"""`nbehind dead`: what was given up, why, and what can be done with it.

A dead request has been replaced in its slot, so it cannot come back as itself: a slot would be trained twice. Its
prompt can: by a later replacement of this run (re-queue), or by a later run (export).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nbehind.errors import InputError
from nbehind.inspect_run import table
from rollout_queue.codec import decode_request
from rollout_queue.errors import MessageError
from rollout_queue.messages import DeadLetter, Request
from rollout_queue.redis_queue import RedisQueue

ALL = 1000  # more are not kept
HEAD_CHARS = 60


def request_of(letter: DeadLetter) -> Request | None:
    """The request of the letter; None for a rollout, and for a request that could not be read."""
    if letter.kind != "request":
        return None
    try:
        return decode_request(letter.payload)
    except MessageError:
        return None


def described(letter: DeadLetter) -> dict[str, Any]:
    """The letter as plain JSON types."""
    request = request_of(letter)
    milliseconds = int(letter.entry.partition("-")[0])
    return {
        "entry": letter.entry,
        "time": datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "kind": letter.kind,
        "request": letter.request_id,
        "item": request.item_id if request else "",
        "reason": letter.reason,
        "payload": _head(letter, request),
    }


def _head(letter: DeadLetter, request: Request | None) -> str:
    """The prompt's last message, or the first bytes of what could not be read."""
    messages = request.payload.get("messages") if request else None
    if isinstance(messages, list | tuple) and messages and isinstance(messages[-1], Mapping):
        text = " ".join(str(messages[-1].get("content", "")).split())
    elif request:
        text = f"{len(request.prompt_ids)} tokens"
    else:
        text = repr(letter.payload[:HEAD_CHARS])
    return text if len(text) <= HEAD_CHARS else text[: HEAD_CHARS - 1] + "…"


def letters_text(run: str, letters: Iterable[DeadLetter]) -> str:
    """The letters for people, oldest first."""
    rows = [
        [str(d[k]) for k in ("entry", "time", "kind", "request", "payload", "reason")] for d in map(described, letters)
    ]
    return (
        "\n".join(table(f"dead letters of run {run}", ["entry", "time", "kind", "request", "payload", "reason"], rows))
        + "\n"
    )


def chosen(letters: list[DeadLetter], entry: str) -> list[DeadLetter]:
    """The letter with that entry, or "all" requests. InputError when it cannot be re-queued."""
    if entry == "all":
        return [letter for letter in letters if request_of(letter)]
    found = [letter for letter in letters if letter.entry == entry]
    if not found:
        raise InputError(f"no dead letter has the entry {entry}; `nbehind dead` without --requeue lists them")
    if request_of(found[0]) is None:
        what = (
            "a rollout, whose request was issued again"
            if found[0].kind == "rollout"
            else "a request that cannot be read"
        )
        raise InputError(f"dead letter {entry} is {what}: there is nothing to re-queue")
    return found


def requeue(queue: RedisQueue, run: str, letters: list[DeadLetter], entry: str) -> int:
    """Give the prompts to the next replacements of the run; returns how many. InputError when the run is over."""
    state = queue.state()
    if state.ended:
        raise InputError(
            f"run {run} has ended ({state.ended}): use --export FILE and train them with data.source = FILE"
        )
    done = 0
    for letter in chosen(letters, entry):
        request = request_of(letter)
        done += bool(request and queue.requeue(letter, request.item_id))
    return done


def export(letters: Iterable[DeadLetter], path: Path) -> int:
    """Write the prompts as a data set (`data.source = FILE`), each item once; returns how many. InputError if `path` exists."""
    rows: dict[str, str] = {}
    for letter in letters:
        request = request_of(letter)
        if request is not None and request.payload.get("messages"):
            rows[request.item_id] = json.dumps({"id": request.item_id, **request.payload}, default=repr)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.writelines(f"{row}\n" for row in rows.values())
    except FileExistsError:
        raise InputError(f"{path} is there already; give another name to --export") from None
    return len(rows)
