"""Rules that every real generator shares: what it accepts, its seeds, its version labels. Pure, apart from reading headers."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from producer_svc.errors import GeneratorError
from rollout_queue.messages import Request, Version
from weight_sync.manifest import Manifest
from weight_sync.staged import StagedWeights


class Refused(GeneratorError):
    """One call that cannot be served; the engine goes on."""


Shapes = Mapping[str, tuple[int, ...]]

TIED = "lm_head.weight"


def sample_seed(seed: int, sample: int) -> int:
    """Seed of one sample, in [0, 2^63): neighbouring request seeds share no random stream."""
    raw = hashlib.blake2b(struct.pack("<qq", seed, sample), digest_size=8).digest()
    return int.from_bytes(raw, "little") >> 1


def max_new_tokens(request: Request, max_context: int) -> int:
    """Tokens a completion may have: what was asked for, as far as prompt and completion fit the context."""
    return min(request.sampling.max_new_tokens, max_context - len(request.prompt_ids))


def check_request(request: Request, max_context: int, vocab_size: int) -> None:
    """Refused: a request that no model of this shape can answer."""
    ids, sampling = request.prompt_ids, request.sampling
    problem = ""
    if not len(ids):
        problem = "its prompt is empty"
    elif len(ids) >= max_context:
        problem = f"its prompt has {len(ids)} tokens and model.max_context is {max_context}: raise it or drop the item"
    elif int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        problem = f"its prompt has a token id outside [0, {vocab_size}): tokenizer and model do not belong together"
    elif sampling.num_generations < 1 or sampling.max_new_tokens < 1:
        problem = "it asks for no samples or no tokens"
    elif sampling.temperature <= 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        problem = (
            f"temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k} are no distribution"
        )
    if problem:
        raise Refused(f"request {request.id} cannot be generated: {problem}")


def read_model_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder; GeneratorError if it is not one."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise GeneratorError(f"{folder} is no model folder (no config.json): check model.path") from None
    except (OSError, ValueError) as error:
        raise GeneratorError(f"{path} cannot be read ({error}): save the model again") from error
    if not isinstance(config, dict) or not isinstance(config.get("vocab_size"), int):
        raise GeneratorError(f"{path} has no vocab_size: save the model again with save_pretrained")
    return config


def end_ids(folder: Path) -> frozenset[int]:
    """Ids that the model folder's generation config says end a text; vLLM heeds them beside the request's own."""
    path = folder / "generation_config.json"
    if not path.exists():
        return frozenset()
    try:
        eos = json.loads(path.read_text()).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise GeneratorError(f"{path} cannot be read ({error}): save the model again") from error
    return frozenset([eos] if isinstance(eos, int) else eos or [])


def weight_shapes(folder: Path) -> Shapes:
    """Name -> shape of every tensor in the folder's safetensors files, from their headers alone."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise GeneratorError(f"{folder} has no .safetensors file: save the model again with save_pretrained")
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(size))
        except (OSError, ValueError, struct.error) as error:
            raise GeneratorError(f"{path} is no safetensors file ({error}): save the model again") from error
        shapes.update({name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"})
    return shapes


def check_staged(staged: StagedWeights, expected: Shapes, tied: bool) -> None:
    """Refused unless the staged weights are whole: every tensor of the model, with its shape, and the file is there.

    A tied model's output matrix may be sent or left out.
    """
    got = {spec.name: tuple(spec.shape) for spec in staged.manifest.tensors}
    want = dict(expected)
    if tied:
        got.pop(TIED, None)
        want.pop(TIED, None)
    wrong = sorted(name for name in got.keys() | want.keys() if got.get(name) != want.get(name))
    if wrong:
        name = wrong[0]
        raise Refused(
            f"version {staged.version.number} does not fit the model: {len(wrong)} tensors differ, "
            f"first {name} {got.get(name, 'missing')} where the model has {want.get(name, 'none')}: "
            "trainer and producer must use the same model folder"
        )
    check_file(staged)


def check_file(staged: StagedWeights) -> None:
    """Refused unless the file is there with all its bytes."""
    try:
        size = staged.path.stat().st_size
    except OSError as error:
        raise Refused(f"staged weights of version {staged.version.number} are gone: {error}") from error
    if size < staged.manifest.total_bytes:
        raise Refused(f"staged weights in {staged.path} have {size} of {staged.manifest.total_bytes} bytes")


def map_weights(path: Path, manifest: Manifest) -> Mapping[str, Any]:
    """Name -> tensor over the mapped file. Copy before the file is written again; writing to them does not change the file."""
    import torch

    # A private mapping: shared=True would open the file for writing, and grow one that is too short.
    flat = torch.from_file(str(path), shared=False, size=manifest.total_bytes, dtype=torch.uint8)
    return manifest.views(flat)


def label(version: Version) -> str:
    """The engine's name for a version."""
    return f"{version.incarnation}.{version.number}.{version.checksum}"


def check_spans(spans: Iterable[tuple[Version, int, int]], length: int) -> tuple[tuple[Version, int, int], ...]:
    """The spans as a tuple; GeneratorError unless they cover [0, length) in order, without gap or overlap."""
    out, at = tuple(spans), 0
    for _, start, end in out:
        if start != at or end <= start:
            break
        at = end
    else:
        if at == length:
            return out
    raise GeneratorError(f"the engine's version spans {[s[1:] for s in out]} do not cover {length} tokens")
