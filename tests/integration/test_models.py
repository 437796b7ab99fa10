"""Model folders: made once, whole or not at all, by any number of processes; checked where they are given."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nbehind import demo_model, models
from nbehind.demo_model import RECIPE
from nbehind.errors import InputError, StartError
from nbehind.models import check_model_folder, default_cache, prepare_model
from nbehind.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0
PREPARE = "import sys, logging; from pathlib import Path; from nbehind.models import prepare_model; logging.basicConfig(level='INFO'); print(prepare_model(sys.argv[1], Path(sys.argv[2])))"


def start(name: str, cache: Path) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, name, str(cache)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**env, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, list[str]]]:
    """(cache, folder, errors of both): made by two processes at once, after one that was killed in the middle."""
    cache = tmp_path_factory.mktemp("cache")
    killed = start("demo", cache)
    deadline = time.monotonic() + DEADLINE_S
    assert killed.stderr is not None and killed.stdout is not None
    while "making the model" not in killed.stderr.readline():
        assert time.monotonic() < deadline
    killed.send_signal(signal.SIGKILL)
    killed.wait(DEADLINE_S)
    killed.stderr.close()
    killed.stdout.close()
    (cache / f".demo-{RECIPE.digest()}.tmp-1").mkdir()  # as if it had died while writing
    both = [start("demo", cache) for _ in range(2)]
    outs = [p.communicate(timeout=DEADLINE_S) for p in both]
    assert [p.returncode for p in both] == [0, 0], outs
    folders = {Path(out.strip()) for out, _ in outs}
    assert len(folders) == 1
    yield cache, folders.pop(), [err for _, err in outs]


@pytest.mark.timeout(600)
def test_two_processes_make_it_once_and_leave_nothing_else(demo: tuple[Path, Path, list[str]]) -> None:
    cache, folder, errors = demo
    assert sum("making the model" in e for e in errors) == 1
    assert folder.parent == cache
    assert sorted(p.name for p in cache.iterdir()) == sorted([folder.name, f".{folder.name}.lock"])


def test_the_demo_model_is_partly_skilled_and_loads_everywhere(demo: tuple[Path, Path, list[str]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from nbehind.demo_task import every_problem

    _, folder, _ = demo
    check_model_folder(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids, labels = demo_model.Examples(tokenizer)(every_problem())
    low, high = RECIPE.skill
    assert low <= demo_model.skill(model, ids, labels) <= high
    assert model.config.tie_word_embeddings
    assert model.config.hidden_size // model.config.num_attention_heads in (32, 64)  # what vLLM takes on CPU
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert load_tokenizer("demo", folder).eos_ids == (tokenizer.eos_token_id,)


def test_the_second_time_it_is_only_looked_up(demo: tuple[Path, Path, list[str]]) -> None:
    cache, folder, _ = demo
    said: list[str] = []
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare_model("demo", cache, said.append) == folder
    assert said == []
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_copy_of_it_is_a_model_folder_until_something_is_missing(
    demo: tuple[Path, Path, list[str]], tmp_path: Path
) -> None:
    _, folder, _ = demo
    copy = tmp_path / "model"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert prepare_model(str(copy)) == copy
    for name, complaint in (
        ("tokenizer.json", "lacks a tokenizer"),
        ("model.safetensors", "lacks model.safetensors"),
        ("config.json", "lacks config.json"),
    ):
        kept = (copy / name).read_bytes()
        (copy / name).unlink()
        with pytest.raises(InputError, match=complaint):
            prepare_model(str(copy))
        (copy / name).write_bytes(kept)
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part-2.safetensors"}}))
    with pytest.raises(InputError, match=r"lacks part-2\.safetensors"):
        prepare_model(str(copy))


@pytest.mark.parametrize(
    "text", ["not json", "[]", "{}", '{"model_type": "llama", "quantization_config": {"bits": 4}}']
)
def test_a_config_that_is_of_no_use_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=f"model.path = {tmp_path}"):
        prepare_model(str(tmp_path))


def test_an_unknown_model_names_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="no such folder; give a folder in Hugging Face format, or one of demo, smollm2, fake"
    ):
        prepare_model("Qwen/Qwen2-7B", tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError, match="is a file"):
        prepare_model(str(file), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_fake_needs_and_makes_nothing(tmp_path: Path) -> None:
    assert prepare_model("fake", tmp_path / "cache") == tmp_path / "cache" / "fake"
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    blocked = tmp_path / "cache"
    blocked.write_text("a file where the folder should be")
    with pytest.raises(StartError, match="set NBEHIND_CACHE"):
        prepare_model("demo", blocked)


@pytest.mark.parametrize(
    ("error", "complaint"),
    [(ImportError("No module named 'gguf'"), "needs a package that is missing"), (RuntimeError("skill 0.02"), "could not be made: skill 0.02"), (OSError(28, "No space left on device"), "free some space")],
)  # fmt: skip
def test_a_build_that_fails_says_why_and_leaves_nothing(tmp_path: Path, error: Exception, complaint: str) -> None:
    def build(folder: Path, say: Callable[[str], None]) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{")
        raise error

    with pytest.raises(StartError, match=complaint):
        models._made_once(tmp_path / "made-1", build, lambda line: None)
    assert [p.name for p in tmp_path.iterdir()] == [".made-1.lock"]


def test_the_cache_can_be_put_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NBEHIND_CACHE", raising=False)
    assert default_cache() == Path(".cache")
    monkeypatch.setenv("NBEHIND_CACHE", str(tmp_path))
    assert prepare_model("fake") == tmp_path / "fake"


def test_waiting_for_a_lock_that_is_never_released_ends(tmp_path: Path) -> None:
    path = tmp_path / ".demo-x.lock"
    said: list[str] = []
    with path.open("a") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(StartError, match="was held for"), models._locked(path, said.append, timeout_s=0.3):
            pass
    assert said == ["waiting for another process that makes demo-x"]


@pytest.mark.timeout(900)
def test_smollm2_is_converted_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """In the cache of the working tree when there is one already, since it takes a while and half a gigabyte."""
    pytest.importorskip("gguf")
    cache = default_cache() if (default_cache() / "smollm2-1").is_dir() else tmp_path_factory.mktemp("cache")
    folder = prepare_model("smollm2", cache)
    check_model_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["tie_word_embeddings"] and config["dtype"] == "float32"
    tokenizer = load_tokenizer("smollm2", folder)
    text = tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "What is 2+2?"}]))
    assert text.endswith("What is 2+2?\nassistant\n")
    assert tokenizer.eos_ids == (2,)
