"""`model.path` -> a folder in Hugging Face format: checked if it is one, made once and kept in the cache if it is a name.

The cache may be used by any number of processes: a model is made under a lock, in a folder of another name, and renamed when it is whole.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nbehind.errors import InputError, StartError

log = logging.getLogger(__name__)

Builder = Callable[[Path, Callable[[str], None]], None]

NAMES = ("demo", "smollm2", "fake")
LOCK_TIMEOUT_S = 900.0
LOCK_POLL_S = 0.2
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def default_cache() -> Path:
    """$NBEHIND_CACHE, or .cache in the working directory."""
    return Path(os.environ.get("NBEHIND_CACHE") or ".cache")


def prepare_model(path: str, cache: Path | None = None, say: Callable[[str], None] = log.info) -> Path:
    """The folder of the model `path` (a folder, or one of NAMES). Nothing is downloaded.

    InputError for an unknown or incomplete model; StartError if it cannot be made. "fake" gives a path that is not used.
    """
    cache = default_cache() if cache is None else cache
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if path == "fake":
        return cache / "fake"
    if path == "demo":
        from nbehind import demo_model

        return _made_once(cache / f"demo-{demo_model.RECIPE.digest()}", lambda f, s: demo_model.build(f, log=s), say)
    if path == "smollm2":
        from nbehind import smollm2_model

        return _made_once(cache / f"smollm2-{smollm2_model.FORMAT}", smollm2_model.build, say)
    folder = Path(path)
    check_model_folder(folder)
    return folder


def check_model_folder(folder: Path) -> None:
    """InputError unless the folder holds a config, all weights as safetensors, and a tokenizer."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "no such folder"
        raise InputError(
            f"model.path = {folder}: {what}; give a folder in Hugging Face format, or one of {', '.join(NAMES)}"
        )
    if not (config := _read_json(folder / "config.json")).get("model_type"):
        raise InputError(f"model.path = {folder}: config.json names no model_type; save the model with save_pretrained")
    if config.get("quantization_config"):
        raise InputError(f"model.path = {folder}: the weights are quantized; save them in float32 or bfloat16")
    index = folder / "model.safetensors.index.json"
    names = sorted(set(_read_json(index).get("weight_map", {}).values())) if index.exists() else ["model.safetensors"]
    missing = [n for n in names if not (folder / n).is_file()]
    if missing or not names:
        lacking = ", ".join(missing[:3]) or "every weight"
        raise InputError(f"model.path = {folder}: lacks {lacking}; save the model with save_pretrained (safetensors)")
    if not any((folder / n).is_file() for n in TOKENIZER_FILES):
        raise InputError(
            f"model.path = {folder}: lacks a tokenizer (tokenizer.json); save it beside the model with save_pretrained"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(
            f"model.path = {path.parent}: lacks {path.name}; give a folder in Hugging Face format"
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(f"model.path = {path.parent}: {path.name} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"model.path = {path.parent}: {path.name} is not a JSON object")
    return data


def _made_once(folder: Path, build: Builder, say: Callable[[str], None]) -> Path:
    """`folder`, made by `build` unless it is there. One process makes it, the others wait."""
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{folder.name}.lock", say):
            if not folder.is_dir():
                _make(folder, build, say)
    except OSError as error:
        raise StartError(
            f"model cache {folder.parent}: {error}; free some space, or set NBEHIND_CACHE to a folder that can be written"
        ) from error
    return folder


def _make(folder: Path, build: Builder, say: Callable[[str], None]) -> None:
    for leftover in folder.parent.glob(f".{folder.name}.tmp-*"):  # of a process that was killed: the lock is ours
        shutil.rmtree(leftover)
    temporary = folder.parent / f".{folder.name}.tmp-{os.getpid()}"
    began = time.monotonic()
    say(f"making the model {folder.name}, once")
    try:
        build(temporary, say)
        check_model_folder(temporary)
        temporary.rename(folder)
    except ImportError as error:
        raise StartError(f"the model {folder.name} needs a package that is missing: {error}; run make setup") from error
    except RuntimeError as error:
        raise StartError(f"the model {folder.name} could not be made: {error}") from error
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)
    say(f"made {folder} in {time.monotonic() - began:.0f} s")


@contextmanager
def _locked(path: Path, say: Callable[[str], None], timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel releases it when its holder dies."""
    ends = time.monotonic() + timeout_s
    with path.open("a") as stream:
        waiting = False
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    say(f"waiting for another process that makes {path.name.strip('.').removesuffix('.lock')}")
                waiting = True
            if time.monotonic() > ends:
                raise StartError(f"{path} was held for {timeout_s:.0f} s by another process; end it and start again")
            time.sleep(LOCK_POLL_S)
        yield
