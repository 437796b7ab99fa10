"""What both ends of the weight channel compare."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nbehind import hello
from nbehind.config import LoraConfig
from nbehind.hello import adapters, weights_digest
from weight_sync.membership import Record, mismatch


def test_adapters_name_their_scale_and_what_they_are_added_to(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, content in zip(folders, (b"a" * 99, b"a" * 99, b"a" * 98 + b"b"), strict=True):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(content)
    ours = adapters(LoraConfig(rank=4, alpha=8), folders[0])
    assert ours == adapters(LoraConfig(rank=8, alpha=16), folders[1])
    assert ours != adapters(LoraConfig(rank=4, alpha=8), folders[2])
    assert ours != adapters(LoraConfig(rank=4, alpha=4), folders[0])
    assert adapters(LoraConfig(), folders[0]) == "none"
    text = mismatch({"adapters": ours}, "p", Record("s", {"adapters": "none"}, "host", None, 2))
    for word in ("adapters = none", ours, "lora.rank"):
        assert word in text


@pytest.mark.parametrize("small", [2**20, 0], ids=["whole", "slices"])
def test_checkpoints_are_told_apart_by_every_tensor(
    small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hello, "SMALL", small)
    monkeypatch.setattr(hello, "SLICE", 64)
    tensors = {f"layer{i}": torch.full((100,), float(i)) for i in range(5)} | {"none": torch.zeros(0)}

    def digest(**changed: torch.Tensor) -> str:
        save_file({**tensors, **changed}, tmp_path / "model.safetensors")
        return weights_digest(tmp_path)

    same = digest()
    others = [digest(**{name: tensors[name] + 1}) for name in tensors if name != "none"]
    assert len({same, *others}) == 6
    assert digest() == same


def test_a_file_that_is_no_safetensors_is_hashed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hello, "SMALL", 16)
    path = tmp_path / "model.safetensors"
    for content in (
        b"",
        b"x" * 100,
        (5).to_bytes(8, "little") + b"[1,2]" + b"x" * 80,
        (2).to_bytes(8, "little") + b"{}" * 50,
    ):
        path.write_bytes(content)
        before = weights_digest(tmp_path)
        path.write_bytes(content[:-1] + b"y")
        assert weights_digest(tmp_path) != before
