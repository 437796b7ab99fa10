"""What a set of weights looks like as one flat buffer: names, shapes, dtypes and offsets, in sending order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256

import msgpack
import torch

ALIGNMENT = 64  # bytes: every tensor starts on a cache line, and every view is aligned for its dtype


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor in the flat buffer; `dtype` without the "torch." prefix; offset and nbytes in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The layout of the flat buffer."""

    tensors: tuple[TensorSpec, ...]
    total_bytes: int

    @classmethod
    def of(cls, named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> Manifest:
        """Lay out the tensors in the given order; floating ones as `dtype` when it is given."""
        specs, offset = [], 0
        for name, tensor in named:
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            nbytes = tensor.numel() * kind.itemsize
            specs.append(TensorSpec(name, tuple(tensor.shape), str(kind).removeprefix("torch."), offset, nbytes))
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(specs), offset)

    def views(self, flat: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Name -> view into the flat uint8 buffer of `total_bytes`."""
        return {
            s.name: flat[s.offset : s.offset + s.nbytes].view(getattr(torch, s.dtype)).view(s.shape) for s in self.tensors
        }

    def encode(self) -> bytes:
        rows = [[s.name, list(s.shape), s.dtype, s.offset, s.nbytes] for s in self.tensors]
        return msgpack.packb([self.total_bytes, rows])

    @classmethod
    def decode(cls, raw: bytes) -> Manifest:
        total, rows = msgpack.unpackb(raw)
        return cls(tuple(TensorSpec(n, tuple(s), d, o, b) for n, s, d, o, b in rows), total)

    @property
    def digest(self) -> str:
        return sha256(self.encode()).hexdigest()[:16]
