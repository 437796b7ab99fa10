"""The publisher's copies of the weights: flat buffers, one in use by the sending thread, one to be filled.

    trainer: stage(n) ─copy─▶ pending ──take()──▶ sending thread (checksum, transfers, joiners) ──release()──▶ free
                       └────── follow(): the sending thread, when it has nothing else to do, sums up what is there already

A pending version that was not taken is overwritten by the next one: the newest wins, and `skipped` counts it. With the
shm transport members read the buffers in place, so a free one is written only when nobody reads it; as long as somebody
does, one more is made. A member holds two at most, so there are never more than members × 2 + 2.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from weight_sync.checksum import BlockSums
from weight_sync.errors import Refused, SyncError
from weight_sync.manifest import Layout, Manifest
from weight_sync.regions import Region

log = logging.getLogger(__name__)

BUFFERS = 2
FOLLOW_BYTES = (
    16 * 1024 * 1024
)  # summed at a time beside the copy; less makes the copy slower, more leaves more for later
FOLLOW_POLL_S = 0.001


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
        self.filled = 0  # bytes copied so far; grows until stage() is done
        self.sums = BlockSums(buffer.flat)  # for the sending thread alone

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
        self._filling: StagedVersion | None = None
        self._spare_core = len(os.sched_getaffinity(0)) > 1
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
            staged = (
                self._next(number, named, dtype) if self.manifest is not None else self._first(number, named, dtype)
            )
        staged.buffer.region.end_write()
        with self._lock:
            if self._pending is not None:
                self._free.append(self._pending.buffer)
                self.skipped += 1
            self._pending, self._filling = staged, None
            self._newest, self.manifest = number, staged.manifest

    def _first(
        self, number: int, named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None
    ) -> StagedVersion:
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
        return StagedVersion(self, number, manifest, buffer)

    def _next(self, number: int, named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None) -> StagedVersion:
        assert self.manifest is not None
        buffer = self._take_buffer(self.manifest)
        staged = self._filling = StagedVersion(self, number, self.manifest, buffer)
        try:
            difference = _fill(staged, named, dtype)
            if difference:
                raise Refused(
                    f"version {number} has other weights than version {self._newest}: {difference}; "
                    "the layout is fixed for the life of a trainer, so restart it"
                )
        except BaseException:
            buffer.region.end_write()
            with self._lock:
                self._filling = None
                self._free.append(buffer)
            raise
        return staged

    def follow(self, limit_s: float) -> bool:
        """Sum up a version that is being copied, as far as it is there, for `limit_s` at most; False when none is.

        For the sending thread, which has a core to itself then: on a single one it would only hold up the copy.
        """
        end = time.monotonic() + limit_s
        followed = False
        while self._spare_core and (filling := self._filling) is not None and time.monotonic() < end:
            followed = True
            filling.sums.up_to(filling.filled // FOLLOW_BYTES * FOLLOW_BYTES)
            time.sleep(FOLLOW_POLL_S)
        return followed

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


def _fill(staged: StagedVersion, named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None) -> str:
    """Copy tensor by tensor; returns the first difference from the layout, '' when there is none."""
    layout, specs, views = Layout(dtype), staged.manifest.tensors, staged.buffer.views
    for name, tensor in named:
        spec, place = layout.add(name, tensor), layout.count - 1
        if place < len(specs):
            if spec != specs[place]:
                return spec.differs_from(specs[place])
            views[name].copy_(tensor.detach())
            staged.filled = spec.offset + spec.nbytes
    return "" if layout.count == len(specs) else f"{len(specs)} tensors have become {layout.count}"
