"""The transports of groups by name, and what this process can use of them. Loads CUDA and NCCL only where they are used."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weight_sync.channel import SyncSettings, Transport
from weight_sync.choice import GLOO, SHM
from weight_sync.gloo_channel import GlooTransport
from weight_sync.ipc_channel import IpcTransport, Memory
from weight_sync.nccl_channel import Library, NcclTransport


def make_transports(settings: SyncSettings, given: Transport | None = None) -> Mapping[str, Transport]:
    """Every transport of groups; `given` replaces the one of its name."""
    made: list[Transport] = [GlooTransport(), NcclTransport(_nccl), IpcTransport(_ipc, settings.bucket_bytes)]
    return {one.name: one for one in (*made, *([given] if given else []))}


def facts(mode: str) -> dict[str, str]:
    """For the register: the GPU of this process and its NCCL, as far as `mode` may use them; empty without a GPU.

    On a GPU this begins a CUDA context.
    """
    if mode in (GLOO, SHM) or not torch.cuda.is_available():
        return {}
    from weight_sync.nccl_library import versions

    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return {"gpu": uuid, "nccl": versions()}


def _nccl() -> Library:
    from weight_sync.nccl_library import NcclLibrary

    return NcclLibrary()


def _ipc() -> Memory:
    from weight_sync.ipc_memory import CudaMemory

    return CudaMemory()
