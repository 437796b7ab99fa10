"""What both ends of the weight channel must agree on before any weights are sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from nbehind.config import Config, LoraConfig
from nbehind.tokenizer import Tokenizer

_IDENTITY = (
    "architectures",
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "tie_word_embeddings",
)

SMALL = 64 * 2**20  # bytes of a file that is hashed whole
CHUNK = 2**20  # bytes that are read at once
SLICE = 16 * 1024  # bytes of a tensor that are hashed at its beginning, middle and end


def model_digest(folder: Path) -> str:
    """Hash of what makes the architecture, so that two folders of the same model agree."""
    path = folder / "config.json"
    if not path.exists():
        return "none"
    config = json.loads(path.read_text())
    return sha256(json.dumps([config.get(k) for k in _IDENTITY]).encode()).hexdigest()[:16]


def quantization(folder: Path) -> str:
    """How the engine keeps the weights of this model folder: the method that its config.json names, else "none"."""
    path = folder / "config.json"
    found = json.loads(path.read_text()).get("quantization_config") if path.exists() else None
    return str(found.get("quant_method", "unknown")) if isinstance(found, dict) else "none"


def adapters(config: LoraConfig, folder: Path) -> str:
    """What the adapters are added to, and how; "none" without. Two checkpoints of one architecture differ."""
    if not config.rank:
        return "none"
    return f"scale {config.scale:g} on {weights_digest(folder)}"


def weights_digest(folder: Path) -> str:
    """Hash of the safetensors files: small ones whole, of large ones the header and three slices of every tensor.

    Training changes most values of every tensor that it changes, so this tells checkpoints apart without reading them.
    """
    digest = sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for start, stop in _hashed_ranges(file, size):
                file.seek(start)
                while start < stop and (piece := file.read(min(CHUNK, stop - start))):
                    digest.update(piece)
                    start += len(piece)
    return digest.hexdigest()[:16]


def _hashed_ranges(file: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of what is hashed; all of a file that is small or no safetensors."""
    length = int.from_bytes(file.read(8), "little")
    try:
        header = json.loads(file.read(length)) if size > SMALL and length < size else {}
        tensors = [tensor["data_offsets"] for name, tensor in sorted(header.items()) if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError):
        tensors = []
    if not tensors:
        yield 0, size
        return
    first = 8 + length
    yield 0, first
    for begin, end in tensors:
        for start in sorted({begin, max(begin, (begin + end - SLICE) // 2), max(begin, end - SLICE)}):
            yield first + start, first + min(start + SLICE, end)


def hello(config: Config, tokenizer: Tokenizer, folder: Path) -> dict[str, str]:
    """Named values that are compared one by one (weight_sync/membership.py)."""
    return {
        "dtype": config.model.dtype,
        "tokenizer": tokenizer.digest,
        "model": "fake" if config.model.path == "fake" else model_digest(folder),
        "transport": config.sync.transport,
        "adapters": adapters(config.lora, folder),
        "quantization": "none" if config.model.path == "fake" else quantization(folder),
    }
