"""Where items come from: a JSONL file, the demo's task, a reasoning-gym task. Each yields `Draft` or `Bad`, one an item."""

from __future__ import annotations

import codecs
import dataclasses
import difflib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from nbehind.config import DataConfig
from trainer_svc.errors import DataError

GYM_PREFIX = "reasoning_gym:"
GYM_KEY = "reasoning_gym"  # of the payload: {"task", "options", "entry"}
MAX_LINE_BYTES = 64 * 2**20
EXAMPLE = '{"messages": "What is 2 + 3?", "gt_answer": 5}'
GYM_REFUSED = {
    "composite": "its verifier needs the objects of its parts; take one of them",
    "codeio": "it runs code snippets that a model wrote",
}
WORD_64 = range(-(2**63), 2**64)  # what msgpack can hold

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Draft:
    """An item before it is tokenized. `where` names it in messages: file and line, or task and number."""

    where: str
    id: str
    messages: list[Message]
    payload: dict[str, Any]  # without `messages`


@dataclass(frozen=True, slots=True)
class Bad:
    """An item that cannot be used. `kind` is a few words that items are counted by."""

    where: str
    kind: str
    reason: str


class BadItem(Exception):
    """Internal: the item that is being read cannot be used."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def open_source(config: DataConfig) -> Iterator[Draft | Bad]:
    """The items of `config.source`, in order. DataError if there is no such source, or it cannot be read."""
    if config.source == "demo":
        return demo_items(config)
    if config.source.startswith(GYM_PREFIX):
        return gym_items(config)
    return jsonl_items(config)


# --- JSONL
def jsonl_items(config: DataConfig) -> Iterator[Draft | Bad]:
    """The lines of the file, one at a time; blank lines, CRLF and a byte order mark are passed over."""
    path = Path(config.source).expanduser()
    if config.options:
        raise DataError(f"data.options = {config.options} has no meaning for the file {path}: remove it")
    _check_file(path)
    try:
        with path.open("rb") as file:
            for number, line in _lines(file):
                where = f"{path}:{number}"
                try:
                    draft = parse_line(line, where, number)
                except BadItem as bad:
                    yield Bad(where, bad.kind, str(bad))
                else:
                    if draft:
                        yield draft
    except OSError as error:
        raise DataError(f"data.source = {path} cannot be read: {error.strerror or error}") from error


def parse_line(line: bytes | None, where: str, number: int) -> Draft | None:
    """One line of the file; None if it is blank. BadItem if it cannot be used."""
    if line is None:
        raise BadItem("line too long", f"longer than {MAX_LINE_BYTES // 2**20} MiB")
    try:
        text = line.removeprefix(codecs.BOM_UTF8).decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise BadItem("invalid UTF-8", f"{error.reason} at byte {error.start}: save the file as UTF-8") from None
    if not text:
        return None
    try:
        row = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadItem("invalid JSON", f"{reason}; every line is one object such as {EXAMPLE}") from None
    if not isinstance(row, dict):
        raise BadItem("wrong type", f"a {_kind(row)} where an object is expected, such as {EXAMPLE}")
    payload = {key: plain(value) for key, value in row.items() if key not in ("id", "messages", "gt_answer")}
    payload["gt_answer"] = _answer(row)
    return Draft(where, _id(row, number), _messages(row), payload)


def _check_file(path: Path) -> None:
    try:
        exists, folder, regular = path.exists(), path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:  # a name that no file can have
        raise DataError(f"data.source = {str(path)[:200]!r} is no file name: {error}") from error
    if folder:
        inside = sorted(p.name for p in path.glob("*.jsonl"))
        hint = f"name a file in it, such as {path / inside[0]}" if inside else "give a .jsonl file"
        raise DataError(f"data.source = {path} is a folder: {hint}")
    if not exists:
        raise DataError(f"data.source = {path}: no such file{_near_source(path)}")
    if not regular:
        raise DataError(f"data.source = {path} is no regular file: give a .jsonl file")


def _near_source(path: Path) -> str:
    files = [str(p) for p in path.parent.glob("*.jsonl")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(str(path), [*files, "demo"], n=1)
    return f"; did you mean {near[0]}?" if near else '; give a .jsonl file, "demo" or "reasoning_gym:TASK"'


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """(line number from 1, bytes); None for a line over MAX_LINE_BYTES, which is skipped without holding it."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES):
        number += 1
        whole = line.endswith(b"\n") or len(line) < MAX_LINE_BYTES
        while not whole:
            rest = file.readline(MAX_LINE_BYTES)
            whole = rest.endswith(b"\n") or len(rest) < MAX_LINE_BYTES
            line = b""
        yield number, line or None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _answer(row: Mapping[str, Any]) -> str | int | float:
    value = row.get("gt_answer")
    if value is None:
        raise BadItem("missing answer", '"gt_answer" is missing')
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise BadItem("wrong type", f'"gt_answer" is a {_kind(value)}; a text or a number is expected')
    if isinstance(value, str) and not value.strip():
        raise BadItem("empty answer", '"gt_answer" is empty')
    if isinstance(value, float) and not math.isfinite(value):
        raise BadItem("wrong type", '"gt_answer" is not a finite number')
    return value if not isinstance(value, int) or value in WORD_64 else str(value)


def _id(row: Mapping[str, Any], number: int) -> str:
    value = number if row.get("id") is None else row["id"]
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        shown = "empty" if value == "" else f"a {_kind(value)}"
        raise BadItem("wrong type", f'"id" is {shown}; a text or a whole number is expected')
    return str(value)


def _messages(row: Mapping[str, Any]) -> list[Message]:
    value = row.get("messages")
    if value is None:
        raise BadItem("empty prompt", '"messages" is missing')
    if isinstance(value, str):
        value = {"role": "user", "content": value}
    rows = [value] if isinstance(value, dict) else value
    if not isinstance(rows, list):
        raise BadItem(
            "wrong type", f'"messages" is a {_kind(value)}; a text, a message or a list of messages is expected'
        )
    for message in rows:
        if not isinstance(message, dict):
            raise BadItem("wrong type", f'"messages" holds a {_kind(message)} where a message is expected')
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise BadItem("wrong type", f'a message whose "{key}" is a {_kind(message.get(key))}, not a text')
    return [{"role": message["role"], "content": message["content"]} for message in rows]


def _kind(value: object) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "text", list: "list", dict: "object"}
    return names.get(type(value), "null")


def plain(value: Any) -> Any:
    """The JSON value with whole numbers beyond 64 bits as text, which is all that msgpack lacks."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return str(value) if type(value) is int and value not in WORD_64 else value


# --- procedural sources
def demo_items(config: DataConfig) -> Iterator[Draft | Bad]:
    """`size` seeded sums and differences; option max_operand."""
    from nbehind.demo_task import MAX_OPERAND, draw_problems

    check_options("demo", config.options, ["max_operand"])
    most = config.options.get("max_operand", MAX_OPERAND)
    if type(most) is not int or not 0 <= most <= 999:
        raise DataError(f"data.options.max_operand = {most!r}: must be a whole number from 0 to 999")
    for index, problem in enumerate(draw_problems(config.size, config.seed, most)):
        messages = [{"role": "user", "content": problem.question}]
        yield Draft(f"demo item {index}", f"demo-{index}", messages, {"gt_answer": problem.answer})


def gym_items(config: DataConfig) -> Iterator[Draft | Bad]:
    """`size` seeded entries of a reasoning-gym task, each with what its verifier needs, in plain types."""
    from producer_svc.rewards.gym_entry import encode_entry

    task = config.source.removeprefix(GYM_PREFIX)
    dataset = _gym_dataset(task, config)
    for index in range(config.size):
        where = f"{config.source} item {index}"
        try:
            entry = dataset[index]
            sent = encode_entry({key: entry[key] for key in ("question", "answer", "metadata")})
            if index == 0:
                _check_verifier(config.source, dataset, sent)
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001  # becomes a bad item
            reason = f"{type(error).__name__}: {error}"
            yield Bad(where, "not made by the task", reason)
            continue
        payload = {
            "gt_answer": "" if entry["answer"] is None else str(entry["answer"]),
            GYM_KEY: {"task": task, "options": dict(config.options), "entry": sent},
        }
        yield Draft(where, f"{task}-{index}", [{"role": "user", "content": entry["question"]}], payload)


def _check_verifier(source: str, dataset: Any, sent: Any) -> None:
    """The verifier must accept the right answer with the entry as it will arrive. (Some tasks have no one answer.)"""
    from producer_svc.rewards.gym_entry import decode_entry

    entry = decode_entry(sent)
    if entry["answer"] is None:
        return
    score = dataset.score_answer(entry["answer"], entry)
    if score != 1.0:
        raise DataError(f"data.source = {source}: its verifier gives {score} for its own answer; take another task")


def _gym_dataset(task: str, config: DataConfig) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError(f"data.source = {config.source} needs the package reasoning_gym: {error}") from error
    if task in GYM_REFUSED:
        raise DataError(f"data.source = {config.source} cannot be used: {GYM_REFUSED[task]}")
    names = sorted(set(DATASETS) - set(GYM_REFUSED))
    if task not in names:
        near = difflib.get_close_matches(task, names, n=3, cutoff=0.5) or names[:3]
        raise DataError(f"data.source = {config.source}: no such task; did you mean {' or '.join(near)}?")
    known = [f.name for f in dataclasses.fields(DATASETS[task][1]) if f.name not in ("size", "seed")]
    check_options(task, config.options, known)
    try:
        return reasoning_gym.create_dataset(task, size=config.size, seed=config.seed, **config.options)
    except Exception as error:
        raise DataError(f"data.options = {config.options} does not suit {task}: {error}") from error


def check_options(source: str, options: Mapping[str, Any], known: list[str]) -> None:
    """DataError with the nearest name for an option that the source does not have."""
    for name in options:
        if name in ("size", "seed"):
            raise DataError(f"data.options.{name}: set data.{name} instead")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"{source} has {', '.join(known) or 'none'}"
            raise DataError(f"data.options.{name}: {source} has no such option; {hint}")
