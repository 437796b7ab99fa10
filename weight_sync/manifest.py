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

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor's place in a flat uint8 buffer."""
        return flat[self.offset : self.offset + self.nbytes].view(getattr(torch, self.dtype)).view(self.shape)

    def differs_from(self, before: TensorSpec) -> str:
        return f"{before.name} {before.dtype}{list(before.shape)} has become {self.name} {self.dtype}{list(self.shape)}"


class Layout:
    """A manifest in the making, from tensors in sending order; floating ones as `dtype` when it is given."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._specs: list[TensorSpec] = []
        self._names: set[str] = set()
        self.total_bytes = 0

    @property
    def count(self) -> int:
        return len(self._specs)

    def add(self, name: str, tensor: torch.Tensor) -> TensorSpec:
        """Where the next tensor lies. Refused for a name given twice and for tensors without plain memory."""
        _check_sendable(name, tensor, self._names)
        self._names.add(name)
        kind = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        nbytes = tensor.numel() * kind.itemsize
        spec = TensorSpec(name, tuple(tensor.shape), str(kind).removeprefix("torch."), self.total_bytes, nbytes)
        self._specs.append(spec)
        self.total_bytes = _next_offset(self.total_bytes, nbytes)
        return spec

    def manifest(self) -> Manifest:
        return Manifest(tuple(self._specs), self.total_bytes)


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
        layout = Layout(dtype)
        for name, tensor in named:
            layout.add(name, tensor)
        return layout.manifest()

    def views(self, flat: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Name -> view into the flat uint8 buffer of `total_bytes`."""
        return {s.name: s.view(flat) for s in self.tensors}

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
