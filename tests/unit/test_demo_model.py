"""The demo's task and the parts of its model that need no training."""

from __future__ import annotations

import dataclasses
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbehind.config_load import load_config
from nbehind.config_rules import check
from nbehind.demo_model import CHAT_TEMPLATE, EOS, RECIPE, Examples, build, make_model, make_tokenizer, skill
from nbehind.demo_task import Problem, draw_problems, every_problem, make_problem
from nbehind.tokenizer import HFTokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_problems_are_right() -> None:
    assert make_problem(7, "+", 8) == Problem("7+8", "15")
    assert make_problem(3, "-", 9) == Problem("3-9", "-6")
    assert len(set(every_problem())) == 200
    assert len(every_problem(max_operand=1)) == 8


def test_an_unknown_operator_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be \+ or -"):
        make_problem(1, "*", 2)


def test_draws_are_seeded_and_go_through_all_problems_before_one_comes_again() -> None:
    first = list(draw_problems(450, seed=3))
    assert first == list(draw_problems(450, seed=3))
    assert first[:100] == list(islice(draw_problems(10**9, seed=3), 100))
    assert first != list(draw_problems(450, seed=4))
    assert sorted(p.question for p in first[:200]) == sorted(p.question for p in every_problem())
    assert set(first[200:400]) == set(every_problem())
    assert list(draw_problems(0, seed=3)) == []


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@settings(deadline=None)
@given(text=st.text())
def test_every_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    if "<|" not in text:
        assert len(ids) == len(text.encode())


def test_the_chat_ends_where_the_answer_begins(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = HFTokenizer(tmp_path)
    system = {"role": "system", "content": "s"}
    ids = tokenizer.encode_chat([system, {"role": "user", "content": "7+8"}])
    ends = make_tokenizer().convert_tokens_to_ids([EOS])
    assert tokenizer.eos_ids == tuple(ends)
    assert tokenizer.decode(ids) == "s7+8"
    special = make_tokenizer().convert_tokens_to_ids(["<|system|>", "<|user|>", "<|assistant|>"])
    assert [i for i in ids if i > 255] == [special[0], ends[0], special[1], ends[0], special[2]]
    assert "add_generation_prompt" in CHAT_TEMPLATE


def test_only_the_answer_and_its_end_are_learnt() -> None:
    tokenizer = make_tokenizer()
    ids, labels = Examples(tokenizer)([Problem("1+1", "2"), Problem("9+9", "18")])
    assert ids.shape == labels.shape == (2, 9)  # user, 3 characters, end, assistant, 2 digits, end
    learnt = [tokenizer.decode(row[row >= 0]) for row in labels]
    assert learnt == ["2" + EOS, "18" + EOS]
    assert int(ids[0, -1]) == tokenizer.pad_token_id


def test_skill_of_a_model_that_knows_nothing_is_small() -> None:
    tokenizer = make_tokenizer()
    model = make_model(RECIPE, tokenizer)
    value = skill(model, *Examples(tokenizer)(every_problem()[:10]))
    assert 0 < value < 0.01


def test_the_digest_depends_on_every_part_of_the_recipe() -> None:
    digests = {RECIPE.digest()}
    for field in dataclasses.fields(RECIPE):
        value = getattr(RECIPE, field.name)
        changed = (value[0], 1.0) if isinstance(value, tuple) else value + 1
        digests.add(dataclasses.replace(RECIPE, **{field.name: changed}).digest())
    assert len(digests) == len(dataclasses.fields(RECIPE)) + 1


def test_a_warm_up_that_does_not_succeed_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, hidden=64, heads=2, layers=1, known_updates=2)
    with pytest.raises(RuntimeError, match="did not learn its task in 2 updates"):
        build(tmp_path / "model", recipe)
    assert not (tmp_path / "model").exists()


def test_building_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(3), random.random()
    torch.manual_seed(5)
    random.seed(5)
    with pytest.raises(RuntimeError):
        build(tmp_path / "model", dataclasses.replace(RECIPE, hidden=64, heads=2, layers=1, known_updates=1))
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


@pytest.mark.parametrize("name", sorted(p.name for p in EXAMPLES.glob("*.toml")))
def test_examples_are_valid_configs(name: str) -> None:
    config = load_config(EXAMPLES / name)
    assert check(config) == []


def test_there_are_the_examples_that_are_documented() -> None:
    assert {p.stem for p in EXAMPLES.glob("*.toml")} >= {"demo", "smollm2", "fake", "own_data"}
