"""Weights to members on the trainer's own GPU (CUDA IPC): they map one window of the publisher's device memory.

    publisher: ── window free? ─▶ host ─▶ window ─▶ event ─▶ full + 1 ───────────────┐
    member:    ── full? ─▶ wait for the event on the device ─▶ window ─▶ host ─▶ read/<rank> + 1 ─┘ window free

The handles and the two counters go through the epoch's store, polled with a deadline. NCCL cannot do this: it refuses two
ranks on one device. Only ipc_memory.py needs a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from weight_sync.channel import nothing
from weight_sync.errors import ChannelClosed, TransferFailed
from weight_sync.nccl_channel import wait

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

HANDLE_KEY, FULL_KEY = "ipc_handle", "ipc_full"


class IpcFailed(Exception):
    """What an implementation of the protocols below raises, whatever CUDA said."""


class Window(Protocol):
    """Device memory of `size` bytes that several processes map. All may raise IpcFailed."""

    @property
    def size(self) -> int: ...

    def handle(self) -> bytes:
        """For Memory.attach in another process: the memory, and the event that tells that it is filled."""
        ...

    def fill(self, flat: torch.Tensor) -> None:
        """Copy `flat` (uint8, CPU, at most `size`) in, and record the event. May return before the device has done it."""
        ...

    def drain(self, flat: torch.Tensor) -> None:
        """Wait for the event on the device, copy out into `flat`, and return when that is done."""
        ...

    def close(self) -> None: ...


class Memory(Protocol):
    """CUDA memory as one process sees it."""

    def create(self, size: int) -> Window: ...

    def attach(self, handle: bytes) -> Window: ...


class IpcChannel:
    """See channel.Channel. A broadcast larger than the window goes through it piece by piece."""

    def __init__(self, window: Window, store: Store, rank: int, size: int) -> None:
        self._window: Window | None = window
        self._store, self._rank = store, rank
        self._readers = [_read_key(r) for r in range(1, size)]
        self._turn = 0  # fills of the window

    def broadcast(self, flat: torch.Tensor, timeout_s: float, beside: Callable[[], None] = nothing) -> None:
        window = self._window
        if window is None:
            raise ChannelClosed("this IPC channel is closed; open the next epoch's")
        end = time.monotonic() + timeout_s
        what = f"IPC broadcast of {flat.numel()} bytes"
        try:
            for piece in torch.split(flat, window.size) if flat.numel() else ():
                if self._rank == 0:
                    self._fill(window, piece, end, f"{what}: a member did not read within {timeout_s:g} s")
                else:
                    self._drain(window, piece, end, f"{what}: nothing from the publisher within {timeout_s:g} s")
            beside()
            if self._rank == 0:  # the caller's memory is free only now, and the members have it
                self._wait_read(end, f"{what}: a member did not read within {timeout_s:g} s")
        except (IpcFailed, RuntimeError) as error:  # torch's store raises RuntimeError when its host is gone
            self.close()
            raise TransferFailed(f"{what}: {error}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            window.close()

    def _fill(self, window: Window, piece: torch.Tensor, end: float, late: str) -> None:
        self._wait_read(end, late)
        window.fill(piece)
        self._turn += 1
        self._store.add(FULL_KEY, 1)

    def _drain(self, window: Window, piece: torch.Tensor, end: float, late: str) -> None:
        self._turn += 1
        wait(lambda: int(self._store.add(FULL_KEY, 0)) >= self._turn, end, late)
        window.drain(piece)
        self._store.add(_read_key(self._rank), 1)

    def _wait_read(self, end: float, late: str) -> None:
        wait(lambda: all(int(self._store.add(key, 0)) >= self._turn for key in self._readers), end, late)


class IpcTransport:
    """See channel.Transport."""

    name = "ipc"

    def __init__(self, make_memory: Callable[[], Memory], window_bytes: int) -> None:
        self._make_memory, self._window_bytes = make_memory, window_bytes

    def open(self, store: Store, rank: int, size: int, address: str, timeout_s: float) -> IpcChannel:
        end = time.monotonic() + timeout_s
        what = f"IPC rendezvous of {size}"
        try:
            memory = self._make_memory()
            if rank == 0:
                window = memory.create(self._window_bytes)
                store.set(HANDLE_KEY, window.handle())  # type: ignore[arg-type]  # torch takes bytes too
            else:
                wait(lambda: store.check([HANDLE_KEY]), end, f"{what}: no handle within {timeout_s:g} s")
                window = memory.attach(bytes(store.get(HANDLE_KEY)))
            return IpcChannel(window, store, rank, size)
        except (IpcFailed, RuntimeError) as error:
            raise TransferFailed(f"{what}: {error}") from error


def _read_key(rank: int) -> str:
    return f"ipc_read/{rank}"
