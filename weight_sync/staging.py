"""The publisher's copies of the weights: flat buffers, one in use by the sending thread, one to be filled.

    trainer: stage(n) ─copy─▶ pending ──take()──▶ sending thread (checksum, transfers, joiners) ──release()──▶ free

A pending version that was not taken is overwritten by the next one: the newest wins, and `skipped` counts it. With the
shm transport members read the buffers in place, so a free one is written only when nobody reads it; as long as somebody
does, one more is made. A member holds two at most, so there are never more than members × 2 + 2.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from weight_sync.errors import Refused, SyncError
from weight_sync.manifest import Layout, Manifest
from weight_sync.regions import Region

log = logging.getLogger(__name__)

BUFFERS = 2


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory for one version. The views are made once: with many small tensors they cost more than the copy."""

    region: Region
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

    @property
    def path(self) -> Path | None:
        """Where others of this machine can map it; None when they cannot."""
        return self.buffer.region.path

    def retain(self) -> None:
        self._area.retain(self)

    def release(self) -> None:
        self._area.release(self)


class StagingArea:
    """The buffers. `stage` is called by one thread, the others by any."""

    def __init__(self, make_region: Callable[[], Region] = lambda: Region(None)) -> None:
        self._lock = threading.Lock()
        self._make_region = make_region
        self._free: list[Buffer] = []  # whoever was freed last is at the end
        self._all: list[Buffer] = []
        self._pending: StagedVersion | None = None
        self._newest = -1
        self.manifest: Manifest | None = None
        self.skipped = 0

    def stage(self, number: int, named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None) -> None:
        """Copy the weights once, cast to `dtype` while copying; `named` is taken in tensor by tensor, none is kept.

        Refused when their layout is not the first version's.
        """
        if number <= self._newest:
            raise SyncError(f"version {number} is published after version {self._newest}; numbers only grow")
        with torch.no_grad():
            buffer, manifest = self._first(named, dtype) if self.manifest is None else self._next(number, named, dtype)
        buffer.region.end_write()
        with self._lock:
            if self._pending is not None:
                self._free.append(self._pending.buffer)
                self.skipped += 1
            self._pending = StagedVersion(self, number, manifest, buffer)
            self._newest, self.manifest = number, manifest

    def _first(self, named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None) -> tuple[Buffer, Manifest]:
        """The layout is not known before the last tensor, so the buffer grows with every one."""
        region = self._make_region()
        try:
            layout = Layout(dtype)
            for name, tensor in named:
                spec = layout.add(name, tensor)
                flat = region.grow(layout.total_bytes)
                spec.view(flat).copy_(tensor.detach())
            manifest = layout.manifest()
            buffer = _buffer(region, manifest)
        except BaseException:
            region.close()
            raise
        with self._lock:
            self._all.append(buffer)
        return buffer, manifest

    def _next(
        self, number: int, named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None
    ) -> tuple[Buffer, Manifest]:
        assert self.manifest is not None
        buffer = self._take_buffer(self.manifest)
        try:
            difference = _fill(buffer, self.manifest, named, dtype)
            if difference:
                raise Refused(
                    f"version {number} has other weights than version {self._newest}: {difference}; "
                    "the layout is fixed for the life of a trainer, so restart it"
                )
        except BaseException:
            buffer.region.end_write()
            with self._lock:
                self._free.append(buffer)
            raise
        return buffer, self.manifest

    def prepare(self) -> None:
        """Make the second buffer before it is needed. For the sending thread, after the first version."""
        if self.manifest is None or len(self._all) >= BUFFERS:
            return
        buffer = self._make(self.manifest)  # without the lock: it takes longer than a copy
        buffer.region.end_write()
        with self._lock:
            if len(self._all) >= BUFFERS:
                buffer.region.close()
                return
            self._all.append(buffer)
            self._free.append(buffer)

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

    def close(self) -> None:
        """Remove what others can see of the buffers."""
        with self._lock:
            for buffer in self._all:
                buffer.region.close()
            self._free, self._pending = [], None

    def _take_buffer(self, manifest: Manifest) -> Buffer:
        """A buffer to write, which nobody reads."""
        with self._lock:
            found = next((b for b in self._free if b.region.begin_write()), None)
            if found is not None:
                self._free.remove(found)
                self._drop_spare()
                return found
            if self._pending is not None and len(self._all) >= BUFFERS:
                overwritten, self._pending = self._pending, None
                self.skipped += 1
                overwritten.buffer.region.begin_write()  # it was not announced, so nobody reads it
                return overwritten.buffer
            if len(self._all) >= BUFFERS and not self._free:
                raise SyncError("both staging buffers are held by transfers; release them before the next publish")
            made = self._make(manifest)
            self._all.append(made)
            return made

    def _drop_spare(self) -> None:
        """Beyond two, a buffer lives only as long as a member reads it."""
        for buffer in list(self._free):
            if len(self._all) > BUFFERS and buffer.region.begin_write():
                self._free.remove(buffer)
                self._all.remove(buffer)
                buffer.region.close()

    def _make(self, manifest: Manifest) -> Buffer:
        region = self._make_region()
        try:
            region.grow(manifest.total_bytes)
            buffer = _buffer(region, manifest)
        except BaseException:
            region.close()
            raise
        return buffer


def _buffer(region: Region, manifest: Manifest) -> Buffer:
    flat = region.grow(manifest.total_bytes, populate=True)
    region.seal(manifest.encode())
    return Buffer(region, flat, manifest.views(flat))


def _fill(
    buffer: Buffer, manifest: Manifest, named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None
) -> str:
    """Copy tensor by tensor; returns the first difference from the layout, '' when there is none."""
    layout, specs = Layout(dtype), manifest.tensors
    for name, tensor in named:
        spec, place = layout.add(name, tensor), layout.count - 1
        if place < len(specs):
            if spec != specs[place]:
                return spec.differs_from(specs[place])
            buffer.views[name].copy_(tensor.detach())
    return "" if layout.count == len(specs) else f"{len(specs)} tensors have become {layout.count}"
