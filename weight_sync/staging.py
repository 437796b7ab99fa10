"""The publisher's copies of the weights: two flat buffers, one in use by the sending thread, one to be filled.

    trainer: stage(n) ─copy─▶ pending ──take()──▶ sending thread (checksum, transfers, joiners) ──release()──▶ free

A pending version that was not taken is overwritten by the next one: the newest wins, and `skipped` counts it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from weight_sync.errors import Refused, SyncError
from weight_sync.manifest import Manifest

BUFFERS = 2


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory for one version. The views are made once: with many small tensors they cost more than the copy."""

    flat: torch.Tensor  # uint8 [manifest.total_bytes]
    views: Mapping[str, torch.Tensor]


class StagedVersion:
    """A version in a staging buffer; the buffer is free again when as many release() as retain() calls were made."""

    def __init__(self, area: StagingArea, number: int, manifest: Manifest, buffer: Buffer) -> None:
        self._area = area
        self.number = number
        self.manifest = manifest
        self.buffer = buffer
        self.holders = 1

    @property
    def flat(self) -> torch.Tensor:
        """uint8 [manifest.total_bytes]"""
        return self.buffer.flat

    def retain(self) -> None:
        self._area.retain(self)

    def release(self) -> None:
        self._area.release(self)


class StagingArea:
    """The buffers. `stage` is called by one thread, the others by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Buffer] = []
        self._made = 0
        self._pending: StagedVersion | None = None
        self._newest = -1
        self.manifest: Manifest | None = None
        self.skipped = 0

    def stage(self, number: int, named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None) -> None:
        """Copy the weights once, cast to `dtype` while copying. Refused when their layout is not the first version's."""
        tensors = list(named)
        manifest = Manifest.of(tensors, dtype)
        self._check(number, manifest)
        manifest = self.manifest or manifest
        buffer = self._buffer(manifest)
        try:
            with torch.no_grad():
                for name, tensor in tensors:
                    buffer.views[name].copy_(tensor.detach())
        except BaseException:
            with self._lock:
                if self.manifest is None:
                    self._made -= 1  # the layout is not fixed yet, so the next version may need another size
                else:
                    self._free.append(buffer)
            raise
        with self._lock:
            if self._pending is not None:
                self._free.append(self._pending.buffer)
                self.skipped += 1
            self._pending = StagedVersion(self, number, manifest, buffer)
            self._newest, self.manifest = number, manifest

    def take(self) -> StagedVersion | None:
        """The pending version, held by the caller until release(); None when there is none."""
        with self._lock:
            taken, self._pending = self._pending, None
        return taken

    @property
    def newest(self) -> int:
        """Number of the newest staged version, −1 before the first."""
        return self._newest

    def retain(self, staged: StagedVersion) -> None:
        with self._lock:
            staged.holders += 1

    def release(self, staged: StagedVersion) -> None:
        with self._lock:
            staged.holders -= 1
            if staged.holders == 0:
                self._free.append(staged.buffer)

    def _check(self, number: int, manifest: Manifest) -> None:
        if number <= self._newest:
            raise SyncError(f"version {number} is published after version {self._newest}; numbers only grow")
        if self.manifest is not None and manifest != self.manifest:
            raise Refused(
                f"version {number} has other weights than version {self._newest}: {self.manifest.difference(manifest)}; "
                "the layout is fixed for the life of a trainer, so restart it"
            )

    def _buffer(self, manifest: Manifest) -> Buffer:
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._made < BUFFERS:
                self._made += 1
                flat = torch.zeros(manifest.total_bytes, dtype=torch.uint8)  # zeros: the gaps are summed too
                return Buffer(flat, manifest.views(flat))
            if self._pending is None:
                raise SyncError("both staging buffers are held by transfers; release them before the next publish")
            overwritten, self._pending = self._pending, None
            self.skipped += 1
            return overwritten.buffer
