"""What both ends of the weight channel compare."""

from __future__ import annotations

from pathlib import Path

from nbehind.config import LoraConfig
from nbehind.hello import SAMPLED_EVERY, adapters, weights_digest
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


def test_large_checkpoints_are_told_apart_far_behind_their_beginning(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(SAMPLED_EVERY + 100))
    before = weights_digest(tmp_path)
    with path.open("r+b") as file:
        file.seek(SAMPLED_EVERY + 50)
        file.write(b"x")
    assert weights_digest(tmp_path) != before
