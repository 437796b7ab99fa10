"""The receiver's two places for versions: files of its own in shared memory, or the publisher's memory, read in place.

    free ─acquire or borrow─▶ receiving ─keep─▶ staged ─swapped─▶ free        (receiving ─discard─▶ free)

A live file is locked (flock), whatever the pid namespace, so what is left of dead processes is told apart and removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import re
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from rollout_queue.messages import Version
from weight_sync.errors import SyncError
from weight_sync.regions import Reading, make_file, reserve

log = logging.getLogger(__name__)

PREFIX = "nbehind-weights"
FILES = 2
NAMED_WITHIN_S = 60.0  # a new file has no name for a moment, and one that stays without has lost its process


@dataclass(slots=True)
class Slot:
    """One place. `version` is set while it is staged; `turn` tells which was filled last."""

    path: Path
    descriptor: int = -1
    size: int = 0
    flat: torch.Tensor | None = None  # uint8 [size], the file mapped
    version: Version | None = None
    busy: bool = False
    turn: int = 0
    reading: Reading | None = None  # the publisher's memory, while it takes the place of the file

    def empty(self) -> None:
        """Nothing in it is needed any more."""
        self.busy, self.version = False, None
        if self.reading is not None:
            self.reading.release()
            self.reading = None


class SharedFiles:
    """Two files that are written in turn. Thread-safe."""

    def __init__(self, folder: Path, run: str, member: str) -> None:
        stem = "-".join((PREFIX, _plain(run), _plain(member), str(os.getpid()), secrets.token_hex(3)))
        self._lock = threading.Lock()
        self._slots = [Slot(folder / f"{stem}-{i}") for i in range(FILES)]
        self._token = Slot(folder / f"{stem}-token")
        self._turn = 0
        self._last_swapped: Version | None = None
        clean(folder)

    @property
    def free(self) -> int:
        """Files that a transfer may use."""
        with self._lock:
            return sum(not s.busy for s in self._slots)

    def acquire(self, size: int) -> Slot | None:
        """The free file that was filled longest ago, with room for `size` bytes; None when both hold staged versions.

        Raises SyncError when the memory is not there: it is reserved now, since a write to a full tmpfs kills the process.
        """
        with self._lock:
            slot = self._oldest_free()
            if slot is None:
                return None
            if slot.flat is None or slot.size != size:
                _open(slot, size)
            slot.busy = True
            return slot

    def borrow(self, path: Path, size: int) -> Slot | None:
        """The publisher's memory of `size` bytes instead of a file of ours; None as for acquire(). TransferFailed when it is gone."""
        with self._lock:
            slot = self._oldest_free()
            if slot is None:
                return None
            _remove(slot)
            slot.reading = Reading(path, slot.path, size)
            slot.busy = True
            return slot

    def token(self) -> Path:
        """An empty file that lives as long as we do, made once."""
        with self._lock:
            if self._token.descriptor < 0:
                self._token.descriptor = make_file(self._token.path, fcntl.LOCK_EX)
            return self._token.path

    def _oldest_free(self) -> Slot | None:
        return min((s for s in self._slots if not s.busy), key=lambda s: s.turn, default=None)

    def discard(self, slot: Slot) -> None:
        """What was received is of no use."""
        with self._lock:
            slot.empty()

    def keep(self, slot: Slot, version: Version) -> None:
        """The file holds `version` now, until swapped()."""
        with self._lock:
            self._turn += 1
            slot.version, slot.turn = version, self._turn

    def swapped(self, version: Version) -> None:
        """The engine has taken `version`: its file and those of versions received before it are free.

        SyncError for a version that was not handed out.
        """
        with self._lock:
            taken = next((s for s in self._slots if s.version == version), None)
            if taken is None:
                if version == self._last_swapped:
                    return
                raise SyncError(f"version {version.number} was reported as swapped in, but is not staged here")
            for slot in self._slots:
                if slot.version is not None and slot.turn <= taken.turn:
                    slot.empty()
            self._last_swapped = version

    def close(self) -> None:
        """Remove the files; an engine that has them mapped keeps its mapping."""
        with self._lock:
            for slot in (*self._slots, self._token):
                slot.empty()
                _remove(slot)


def clean(folder: Path) -> None:
    """Remove files of dead processes, of any run: they hold memory."""
    for path in (*folder.glob(f"{PREFIX}-*"), *folder.glob(f".{PREFIX}-*")):
        try:
            if path.name.startswith(".") and time.time() - path.stat().st_mtime < NAMED_WITHIN_S:
                continue
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # gone, or of another user
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            log.info("removed %s, left by a process that died", path)
        except OSError:  # locked: its process lives
            continue
        finally:
            os.close(descriptor)


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]", "_", text)[:64]


def region_path(folder: Path, run: str) -> Path:
    """A new name for memory that a publisher shares; clean() knows it."""
    return folder / "-".join((PREFIX, _plain(run), "trainer", str(os.getpid()), secrets.token_hex(6)))


def _open(slot: Slot, size: int) -> None:
    _remove(slot)
    length = max(1, size)
    slot.descriptor = make_file(slot.path, fcntl.LOCK_EX)
    try:
        reserve(slot.descriptor, length, slot.path)
    except SyncError:
        _remove(slot)
        raise
    mapped = mmap.mmap(slot.descriptor, length)
    slot.flat = torch.frombuffer(mapped, dtype=torch.uint8)[:size]  # the tensor keeps the mapping alive
    slot.size = size


def _remove(slot: Slot) -> None:
    slot.flat, slot.size = None, 0
    if slot.descriptor >= 0:
        os.close(slot.descriptor)
        slot.descriptor = -1
        with contextlib.suppress(FileNotFoundError):
            slot.path.unlink()
