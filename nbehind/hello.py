"""What both ends of the weight channel must agree on before any weights are sent."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

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

SAMPLED, SAMPLED_EVERY = 64 * 1024, 16 * 2**20  # bytes


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
    """Hash of the safetensors files' sizes, headers and one block in every 16 MiB: enough to tell checkpoints apart."""
    digest = sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for start in range(0, size, SAMPLED_EVERY):
                file.seek(start)
                digest.update(file.read(SAMPLED))
    return digest.hexdigest()[:16]


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
