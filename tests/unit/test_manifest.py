"""The layout of a flat buffer: views, refusals, and what is not a manifest."""

from __future__ import annotations

import msgpack
import pytest
import torch

from weight_sync.errors import Refused, SyncError
from weight_sync.manifest import ALIGNMENT, Manifest

NAMED = [
    ("w", torch.arange(6, dtype=torch.float32).view(2, 3)),
    ("scalar", torch.tensor(3.5)),
    ("empty", torch.empty(0, 5)),
    ("half", torch.ones(7, dtype=torch.bfloat16)),
    ("index", torch.arange(3)),
    ("flag", torch.tensor([True, False])),
]


def test_every_tensor_comes_back_from_its_view() -> None:
    manifest = Manifest.of(NAMED)
    views = manifest.views(torch.zeros(manifest.total_bytes, dtype=torch.uint8))
    for name, tensor in NAMED:
        views[name].copy_(tensor)
    for name, tensor in NAMED:
        assert views[name].dtype == tensor.dtype
        assert views[name].shape == tensor.shape
        assert torch.equal(views[name], tensor)


def test_tensors_lie_in_order_aligned_and_apart() -> None:
    manifest = Manifest.of(NAMED)
    # bytes 24, 4, 0, 14, 24, 2, each rounded up to 64: the empty one takes no room
    assert [s.offset for s in manifest.tensors] == [0, 64, 128, 128, 192, 256]
    assert [s.nbytes for s in manifest.tensors] == [24, 4, 0, 14, 24, 2]
    assert manifest.total_bytes == 320
    assert all(s.offset % ALIGNMENT == 0 for s in manifest.tensors)


def test_only_floating_tensors_are_cast() -> None:
    kinds = {s.name: s.dtype for s in Manifest.of(NAMED, torch.bfloat16).tensors}
    assert kinds == {
        "w": "bfloat16",
        "scalar": "bfloat16",
        "empty": "bfloat16",
        "half": "bfloat16",
        "index": "int64",
        "flag": "bool",
    }


def test_encoding_round_trips_and_the_digest_tells_layouts_apart() -> None:
    manifest = Manifest.of(NAMED)
    assert Manifest.decode(manifest.encode()) == manifest
    assert Manifest.of(NAMED).digest == manifest.digest
    assert Manifest.of(NAMED[::-1]).digest != manifest.digest
    assert Manifest.of(NAMED, torch.bfloat16).digest != manifest.digest
    assert Manifest.decode(Manifest.of([]).encode()) == Manifest((), 0)


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.empty(3, device="meta"), "meta"),
        (torch.zeros(3, 3).to_sparse(), "sparse"),
    ],
)
def test_tensors_without_plain_memory_are_refused(tensor: torch.Tensor, word: str) -> None:
    with pytest.raises(Refused, match=f"weight x is a .*{word}"):
        Manifest.of([("x", tensor)])


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(Refused, match="weight w is given twice"):
        Manifest.of([NAMED[0], NAMED[0]])


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb([64, [["w", [1], "float32", 0]]]),
        msgpack.packb([64, [["w", [1], "float32", 8, 4]]]),  # not where the shape puts it
        msgpack.packb([64, [["w", [2], "float32", 0, 4]]]),  # nbytes of another shape
        msgpack.packb([64, [["w", [-1], "float32", 0, -4]]]),
        msgpack.packb([128, [["w", [1], "float32", 0, 4]]]),
        msgpack.packb([64, [["w", [1], "nn", 0, 4]]]),  # an attribute of torch that is no dtype
        msgpack.packb([64, [["w", [1], 5, 0, 4]]]),
        msgpack.packb([128, [["w", [1], "float32", 0, 4], ["w", [1], "float32", 64, 4]]]),
        Manifest.of(NAMED).encode()[:-1],
        Manifest.of(NAMED).encode() + b"\x00",
    ],
)
def test_what_is_not_a_manifest_is_an_error_of_ours(raw: bytes) -> None:
    with pytest.raises(SyncError, match="not a weight manifest"):
        Manifest.decode(raw)
