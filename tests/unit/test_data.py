"""Data sets: every fault is named with file and line; what is loaded survives the wire."""

from __future__ import annotations

import json
import logging
import os
from datetime import date, timedelta
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbehind.config import DataConfig
from nbehind.tokenizer import ByteTokenizer
from producer_svc.rewards.gym_entry import NotPlain, decode_entry, encode_entry
from trainer_svc import data_sources
from trainer_svc.data import Item, load_items
from trainer_svc.errors import DataError

ROOT = Path(__file__).resolve().parents[2]


def load(source: object, most: int = 10_000, **config: Any) -> list[Item]:
    return load_items(DataConfig(source=str(source), **config), ByteTokenizer(), most)


@pytest.fixture
def write(tmp_path: Path):
    def write(*lines: Any, end: bytes = b"\n") -> Path:
        path = tmp_path / "data.jsonl"
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        path.write_bytes(end.join(raw))
        return path

    return write


def row(messages: Any = "2+3", answer: Any = 5, **rest: Any) -> dict[str, Any]:
    return {"messages": messages, "gt_answer": answer, **rest}


def through_the_wire(value: Any) -> Any:
    return msgpack.unpackb(msgpack.packb(value), strict_map_key=True)


def test_the_three_forms_of_messages_and_the_rest_of_the_line(write) -> None:
    one = {"role": "user", "content": "b"}
    two = [{"role": "system", "content": "s"}, {"role": "user", "content": "ü", "name": "dropped"}]
    items = load(write(row("a", "x", level=3), row(one, 2.5, id=7), row(two, 10**30, id="k", tags=["t", 10**40])))
    assert [item.id for item in items] == ["1", "7", "k"]
    assert [item.payload["messages"] for item in items[:2]] == [[{"role": "user", "content": "a"}], [one]]
    assert items[2].payload["messages"] == [two[0], {"role": "user", "content": "ü"}]
    assert [item.payload["gt_answer"] for item in items] == ["x", 2.5, str(10**30)]
    assert items[0].payload["level"] == 3
    assert items[2].payload["tags"] == ["t", str(10**40)]
    assert items[2].prompt_ids.dtype == np.int32
    assert bytes(items[2].prompt_ids.tolist()).decode() == "s\nü"
    assert through_the_wire(items[2].payload) == items[2].payload


def test_bom_crlf_blank_lines_and_no_newline_at_the_end(write) -> None:
    path = write(b"\xef\xbb\xbf" + json.dumps(row("a")).encode(), b"", b"   ", row("b"), end=b"\r\n")
    assert [item.id for item in load(path)] == ["1", "4"]


def test_a_system_prompt_only_where_there_is_none(write) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "b"}]
    items = load(write(row("a"), row(own)), system_prompt="be brief")
    assert items[0].payload["messages"][0] == {"role": "system", "content": "be brief"}
    assert items[1].payload["messages"] == own


BAD: list[tuple[Any, str]] = [
    (b"{not json", "invalid JSON"),
    (b'{"messages": "a", "gt_answer": NaN}', "invalid JSON"),
    (b"[" * 100_000, "invalid JSON"),
    (b'{"messages": "\xff", "gt_answer": 1}', "invalid UTF-8"),
    (json.dumps(row()).encode("utf-16"), "invalid UTF-8"),
    ([row()], "wrong type"),
    (row(answer=True), "wrong type"),
    (row(answer=[1]), "wrong type"),
    (b'{"messages": "a", "gt_answer": 1e999}', "wrong type"),
    (row(messages=3), "wrong type"),
    (row(messages=["a"]), "wrong type"),
    (row(messages=[{"role": "user"}]), "wrong type"),
    (row(messages=[{"role": "user", "content": None}]), "wrong type"),
    (row(id=1.5), "wrong type"),
    (row(id=""), "wrong type"),
    ({"messages": "a"}, "missing answer"),
    (row(answer=None), "missing answer"),
    (row(answer=" "), "empty answer"),
    ({"gt_answer": 1}, "empty prompt"),
    (row(messages=" \n"), "empty prompt"),
    (row(messages=[]), "empty prompt"),
    (row(messages=[{"role": "system", "content": "only this"}]), "empty prompt"),
    (row(messages="x" * 51), "over-long prompt"),
    (row(id="first"), "duplicate id"),
    (row(messages="\ud800"), "cannot be sent"),
    (row(deep=json.loads("[" * 40 + "]" * 40)), "cannot be sent"),
]


@pytest.mark.parametrize(("line", "kind"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_every_fault_is_named_with_file_and_line_or_skipped(write, caplog, line: Any, kind: str) -> None:
    path = write(row(id="first"), b"", line, row(id="last"))
    with pytest.raises(DataError) as error:
        load(path, most=50)
    assert f"{path}:3: {kind}: " in str(error.value)
    assert f"1 of 3 items cannot be used (1 {kind})" in str(error.value)
    assert 'data.on_bad_item = "skip"' in str(error.value)
    with caplog.at_level(logging.WARNING):
        assert [item.id for item in load(path, most=50, on_bad_item="skip")] == ["first", "last"]
    assert f"{path}:3: {kind}" in caplog.text


def test_many_faults_are_counted_and_only_the_first_are_listed(write) -> None:
    path = write(*[row("") for _ in range(50)], *[row("a", "") for _ in range(5)], row())
    with pytest.raises(DataError, match=r"55 of 56 items cannot be used \(50 empty prompt, 5 empty answer\)") as error:
        load(path)
    assert str(error.value).count("data.jsonl:") == 1 + 20
    assert "and 35 more" in str(error.value)


def test_a_line_number_as_default_id_that_is_taken(write) -> None:
    with pytest.raises(DataError, match=r"data.jsonl:2: duplicate id: id '2' is that of .*data.jsonl:1"):
        load(write(row(id="2"), row()))


def test_a_too_long_line_is_passed_over_without_being_held(write, monkeypatch) -> None:
    monkeypatch.setattr(data_sources, "MAX_LINE_BYTES", 100)
    path = write(row(), row("x" * 1000), row("b"))
    with pytest.raises(DataError, match=r"data\.jsonl:2: line too long"):
        load(path)
    assert [item.id for item in load(path, on_bad_item="skip")] == ["1", "3"]


def test_progress_of_a_large_file_is_logged(write, caplog) -> None:
    path = write(*[b'{"messages": "a", "gt_answer": 1}'] * 20_001)
    with caplog.at_level(logging.INFO):
        assert len(load(path)) == 20_001
    assert "10000 items read" in caplog.text
    assert "20000 items read" in caplog.text


@pytest.mark.parametrize("content", [b"", b"\n\r\n  \n", b"\xef\xbb\xbf"])
def test_an_empty_file(write, content: bytes) -> None:
    with pytest.raises(DataError, match="is empty: it needs at least one item"):
        load(write(content))


def test_nothing_left_after_skipping(write) -> None:
    with pytest.raises(DataError, match="so none is left"):
        load(write(row("")), on_bad_item="skip")


def test_sources_that_are_no_files(tmp_path: Path, write) -> None:
    path = write(row())
    with pytest.raises(DataError, match=r"is a folder: name a file in it, such as .*data\.jsonl"):
        load(tmp_path)
    with pytest.raises(DataError, match=r"no such file; did you mean .*data\.jsonl"):
        load(tmp_path / "dat.jsonl")
    with pytest.raises(DataError, match="did you mean demo"):
        load("dmo")
    with pytest.raises(DataError, match=r'give a \.jsonl file, "demo" or "reasoning_gym:TASK"'):
        load("/nowhere/at/all")
    for odd in ("x" * 5000, "a\0b", ""):
        with pytest.raises(DataError, match=r"data\.source"):
            load(odd)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is no regular file"):
        load(tmp_path / "pipe")
    with pytest.raises(DataError, match="has no meaning for the file"):
        load(path, options={"a": 1})


def test_the_example_can_be_loaded() -> None:
    assert len(load(ROOT / "examples" / "data" / "arithmetic.jsonl")) == 8


def test_demo_is_seeded_and_checks_its_options() -> None:
    first, again, other = load("demo", size=50), load("demo", size=50), load("demo", size=50, seed=1)
    texts = [[item.payload["messages"][0]["content"] for item in items] for items in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]
    assert len({item.id for item in first}) == 50
    assert {item.payload["gt_answer"] for item in load("demo", size=20, options={"max_operand": 0})} == {"0"}
    with pytest.raises(DataError, match="did you mean max_operand"):
        load("demo", options={"max_operant": 3})
    with pytest.raises(DataError, match=r"data.options.size: set data.size instead"):
        load("demo", options={"size": 3})
    with pytest.raises(DataError, match="must be a whole number from 0 to 999"):
        load("demo", options={"max_operand": True})


# --- reasoning-gym
TASKS = (
    "basic_arithmetic", "bitwise_arithmetic", "boxnet", "calendar_arithmetic", "chain_sum", "complex_arithmetic",
    "countdown", "course_schedule", "fraction_simplification", "game_of_life", "gcd", "graph_color", "knights_knaves",
    "leg_counting", "maze", "n_queens", "polynomial_equations", "propositional_logic", "rotate_matrix", "rush_hour",
    "simple_geometry", "simple_integration", "spiral_matrix", "sudoku", "time_intervals", "zebra_puzzles",
)  # fmt: skip
WITHOUT_ONE_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rush_hour"}


@pytest.mark.parametrize("task", TASKS)
def test_the_verifier_sees_the_same_entry_behind_the_wire(task: str) -> None:
    import reasoning_gym

    items = load(f"reasoning_gym:{task}", 10**7, size=2, seed=5)
    dataset = reasoning_gym.create_dataset(task, size=2, seed=5)
    for index, item in enumerate(items):
        sent = through_the_wire(item.payload)["reasoning_gym"]
        entry = decode_entry(sent["entry"])
        original = dataset[index]
        assert entry["metadata"] == original["metadata"]
        assert (sent["task"], item.id) == (task, f"{task}-{index}")
        if original["answer"] is None:
            assert task in WITHOUT_ONE_ANSWER
            assert item.payload["gt_answer"] == ""
        else:
            assert dataset.score_answer(entry["answer"], entry) == 1.0
            assert item.payload["gt_answer"] == original["answer"]


def test_reasoning_gym_options_reach_the_task() -> None:
    items = load("reasoning_gym:chain_sum", size=3, options={"min_terms": 4, "max_terms": 4})
    assert all(item.payload["reasoning_gym"]["options"] == {"min_terms": 4, "max_terms": 4} for item in items)
    assert all(sum(c in "+-" for c in i.payload["messages"][0]["content"].split("?")[0][-40:]) >= 3 for i in items)


@pytest.mark.parametrize(
    ("task", "options", "said"),
    [
        ("chain_sums", {}, "no such task; did you mean .*chain_sum"),
        ("", {}, "no such task; did you mean"),
        ("composite", {}, "its verifier needs the objects of its parts"),
        ("codeio", {}, "it runs code snippets"),
        ("chain_sum", {"min_term": 3}, "did you mean min_terms"),
        ("chain_sum", {"seed": 3}, "set data.seed instead"),
        ("chain_sum", {"min_terms": -3}, "does not suit chain_sum: min_terms must be positive"),
        ("chain_sum", {"min_terms": "a"}, "does not suit chain_sum"),
    ],
)
def test_reasoning_gym_refusals(task: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        load(f"reasoning_gym:{task}", size=2, options=options)


class Colour(str, Enum):  # noqa: UP042  # whose str() is not its text
    RED = "red"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({1: (2, {3}), "~a": None, "b": {(1, 2): 10**30}}, None),
        ([Fraction(1, 3), 1 + 2j, date(2024, 2, 29), timedelta(days=1, seconds=2), -(10**40), b"x"], None),
        ({}, None),
        (np.float64(0.5), 0.5),
        (np.array([[1, 2]]), [[1, 2]]),
        ([np.str_("a"), Colour.RED, np.int64(3), np.bool_(True)], ["a", "red", 3, True]),
    ],
)
def test_entries_survive_in_plain_types(value: Any, expected: Any) -> None:
    back = decode_entry(through_the_wire(encode_entry(value)))
    assert back == (value if expected is None else expected)
    assert type(back) is type(value if expected is None else expected)


def test_what_has_no_plain_form_is_refused() -> None:
    with pytest.raises(NotPlain, match="object, which cannot be sent"):
        encode_entry({"a": [object()]})
    with pytest.raises(ValueError, match="unknown mark"):
        decode_entry({"~import": "os"})


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.fractions()
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.tuples(st.integers()), inner)
        | st.just("~map")
    ),
    max_leaves=12,
)


@given(trees)
def test_any_tree_of_plain_types_survives(value: Any) -> None:
    back = decode_entry(encode_entry(value))
    assert back == value
    assert repr(back) == repr(value)
