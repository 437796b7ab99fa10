"""What a set of weights looks like as one flat buffer: names, shapes, dtypes and offsets, in sending order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from math import prod
from typing import Any

import msgpack
import torch

from weight_sync.errors import Refused, SyncError

ALIGNMENT = 64  # bytes: every tensor starts on a cache line, and every view is aligned for its dtype


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor in the flat buffer; `dtype` without the "torch." prefix; offset and nbytes in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    """The layout of the flat buffer."""

    tensors: tuple[TensorSpec, ...]
    total_bytes: int

    @classmethod
    def of(cls, named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> Manifest:
        """Lay out the tensors in the given order; floating ones as `dtype` when it is given.

        Raises Refused for a name given twice and for tensors without plain memory (meta, sparse, quantized).
        """
        specs: list[TensorSpec] = []
        names: set[str] = set()
        offset = 0
        for name, tensor in named:
            _check_sendable(name, tensor, names)
            names.add(name)
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            nbytes = tensor.numel() * kind.itemsize
            specs.append(TensorSpec(name, tuple(tensor.shape), str(kind).removeprefix("torch."), offset, nbytes))
            offset = _next_offset(offset, nbytes)
        return cls(tuple(specs), offset)

    def views(self, flat: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Name -> view into the flat uint8 buffer of `total_bytes`."""
        return {
            s.name: flat[s.offset : s.offset + s.nbytes].view(getattr(torch, s.dtype)).view(s.shape)
            for s in self.tensors
        }

    def encode(self) -> bytes:
        rows = [[s.name, list(s.shape), s.dtype, s.offset, s.nbytes] for s in self.tensors]
        packed: bytes = msgpack.packb([self.total_bytes, rows])
        return packed

    @classmethod
    def decode(cls, raw: bytes) -> Manifest:
        """Inverse of encode(). Raises SyncError unless it is a layout that encode() could have written."""
        try:
            total, rows = msgpack.unpackb(raw)
            specs = tuple(TensorSpec(n, tuple(s), d, o, b) for n, s, d, o, b in rows)
            manifest = cls(specs, total)
            manifest._check()
        except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
            raise SyncError(
                f"not a weight manifest ({error}); do both ends run the same version of nbehind?"
            ) from error
        return manifest

    def _check(self) -> None:
        offset = 0
        for spec in self.tensors:
            size = _itemsize(spec.dtype) * prod(spec.shape)
            if any(n < 0 for n in spec.shape) or (spec.offset, spec.nbytes) != (offset, size):
                raise ValueError(f"tensor {spec.name!r} does not lie where its shape puts it")
            offset = _next_offset(offset, spec.nbytes)
        if offset != self.total_bytes:
            raise ValueError(f"{self.total_bytes} bytes for tensors of {offset}")
        if len({spec.name for spec in self.tensors}) != len(self.tensors):
            raise ValueError("a name occurs twice")

    @cached_property
    def digest(self) -> str:
        return sha256(self.encode()).hexdigest()[:16]

    def difference(self, other: Manifest) -> str:
        """The first tensor that differs, for messages; '' when the manifests are equal."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=False):
            if mine != theirs:
                return f"{mine.name} {mine.dtype}{list(mine.shape)} has become {theirs.name} {theirs.dtype}{list(theirs.shape)}"
        if len(self.tensors) != len(other.tensors):
            return f"{len(self.tensors)} tensors have become {len(other.tensors)}"
        return ""


def _next_offset(offset: int, nbytes: int) -> int:
    return offset + -(-nbytes // ALIGNMENT) * ALIGNMENT


def _itemsize(dtype: Any) -> int:
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype!r} is not a dtype")
    return int(kind.itemsize)


def _check_sendable(name: str, tensor: torch.Tensor, names: set[str]) -> None:
    if name in names:
        raise Refused(f"weight {name} is given twice; give tied weights once")
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise Refused(f"weight {name} is a {kind} tensor; only plain strided tensors can be sent")
