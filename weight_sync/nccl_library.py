"""nccl4py and torch.cuda behind the protocols of nccl_channel.py. Imported only where a GPU is used.

Written against nccl4py 0.6 (nccl.core: Communicator, NCCLConfig, UniqueId, get_version).
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from weight_sync.nccl_channel import NcclFailed

_cuda: Any = torch.cuda  # not typed

SUCCESS, IN_PROGRESS = 0, 7  # ncclResult_t


def versions() -> str:
    """nccl4py and the NCCL library that it loads, for the comparison of both ends; "" when one is missing."""
    try:
        import nccl.core as nccl

        found = nccl.get_version()
        if found.libnccl is None:
            return ""
        return f"{found.libnccl.version} (nccl4py {version('nccl4py')})"
    except (ImportError, OSError, RuntimeError, PackageNotFoundError):  # not installed, or no libnccl to be loaded
        return ""


class NcclLibrary:
    """See nccl_channel.Library. Uses the current CUDA device."""

    def unique_id(self) -> bytes:
        import nccl.core as nccl

        raw: bytes = _guarded(lambda: nccl.get_unique_id().as_bytes)
        return raw

    def init(self, unique_id: bytes, rank: int, size: int) -> NcclCommunicator:
        import nccl.core as nccl

        config = nccl.NCCLConfig(blocking=False)
        made = _guarded(lambda: nccl.Communicator.init(size, rank, nccl.UniqueId.from_bytes(unique_id), config))
        return NcclCommunicator(made)


class NcclCommunicator:
    """See nccl_channel.Communicator. One stream, and one device buffer as large as the largest bucket."""

    def __init__(self, inner: Any) -> None:  # an nccl.core.Communicator, which is not typed here
        self._inner = inner
        self._device = torch.device("cuda", _cuda.current_device())
        self._stream = _cuda.Stream(self._device)
        self._window = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._pending: tuple[torch.Tensor, torch.Tensor] | None = None  # (CPU, device): copied when NCCL has posted

    def ready(self) -> bool:
        state = int(_guarded(self._inner.get_async_error))
        if state not in (SUCCESS, IN_PROGRESS):
            raise NcclFailed(f"{self._last_error()} (ncclResult {state})")
        if state == SUCCESS and self._pending is not None:
            flat, window = self._pending
            self._pending = None
            with _cuda.stream(self._stream):  # not before: no work may enter the stream while NCCL posts
                flat.copy_(window, non_blocking=True)
        return state == SUCCESS

    def start(self, flat: torch.Tensor, root: bool) -> None:
        def work() -> None:
            if self._window.numel() < flat.numel():
                self._stream.synchronize()
                self._window = torch.empty(flat.numel(), dtype=torch.uint8, device=self._device)
            window = self._window[: flat.numel()]
            if root:
                with _cuda.stream(self._stream):
                    window.copy_(flat, non_blocking=True)
            self._pending = None if root else (flat, window)
            self._inner.broadcast(window, window, 0, stream=self._stream.cuda_stream)

        _guarded(work)

    def done(self) -> bool:
        state: bool = self.ready() and bool(_guarded(self._stream.query))
        return state

    def abort(self) -> None:
        _guarded(self._inner.abort)

    def _last_error(self) -> str:
        try:
            return str(self._inner.get_last_error()) or "NCCL failed"
        except Exception as error:  # noqa: BLE001 - any error of the binding: only the message is lost
            return f"NCCL failed, and does not say why ({error})"


def _guarded(work: Any) -> Any:
    """Any error of nccl4py (whose classes are its own) or CUDA as NcclFailed."""
    try:
        return work()
    except Exception as error:
        raise NcclFailed(str(error) or type(error).__name__) from error
