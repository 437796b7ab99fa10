"""Memory that one process writes and others of the same machine read in place.

    owner:   make ─▶ grow … ─▶ seal ─▶ (begin_write ─▶ write ─▶ end_write) … ─▶ close
    reader:  Reading.open ─▶ read ─▶ release            begin_write() is False while anybody reads

Two locks on the file, both dropped by the kernel when their process dies: flock tells that it is in use at all (see
shm_files.clean), a lock of byte 0 (an open file description lock) tells readers and the writer apart.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import struct
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from weight_sync.errors import SyncError, TransferFailed

log = logging.getLogger(__name__)

_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # Linux: page faults now and not at the first write


class Region:
    """A file in shared memory, or without `path` memory of this process alone. Not thread-safe."""

    def __init__(self, path: Path | None, must_share: bool = True) -> None:
        """With `must_share` false it becomes private when shared memory is full. SyncError when the file cannot be made."""
        self.path, self._must_share = path, must_share
        self.flat = torch.empty(0, dtype=torch.uint8)  # uint8 [size], the file mapped
        self._size = 0
        if path is None:
            self._descriptor = os.memfd_create("nbehind-weights", os.MFD_CLOEXEC)
        else:
            self._descriptor = make_file(path, fcntl.LOCK_SH)
        if not _lock_byte(self._descriptor, fcntl.F_WRLCK):
            raise SyncError(f"{path} is new, but locked; is another program working in {path and path.parent}?")

    def grow(self, size: int, populate: bool = False) -> torch.Tensor:
        """Room for `size` bytes, new ones zero; earlier tensors keep what was there. SyncError when there is no memory."""
        if size > self._size:
            try:
                reserve(self._descriptor, size, self.path, self._size)
            except SyncError as error:
                if self.path is None or self._must_share:
                    raise
                log.warning("weights are sent, not shared: %s", error)
                self._make_private(size)
            self._size = size
        self.flat = _mapped(self._descriptor, size, mmap.MAP_SHARED | (_POPULATE if populate else 0))
        return self.flat

    def _make_private(self, size: int) -> None:
        """Move what is there to memory of our own, which the size of /dev/shm does not limit."""
        before, kept = self.flat, self._size
        self.close()
        self._descriptor, self.path = os.memfd_create("nbehind-weights", os.MFD_CLOEXEC), None
        reserve(self._descriptor, size, None)
        _mapped(self._descriptor, size, mmap.MAP_SHARED)[:kept].copy_(before[:kept])

    def seal(self, trailer: bytes) -> None:
        """Put `trailer` after the content, for readers: its size is fixed."""
        if self.path is not None:
            reserve(self._descriptor, self._size + len(trailer), self.path, self._size)
            os.pwrite(self._descriptor, trailer, self._size)

    def begin_write(self) -> bool:
        """May it be written? Not while others read it; then none can begin to, until end_write()."""
        return _lock_byte(self._descriptor, fcntl.F_WRLCK)

    def end_write(self) -> None:
        _lock_byte(self._descriptor, fcntl.F_UNLCK)

    def close(self) -> None:
        """Remove the name. Mappings stay, here and in readers."""
        if self._descriptor < 0:
            return
        if self.path is not None:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
        os.close(self._descriptor)
        self._descriptor, self.flat = -1, torch.empty(0, dtype=torch.uint8)


class Reading:
    """A reader's hold on another process's region, under a name of its own that the end of its owner does not take away."""

    def __init__(self, path: Path, own: Path, total_bytes: int) -> None:
        """Hold and map the first `total_bytes`. TransferFailed when it is not there, too short or being written."""
        self.path = own
        try:
            os.link(path, own)
        except OSError as error:
            raise TransferFailed(f"the publisher's memory {path} cannot be opened: {error.strerror}") from error
        self._descriptor = -1
        try:
            self._descriptor = os.open(own, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not _lock_byte(self._descriptor, fcntl.F_RDLCK):
                raise TransferFailed(f"the publisher's memory {path} is being written")
            self.trailer = self._trailer(total_bytes)
            self.raw: NDArray[np.uint8] = np.empty(0, np.uint8)
            if total_bytes:
                flags = mmap.MAP_SHARED | _POPULATE
                self.raw = np.frombuffer(
                    mmap.mmap(self._descriptor, total_bytes, flags=flags, prot=mmap.PROT_READ), np.uint8
                )
        except OSError as error:
            self.release()
            raise TransferFailed(f"the publisher's memory {path} cannot be read: {error.strerror}") from error
        except BaseException:
            self.release()
            raise

    def _trailer(self, total_bytes: int) -> bytes:
        size = os.fstat(self._descriptor).st_size
        if total_bytes < 0 or size < total_bytes:
            raise TransferFailed(f"the publisher's memory {self.path} has {size} of {total_bytes} bytes")
        return os.pread(self._descriptor, size - total_bytes, total_bytes)

    def release(self) -> None:
        """The region may be written again."""
        self.path.unlink(missing_ok=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self.raw = np.empty(0, np.uint8)


def make_file(path: Path, lock: int) -> int:
    """A new file under flock `lock`, which has its name only once it is locked: clean() takes it for dead before."""
    hidden = path.with_name(f".{path.name}")
    descriptor = -1
    try:
        descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
        hidden.rename(path)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
            hidden.unlink(missing_ok=True)
        raise SyncError(f"cannot make {path}: {error.strerror}; is {path.parent} writable?") from error
    return descriptor


def reserve(descriptor: int, length: int, path: Path | None, have: int = 0) -> None:
    """Reserve memory from `have` up to `length` now, since a write to a full tmpfs kills the process. SyncError when there is none."""
    try:
        os.posix_fallocate(descriptor, have, max(1, length - have))
    except OSError as error:
        hint = "; give the container more with --shm-size" if error.errno == errno.ENOSPC else ""
        where = path or "memory"
        raise SyncError(f"cannot reserve {length / 2**20:.0f} MiB in {where}: {error.strerror}{hint}") from error


def _mapped(descriptor: int, size: int, flags: int) -> torch.Tensor:
    """uint8 [size]; the tensor keeps the mapping alive."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(descriptor, size, flags=flags), dtype=torch.uint8)


def _lock_byte(descriptor: int, kind: int) -> bool:
    """Set (or with F_UNLCK drop) the lock of byte 0 without waiting; False when another holds one that excludes it."""
    wanted = struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 1, 0)  # struct flock of 64-bit Linux
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wanted)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
