"""Weights over NCCL (CUDA), through NVIDIA's nccl4py: both ends load one NCCL library, whatever their torch brings.

    store: unique id ─▶ init (non-blocking) ─▶ poll ─▶ for each bucket: host ─▶ device ─▶ broadcast ─▶ device ─▶ host
                            └── error or deadline ─▶ abort, which also frees whoever waits inside

Nothing here waits in NCCL: every call returns at once and is polled with a deadline. A group is always left by abort,
which is local; finalize and destroy wait for the peers. Only nccl_library.py needs a GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from weight_sync.channel import nothing
from weight_sync.errors import ChannelClosed, TransferFailed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = logging.getLogger(__name__)

POLL_S = 0.0005
ID_KEY = "nccl_id"


class NcclFailed(Exception):
    """What an implementation of the protocols below raises, whatever NCCL or CUDA said."""


class Communicator(Protocol):
    """One rank. Every call returns at once; all may raise NcclFailed."""

    def ready(self) -> bool:
        """Is nothing in progress any more in NCCL?"""
        ...

    def start(self, flat: torch.Tensor, root: bool) -> None:
        """Begin to send (`root`) or receive `flat` (uint8, CPU) through device memory."""
        ...

    def done(self) -> bool:
        """Has the device finished what start() began, so that `flat` may be used?"""
        ...

    def abort(self) -> None:
        """End everything, at once and for good."""
        ...


class Library(Protocol):
    """NCCL as one process sees it."""

    def unique_id(self) -> bytes: ...

    def init(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        """Begin to meet the other ranks; the communicator may be used when it is ready()."""
        ...


class NcclChannel:
    """See channel.Channel."""

    def __init__(self, communicator: Communicator, rank: int) -> None:
        self._communicator: Communicator | None = communicator
        self._root = rank == 0

    def broadcast(self, flat: torch.Tensor, timeout_s: float, beside: Callable[[], None] = nothing) -> None:
        if self._communicator is None:
            raise ChannelClosed("this NCCL channel is closed; open the next epoch's")
        end = time.monotonic() + timeout_s
        what = f"NCCL broadcast of {flat.numel()} bytes"
        try:
            if flat.numel():
                self._communicator.start(flat, self._root)
            beside()
            wait(self._communicator.ready, end, f"{what}: not posted within {timeout_s:g} s")
            wait(self._communicator.done, end, f"{what}: a peer is missing after {timeout_s:g} s")
        except NcclFailed as error:
            self.close()
            raise TransferFailed(f"{what}: {error}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            abort(communicator)


class NcclTransport:
    """See channel.Transport."""

    name = "nccl"

    def __init__(self, make_library: Callable[[], Library]) -> None:
        self._make_library = make_library

    def open(self, store: Store, rank: int, size: int, address: str, timeout_s: float) -> NcclChannel:
        """`address` has no meaning here: NCCL finds its own way (NCCL_SOCKET_IFNAME, NCCL_IB_HCA)."""
        end = time.monotonic() + timeout_s
        communicator: Communicator | None = None
        what = f"NCCL rendezvous of {size}"
        try:
            library = self._make_library()
            if rank == 0:
                unique_id = library.unique_id()
                store.set(ID_KEY, unique_id)  # type: ignore[arg-type]  # torch takes bytes too
            else:
                wait(lambda: store.check([ID_KEY]), end, f"{what}: no id from the publisher within {timeout_s:g} s")
                unique_id = bytes(store.get(ID_KEY))
            communicator = library.init(unique_id, rank, size)
            wait(communicator.ready, end, f"{what}: a peer is missing after {timeout_s:g} s")
            return NcclChannel(communicator, rank)
        except BaseException as error:
            if communicator is not None:
                abort(communicator)
            if isinstance(error, NcclFailed | RuntimeError):  # torch's store raises RuntimeError when its host is gone
                raise TransferFailed(f"{what}: {error}") from error
            raise


def wait(true: Callable[[], bool], end: float, late: str) -> None:
    """Poll until `true`; TransferFailed with `late` at the monotonic time `end`."""
    while not true():
        if time.monotonic() >= end:
            raise TransferFailed(late)
        time.sleep(POLL_S)


def abort(communicator: Communicator) -> None:
    """An abort that fails is the end of this communicator all the same."""
    try:
        communicator.abort()
    except NcclFailed as error:
        log.warning("NCCL could not abort a group, whose memory stays until this process ends: %s", error)
