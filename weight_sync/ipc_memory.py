"""torch.cuda's IPC handles behind the protocols of ipc_channel.py. Imported only where a GPU is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import torch

from weight_sync.ipc_channel import IpcFailed

_cuda: Any = torch.cuda  # not typed
_FIELDS = 8  # of what UntypedStorage._share_cuda_() returns: bytes, int and bool only


class CudaMemory:
    """See ipc_channel.Memory. Uses the current device."""

    def create(self, size: int) -> CudaWindow:
        def work() -> CudaWindow:
            device = _cuda.current_device()
            flat = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))
            return CudaWindow(flat, _cuda.Event(interprocess=True))

        made: CudaWindow = _guarded(work)
        return made

    def attach(self, handle: bytes) -> CudaWindow:
        def work() -> CudaWindow:
            size, memory, event = msgpack.unpackb(handle)
            if len(memory) != _FIELDS:
                raise IpcFailed(f"a handle of {len(memory)} parts; do both ends run the same version of torch?")
            device = _cuda.current_device()  # the publisher's number of the same GPU may be another
            storage = torch.UntypedStorage._new_shared_cuda(device, *memory[1:])
            flat = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", device))
            flat.set_(storage, 0, (size,), (1,))
            opened = _cuda.Event.from_ipc_handle(torch.device("cuda", device), event)
            return CudaWindow(flat, opened)

        made: CudaWindow = _guarded(work)
        return made


class CudaWindow:
    """See ipc_channel.Window."""

    def __init__(self, flat: torch.Tensor, event: Any) -> None:
        self._flat, self._event = flat, event
        self._stream = _cuda.Stream(flat.device)

    @property
    def size(self) -> int:
        return self._flat.numel()

    def handle(self) -> bytes:
        def work() -> bytes:
            self._event.record(self._stream)  # an event has a handle once it was recorded
            storage: Any = self._flat.untyped_storage()
            memory = storage._share_cuda_()
            raw: bytes = msgpack.packb([self.size, list(memory), self._event.ipc_handle()])
            return raw

        made: bytes = _guarded(work)
        return made

    def fill(self, flat: torch.Tensor) -> None:
        def work() -> None:
            with _cuda.stream(self._stream):
                self._flat[: flat.numel()].copy_(flat, non_blocking=True)
                self._event.record(self._stream)

        _guarded(work)

    def drain(self, flat: torch.Tensor) -> None:
        def work() -> None:
            with _cuda.stream(self._stream):
                self._stream.wait_event(self._event)
                flat.copy_(self._flat[: flat.numel()], non_blocking=True)
            self._stream.synchronize()

        _guarded(work)

    def close(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)


def _guarded(work: Callable[[], Any]) -> Any:
    """Any error of CUDA as IpcFailed."""
    try:
        return work()
    except IpcFailed:
        raise
    except Exception as error:
        raise IpcFailed(str(error) or type(error).__name__) from error
