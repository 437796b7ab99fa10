"""Config loading: overrides, names, limits, rules between keys, paths, and TOML out."""

from __future__ import annotations

import datetime
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbehind.config import Config
from nbehind.config_docs import allowed, markdown_table, with_table
from nbehind.config_load import config_of, dump_config, field_at, load_config
from nbehind.config_rules import check
from nbehind.config_toml import literal, toml_document, toml_value
from nbehind.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def problems_of(tables: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        config_of(tables, "x")
    return [p.removeprefix("x: ") for p in error.value.problems]


def write(folder: Path, text: str, name: str = "a.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_defaults_are_a_config_that_can_run() -> None:
    assert check(Config()) == []
    assert config_of({}) == Config()


def test_dump_and_load_give_the_same_config(tmp_path: Path) -> None:
    odd = {"text": 'q"\\ \n\t\x7f é', "list": [1, 2.5, True], "table": {"a b": {"c": "d"}}, "big": 2**70}
    config = config_of(
        {"data": {"options": odd, "source": "reasoning_gym:x"}, "trainer": {"lr": 1e-7, "betas": [0.8, 0.95]}}
    )
    assert load_config(write(tmp_path, dump_config(config))) == config


def test_overrides_are_toml_values_or_text(tmp_path: Path) -> None:
    path = write(tmp_path, "[data.options]\na = 1\n")
    sets = [
        "run.max_steps=7",
        "run.name=2024",
        "data.options.b=[1, 2]",
        "data.source=reasoning_gym:chain_sum",
        "trainer.betas=[0.5,0.6]",
    ]
    config = load_config(path, [*sets, "algo.loss = sample", "data.shuffle=false", "data.system_prompt=a = b"])
    assert config.run.max_steps == 7
    assert config.run.name == "2024"
    assert config.data.options == {"a": 1, "b": [1, 2]}
    assert config.trainer.betas == (0.5, 0.6)
    assert config.algo.loss == "sample"
    assert config.data.shuffle is False
    assert config.data.system_prompt == "a = b"


def test_a_later_override_wins_and_a_literal_cannot_smuggle_in_a_key(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    assert load_config(path, ["run.seed=1", "run.seed=2"]).run.seed == 2
    assert literal("1\nother = 2") == "1\nother = 2"


@pytest.mark.parametrize("text", ["max_steps=3", "run.max_steps", "=3", ".a=3", "run.=3", "run=3", ""])
def test_malformed_overrides(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"write section.key=value, such as --set run.max_steps=10"):
        load_config(write(tmp_path, ""), [text])


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"run": {"max_step": 3}}, "unknown key run.max_step; did you mean run.max_steps?"),
        ({"sampling": {"lr": 3}}, "unknown key sampling.lr; did you mean trainer.lr?"),
        ({"traner": {}}, "unknown section or key 'traner'; did you mean [trainer]?"),
        ({"max_steps": 3}, "unknown section or key 'max_steps'; did you mean run.max_steps?"),
        ({"threads": 3}, "unknown section or key 'threads'; did you mean trainer.threads or producer.threads?"),
        ({"run": 5}, "run = 5: must be a section, [run]"),
        ({"run": {"n_behind": -1}}, "run.n_behind = -1: must be a whole number ≥ 0"),
        ({"run": {"max_steps": 1.5}}, "run.max_steps = 1.5: must be a whole number ≥ 0"),
        ({"run": {"max_steps": "5"}}, 'run.max_steps = "5": must be a whole number ≥ 0'),
        ({"run": {"max_steps": True}}, "run.max_steps = true: must be a whole number ≥ 0"),
        ({"sampling": {"top_p": 1.5}}, "sampling.top_p = 1.5: must be a number > 0 and ≤ 1"),
        ({"trainer": {"lr": float("nan")}}, "trainer.lr = nan: must be a number > 0"),
        ({"trainer": {"lr": float("inf")}}, "trainer.lr = inf: must be a finite number"),
        ({"trainer": {"betas": [0.9]}}, "trainer.betas.1 = [0.9]: must be a list of 2 numbers"),
        ({"trainer": {"betas": [0.9, 1.0]}}, "trainer.betas = [0.9, 1.0]: both must be ≥ 0 and < 1"),
        ({"algo": {"loss": "tokens"}}, 'algo.loss = "tokens": must be one of "token", "sample"'),
        (
            {"run": {"name": "../evil"}},
            'run.name = "../evil": must be a text of the form ^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$',
        ),
        ({"sync": {"bucket_mb": 1e-7}}, "sync.bucket_mb = 1e-07: must be a number ≥ 0.0625 and ≤ 16384"),
        ({"sync": {"bucket_mb": 1e30}}, "sync.bucket_mb = 1e+30: must be a number ≥ 0.0625 and ≤ 16384"),
        ({"sync": {"join_timeout_s": 1e20}}, "sync.join_timeout_s = 1e+20: must be a number ≥ 0.1 and ≤ 86400"),
        ({"sync": {"transfer_timeout_s": 1e-6}}, "sync.transfer_timeout_s = 1e-06: must be a number ≥ 0.1 and ≤ 86400"),
        ({"data": {"options": 3}}, "data.options = 3: must be a table"),
        ({"lora": {"target_modules": "q_proj"}}, 'lora.target_modules = "q_proj": must be a list of texts'),
    ],
)
def test_each_problem_names_key_value_and_what_is_allowed(tables: dict[str, Any], message: str) -> None:
    assert message in problems_of(tables)


def test_all_problems_come_at_once() -> None:
    found = problems_of({"run": {"n_behind": -1, "nbehind": 2, "seed": "x"}, "algo": {"loss": 3}})
    assert [p.split(" =")[0].split(";")[0] for p in found] == [
        "unknown key run.nbehind",
        "run.seed",
        "run.n_behind",
        "algo.loss",
    ]


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"sampling": {"num_generations": 1}}, ["algo.advantage", "sampling.num_generations = 1", "at least 2"]),
        (
            {"trainer": {"updates_per_step": 3}},
            ["sampling.groups_per_step = 16", "multiple of trainer.updates_per_step = 3"],
        ),
        ({"sampling": {"max_new_tokens": 512}}, ["sampling.max_new_tokens = 512", "below model.max_context = 512"]),
        (
            {"trainer": {"tokens_per_micro_batch": 256}},
            ["trainer.tokens_per_micro_batch = 256", "model.max_context = 512"],
        ),
        ({"run": {"publish_every": 3}}, ["run.publish_every = 3", "run.n_behind + 1 = 2"]),
        ({"run": {"max_steps": 0}}, ["run.max_steps = 0", "data.epochs = 0"]),
        ({"model": {"path": "fake"}}, ['model.path = "fake"', 'trainer.engine = "torch"', 'producer.backend = "vllm"']),
        (
            {
                "model": {"path": "fake"},
                "trainer": {"engine": "fake"},
                "producer": {"backend": "fake"},
                "lora": {"rank": 4},
            },
            ["lora.rank = 4", 'trainer.engine = "torch"'],
        ),
        ({"producer": {"lease_s": 300}}, ["producer.lease_s = 300.0", "producer.request_timeout_s = 300.0"]),
        ({"run": {"stall_s": 1800}}, ["run.stall_s = 1800.0", "run.give_up_s = 1800.0"]),
        ({"metrics": {"trainer_port": 9001, "producer_port": 9000}}, ["metrics.trainer_port = 9001", "9000 to 9001"]),
        ({"metrics": {"producer_port": 65535}}, ["metrics.producer_port = 65535", "producer.count = 2", "65536"]),
        ({"redis": {"url": "http://x"}}, ['redis.url = "http://x"', "must begin with redis://"]),
        ({"redis": {"url": "redis://h:abc"}}, ["not a URL"]),
        ({"redis": {"tls_ca": "ca.pem"}}, ["redis.tls_ca", "rediss://"]),
        ({"redis": {"max_body_mb": 0.01}}, ["redis.max_body_mb = 0.01", "sampling.num_generations = 8"]),
        (
            {"run": {"n_behind": 2000}},
            ["redis.embedded_max_mb = 1024.0", "run.n_behind = 2000", "redis.retention_mb = 256.0"],
        ),
        ({"data": {"source": "a.jsonl", "options": {"a": 1}}}, ["data.options", 'data.source = "a.jsonl"']),
        (
            {"producer": {"tensor_parallel": 2, "backend": "transformers"}},
            ["producer.tensor_parallel = 2", '"transformers"'],
        ),
    ],
)
def test_rules_between_keys_name_keys_and_values(tables: dict[str, Any], words: list[str]) -> None:
    (problem,) = problems_of(tables)
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cret@h:1",
        "redis://u:s3cret@h",
        "redis://u:s3@cret@h/0",
        "redis://h?password=s3cret",
        "redis://:s3cret@h:x",
    ],
)
def test_a_password_in_the_url_is_refused_and_not_repeated(url: str) -> None:
    (problem,) = problems_of({"redis": {"url": url}})
    assert "s3" not in problem
    assert "cret" not in problem


def test_paths_in_the_file_count_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, here = tmp_path / "conf", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    for name in ("data.jsonl", "rewards.py", "model", "demo"):
        (folder / name).write_text("")
    (here / "mine.jsonl").write_text("")
    monkeypatch.chdir(here)
    text = '[data]\nsource = "data.jsonl"\n[model]\npath = "model"\n[reward]\nname = "rewards.py:score"\n'
    path = write(folder, text)
    config = load_config(path)
    assert config.data.source == str(folder / "data.jsonl")
    assert config.model.path == str(folder / "model")
    assert config.reward.name == f"{folder / 'rewards.py'}:score"
    assert config.run.dir == Path("runs")
    assert load_config(path, ["data.source=mine.jsonl"]).data.source == str(here / "mine.jsonl")
    assert load_config(path, ["model.path=demo"]).model.path == "demo", "a built-in name is never a file"
    assert load_config(path, ["data.source=missing.jsonl"]).data.source == "missing.jsonl"
    assert load_config(path, [f"data.source={'x' * 5000}"]).data.source == "x" * 5000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[run\n", "not valid TOML: .*line 1"),
        (b"[run]\nname = 'a'\nname = 'b'\n", "not valid TOML"),
        (b"\xff\xfe", "not UTF-8 text .byte 0."),
    ],
)
def test_files_that_are_not_toml(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    write(tmp_path, "", "demo.toml")
    with pytest.raises(ConfigError, match=r"no such file; did you mean .*demo.toml"):
        load_config(tmp_path / "demp.toml")
    with pytest.raises(ConfigError, match="no such file; give the path"):
        load_config(tmp_path / "none" / "a.toml")
    with pytest.raises(ConfigError, match="a folder"):
        load_config(tmp_path)


def test_bom_crlf_and_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xef\xbb\xbf[run]\r\nseed = 3\r\n")
    assert load_config(path).run.seed == 3
    path.write_bytes(b"")
    assert load_config(path) == Config()


VALUES = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), VALUES, max_size=4))
def test_toml_out_is_read_back_equal(values: dict[str, Any]) -> None:
    assert tomllib.loads(toml_document({"section": values}))["section"] == values


def test_toml_dates_paths_and_what_has_no_form() -> None:
    day = datetime.date(2026, 1, 31)
    assert tomllib.loads(f"a = {toml_value(day)}")["a"] == day
    assert toml_value(Path("a/b")) == '"a/b"'
    with pytest.raises(TypeError, match="NoneType has no form"):
        toml_value(None)


def test_every_key_has_words_for_what_it_allows_and_a_meaning() -> None:
    table = markdown_table()
    keys = [(s, k) for s in Config.model_fields for k in type(getattr(Config(), s)).model_fields]
    assert len(keys) > 80
    for section, key in keys:
        field = field_at((section, key))
        assert field is not None
        assert allowed(field)
        assert field.description
        assert f"| `{section}.{key}` |" in table


def test_the_table_in_the_readme_is_up_to_date() -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme == with_table(readme), "run: python -m nbehind.config_docs README.md"


def test_a_document_without_markers() -> None:
    with pytest.raises(ValueError, match="configuration: begin"):
        with_table("# nothing here")
