"""Weights over gloo (CPU, TCP). The process group is its own; torch's default group is not touched."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, ProcessGroupGloo, Store

from weight_sync.channel import nothing
from weight_sync.errors import ChannelClosed, TransferFailed

WAIT_MARGIN_S = 1.0  # the operation ends by its own deadline first, so that nothing runs on behind our back


class GlooChannel:
    """A gloo group. torch 2.13 cannot abort a gloo operation: it ends by its deadline or by the loss of its peer."""

    def __init__(self, group: Any) -> None:  # a ProcessGroupGloo, whose methods torch does not type
        self._group = group

    def broadcast(self, flat: torch.Tensor, timeout_s: float, beside: Callable[[], None] = nothing) -> None:
        """See channel.Channel. gloo sends along a binomial tree."""
        if self._group is None:
            raise ChannelClosed("this gloo channel is closed; open the next epoch's")
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=timeout_s)
        try:
            # no work or group in a variable that an error's traceback holds: the sockets would be open past close()
            _finish(self._group.broadcast([flat], options), beside, timeout_s + WAIT_MARGIN_S)
        except RuntimeError as error:
            raise TransferFailed(f"gloo broadcast of {flat.numel()} bytes: {brief(error)}") from error

    def close(self) -> None:
        """Dropping the last reference closes the sockets; the interpreter lock is released meanwhile."""
        self._group = None


def _finish(work: Any, beside: Callable[[], None], limit_s: float) -> None:
    try:
        beside()
        work.wait(timedelta(seconds=limit_s))
    finally:
        del work


class GlooTransport:
    """See channel.Transport."""

    name = "gloo"

    def open(self, store: Store, rank: int, size: int, address: str, timeout_s: float) -> GlooChannel:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        try:
            options._devices = [ProcessGroupGloo.create_device(hostname=address)]
            return GlooChannel(ProcessGroupGloo(store, rank, size, options))
        except RuntimeError as error:
            raise TransferFailed(f"gloo rendezvous of {size} at {address}: {brief(error)}") from error


def brief(error: BaseException) -> str:
    """First line of a torch error, without the source path that gloo puts before it."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return line.split("] ", 1)[-1].split(" This is typically", 1)[0][:300]
