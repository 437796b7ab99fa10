"""Staged weights as the engine loads them. A trainer of adapters sends these alone; the whole weights are made here.

staged file ─┬─ lora.rank = 0 ──────────────────────────────────▶ every tensor as it came
             └─ adapters ─▶ W0 of the model folder + scale · B A ─▶ every tensor of the model
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from producer_svc.generation import Refused, Shapes, check_file, check_staged, map_weights
from weight_sync.adapters import DOWN, UP, merged
from weight_sync.manifest import Manifest
from weight_sync.staged import StagedWeights


class Base(NamedTuple):
    """What adapters are added to: the model folder, and the scale alpha / rank of their product."""

    folder: str
    scale: float


def check_weights(staged: StagedWeights, expected: Shapes, tied: bool, base: Base | None) -> None:
    """Refused unless the staged weights are whole and fit the model, whose tensors are `expected`."""
    if base is None:
        check_staged(staged, expected, tied)
        return
    got = {spec.name: tuple(spec.shape) for spec in staged.manifest.tensors}
    layers = {name.removesuffix(end) for name in got for end in (DOWN, UP) if name.endswith(end)}
    for layer in layers:
        down, up, whole = got.get(layer + DOWN, ()), got.get(layer + UP, ()), expected.get(f"{layer}.weight", ())
        if len(down) != 2 or up != whole[:1] + down[:1] or whole[1:] != down[1:]:
            raise Refused(
                f"version {staged.version.number} does not fit the model: the adapter of {layer} is {list(up)} · {list(down)} "
                f"where the model has {list(whole) or 'nothing'}: trainer and producer must use the same model folder"
            )
    if not layers or len(got) != 2 * len(layers):
        raise Refused(
            f"version {staged.version.number} holds {len(got)} tensors that are not pairs of adapters, with lora.rank > 0"
        )
    check_file(staged)


def engine_weights(path: Path, manifest: Manifest, base: Base | None) -> Iterable[tuple[str, Any]]:
    """(checkpoint name, tensor) of every weight. Valid until the file is written again; merged ones are float32."""
    views = map_weights(path, manifest)
    return views.items() if base is None else _merged(views, base)


def _merged(adapters: Mapping[str, Any], base: Base) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for file in sorted(Path(base.folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                layer, weight = name.removesuffix(".weight"), opened.get_tensor(name)
                if layer + DOWN in adapters:
                    weight = merged(weight, adapters[layer + DOWN], adapters[layer + UP], base.scale)
                yield name, weight
