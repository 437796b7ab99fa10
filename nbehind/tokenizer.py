"""Text <-> token ids. The trainer tokenizes prompts, producers decode completions; both make the same one from the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

Message = Mapping[str, str]


class Tokenizer(Protocol):
    """What the services need of a tokenizer."""

    eos_ids: tuple[int, ...]  # every id that ends a completion
    digest: str  # equal only for equal vocabularies and chat templates

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the conversation with the generation prompt at its end."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        ...


class ByteTokenizer:
    """The tokenizer of the fake model: ids are UTF-8 bytes, 256 ends a text."""

    eos_ids: tuple[int, ...] = (256,)
    digest = "bytes"

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return list("\n".join(m["content"] for m in messages).encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class HFTokenizer:
    """A Hugging Face tokenizer from a model folder. Without a chat template, contents are joined by newlines."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer, GenerationConfig

        self._tok: Any = AutoTokenizer.from_pretrained(folder)
        eos: set[int] = set()
        if self._tok.eos_token_id is not None:
            eos.add(int(self._tok.eos_token_id))
        if (folder / "generation_config.json").exists():
            configured = GenerationConfig.from_pretrained(folder).eos_token_id
            eos.update([configured] if isinstance(configured, int) else configured or [])
        self.eos_ids = tuple(sorted(eos))
        vocabulary = repr(sorted(self._tok.get_vocab().items())) + (self._tok.chat_template or "")
        self.digest = sha256(vocabulary.encode()).hexdigest()[:16]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        rows = [dict(m) for m in messages]
        if not self._tok.chat_template:
            return list(self._tok.encode("\n".join(m["content"] for m in rows)))
        text = self._tok.apply_chat_template(rows, tokenize=False, add_generation_prompt=True)
        return list(self._tok.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tok.decode(list(ids), skip_special_tokens=True))


def load_tokenizer(model: str, folder: Path) -> Tokenizer:
    """The tokenizer for `model.path = model`, whose files are in `folder` (unused for "fake")."""
    return ByteTokenizer() if model == "fake" else HFTokenizer(folder)
