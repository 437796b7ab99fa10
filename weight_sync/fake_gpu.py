"""Stand-ins for NCCL and CUDA IPC within one process, whose ranks are threads. Any of their calls can be made to fail.

hub = FakeNccl();  NcclTransport(hub.library),  NcclTransport(lambda: hub.library(fail_at=3))
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from weight_sync.ipc_channel import IpcFailed
from weight_sync.nccl_channel import NcclFailed

NEVER = -1


@dataclass
class Calls:
    """Counts calls (a poll that is repeated once); number `fail_at` raises `error`, from `hang_at` on nothing gets done."""

    error: Callable[[str], Exception]
    fail_at: int = NEVER
    hang_at: int = NEVER
    names: list[str] = field(default_factory=list)

    def __call__(self, name: str) -> None:
        if self.names and self.names[-1] == name:
            return
        self.names.append(name)
        if len(self.names) - 1 == self.fail_at:
            raise self.error(f"{name} failed on purpose")

    @property
    def hangs(self) -> bool:
        return self.hang_at != NEVER and len(self.names) > self.hang_at


@dataclass
class _Group:
    size: int
    joined: set[int] = field(default_factory=set)
    sent: list[torch.Tensor] = field(default_factory=list)


class FakeNccl:
    """What the ranks share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[bytes, _Group] = {}

    def library(self, fail_at: int = NEVER, hang_at: int = NEVER) -> FakeLibrary:
        return FakeLibrary(self, Calls(NcclFailed, fail_at, hang_at))

    def join(self, unique_id: bytes, rank: int, size: int) -> _Group:
        with self._lock:
            group = self._groups.setdefault(unique_id, _Group(size))
            group.joined.add(rank)
            return group


class FakeLibrary:
    """See nccl_channel.Library."""

    def __init__(self, hub: FakeNccl, calls: Calls) -> None:
        self._hub, self.calls = hub, calls

    def unique_id(self) -> bytes:
        self.calls("unique_id")
        return secrets.token_bytes(128)

    def init(self, unique_id: bytes, rank: int, size: int) -> FakeCommunicator:
        self.calls("init")
        return FakeCommunicator(self._hub.join(unique_id, rank, size), self.calls)


class FakeCommunicator:
    """See nccl_channel.Communicator. Like NCCL, it says nothing of peers that are gone."""

    def __init__(self, group: _Group, calls: Calls) -> None:
        self._group, self._calls = group, calls
        self._turn = 0
        self._wanted: torch.Tensor | None = None

    def ready(self) -> bool:
        self._calls("ready")
        return not self._calls.hangs and len(self._group.joined) == self._group.size

    def start(self, flat: torch.Tensor, root: bool) -> None:
        self._calls("start")
        self._wanted = None if root else flat
        if root and not self._calls.hangs:
            self._group.sent.append(flat.clone())

    def done(self) -> bool:
        self._calls("done")
        if self._calls.hangs:
            return False
        if self._wanted is not None:
            if len(self._group.sent) <= self._turn:
                return False
            self._wanted.copy_(self._group.sent[self._turn])
            self._wanted = None
            self._turn += 1
        return True

    def abort(self) -> None:
        self._calls("abort")


class FakeIpc:
    """See ipc_channel.Memory; the handle of a window is its number."""

    def __init__(self) -> None:
        self._windows: list[torch.Tensor] = []

    def memory(self, fail_at: int = NEVER) -> FakeMemory:
        return FakeMemory(self._windows, Calls(IpcFailed, fail_at))


class FakeMemory:
    """See ipc_channel.Memory."""

    def __init__(self, windows: list[torch.Tensor], calls: Calls) -> None:
        self._windows, self.calls = windows, calls

    def create(self, size: int) -> FakeWindow:
        self.calls("create")
        self._windows.append(torch.zeros(size, dtype=torch.uint8))
        return FakeWindow(self._windows[-1], len(self._windows) - 1, self.calls)

    def attach(self, handle: bytes) -> FakeWindow:
        self.calls("attach")
        return FakeWindow(self._windows[int(handle)], int(handle), self.calls)


class FakeWindow:
    """See ipc_channel.Window."""

    def __init__(self, flat: torch.Tensor, number: int, calls: Calls) -> None:
        self._flat, self._number, self._calls = flat, number, calls

    @property
    def size(self) -> int:
        return self._flat.numel()

    def handle(self) -> bytes:
        self._calls("handle")
        return str(self._number).encode()

    def fill(self, flat: torch.Tensor) -> None:
        self._calls("fill")
        self._flat[: flat.numel()].copy_(flat)

    def drain(self, flat: torch.Tensor) -> None:
        self._calls("drain")
        flat.copy_(self._flat[: flat.numel()])

    def close(self) -> None:
        self._calls("close")
