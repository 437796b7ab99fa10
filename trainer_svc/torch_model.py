"""Loading a causal language model for training, and what the engine must know of its insides."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from trainer_svc.errors import TrainerError
from trainer_svc.logprobs import Head
from trainer_svc.torch_state import disk_errors

log = logging.getLogger(__name__)

# save_pretrained writes the model's own files; these belong to the tokenizer and are copied as they are
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def load_model(folder: Path, dtype: torch.dtype, device: torch.device, gradient_checkpointing: bool) -> Any:
    """The model of a Hugging Face folder in evaluation mode (no dropout), its weights trainable.

    Raises TrainerError when the folder holds no model, when weights are missing, or when its checkpoint has names
    that the model's parameters do not have.
    """
    import transformers

    if not (folder / "config.json").is_file():
        raise TrainerError(f"no model in {folder}: config.json is missing; set model.path to a Hugging Face folder")
    hub: Any = transformers
    hub.utils.logging.disable_progress_bar()
    shape = hub.AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    model, info = hub.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        # the fused kernels would leave out Gemma's softcap of attention scores without a word
        attn_implementation="eager" if getattr(shape, "attn_logit_softcapping", None) else None,
        local_files_only=True,
        output_loading_info=True,
    )
    lost = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if lost:
        raise TrainerError(
            f"{folder} lacks {len(lost)} weights of its model, {lost[0]!r} first; get a complete checkpoint"
        )
    check_names(folder, model)
    model.to(device).eval()
    if gradient_checkpointing:
        _checkpoint_layers(model)
    return model


def _checkpoint_layers(model: Any) -> None:
    """Recompute activations layer by layer. Only the layers themselves are put in training mode (that is what switches it on): their parts, and so dropout, stay off."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise TrainerError(
            f"{type(model).__name__} cannot recompute activations; set trainer.gradient_checkpointing = false"
        )
    for layer in layers:
        layer.training = True
        for name, value in vars(layer).items():
            if "dropout" in name and isinstance(value, float):
                setattr(layer, name, 0.0)


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor) in the model's order. A tied tensor comes once, under the name that checkpoints keep."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    seen: set[int] = set()
    state = model.state_dict(keep_vars=True)
    for name in [n for n in state if n not in tied] + [n for n in state if n in tied]:
        if id(state[name]) not in seen:
            seen.add(id(state[name]))
            yield name, state[name].detach()


def check_names(folder: Path, model: nn.Module) -> None:
    """Refuse a model whose parameters are not named as in its checkpoint: producers load weights by checkpoint names."""
    stored: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            stored.update(opened.keys())
    unknown = [name for name, _ in named_weights(model) if name not in stored]
    if stored and unknown:
        raise TrainerError(
            f"{type(model).__name__} has {len(unknown)} parameters that {folder} stores under other names, {unknown[0]!r} "
            "first; such models are not supported, choose one whose checkpoint names are its parameter names"
        )


def head_of(model: Any) -> Head:
    """The output head, with the logit scaling and softcap that the model's config names."""
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise TrainerError(f"{type(model).__name__} has no linear output head; such models are not supported")
    config = model.config.get_text_config()
    scale = 1.0
    if getattr(config, "logits_scaling", None):  # Granite
        scale /= config.logits_scaling
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere, Falcon-H1
        scale *= getattr(config, name, None) or 1.0
    return Head(layer.weight, layer.bias, scale, getattr(config, "final_logit_softcapping", None) or 0.0)


@torch.no_grad()
def check_head(model: Any) -> None:
    """Refuse a model whose logits are not head(hidden states): its log-probabilities would be silently wrong."""
    ids = torch.arange(8, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
    whole = model(input_ids=ids, use_cache=False).logits[0].float()
    parts = head_of(model).logits(hidden_states(model, ids)[0])
    gap = float((whole - parts).abs().max()) / (float(whole.abs().max()) + 1e-6)
    if not gap < (1e-4 if model.dtype == torch.float32 else 0.02):
        raise TrainerError(
            f"{type(model).__name__} computes its logits in a way that is not supported (they differ by {gap:.1e} from those "
            "of its output head); choose another model"
        )


def hidden_states(model: Any, ids_BL: Tensor) -> Tensor:
    """[B, L, H] last hidden states of right-padded rows.

    No attention mask: attention is causal, so a token never sees the padding to its right, and without a mask the
    fast attention kernels apply. Positions count from 0 in every row.
    """
    states: Tensor = model.base_model(input_ids=ids_BL, use_cache=False).last_hidden_state
    return states


def write_model(model: Any, source: Path, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Hugging Face format: `weights`, config and generation config of the model, tokenizer files of `source`.

    OSError when the disk refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with disk_errors(folder):
        model.save_pretrained(folder, state_dict=dict(weights))
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (source / "chat_templates").is_dir():
        shutil.copytree(source / "chat_templates", folder / "chat_templates", dirs_exist_ok=True)
