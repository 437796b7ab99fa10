"""CUDA IPC on a real GPU: publisher and member are two processes on one device."""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing.connection import Connection

import pytest
import torch

from tests.gpu.skips import needs_gpus
from weight_sync.errors import TransferFailed
from weight_sync.ipc_channel import IpcTransport
from weight_sync.ipc_memory import CudaMemory
from weight_sync.rendezvous import HostedStore, join

pytestmark = [pytest.mark.gpu, needs_gpus(1)]
SIZE, WINDOW = 1_000_003, 1 << 18
TIMEOUT_S = 60.0


def pattern(turn: int) -> torch.Tensor:
    return torch.arange(SIZE, dtype=torch.int64).add(turn).remainder(251).to(torch.uint8)


def receive(pipe: Connection, port: int, turns: int) -> None:
    store, _ = join("127.0.0.1", port, "gpu", 1, TIMEOUT_S, threading.Event())
    channel = IpcTransport(CudaMemory, WINDOW).open(store, 1, 2, "127.0.0.1", TIMEOUT_S)
    for turn in range(turns):
        flat = torch.zeros(SIZE, dtype=torch.uint8)
        channel.broadcast(flat, TIMEOUT_S)
        pipe.send(torch.equal(flat, pattern(turn)))
    channel.close()


def test_bytes_arrive_through_a_window_of_the_same_gpu() -> None:
    host = HostedStore("127.0.0.1", "gpu", b"", TIMEOUT_S)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs, host.port, 3), daemon=True)
    process.start()
    assert not host.missing([1], TIMEOUT_S, threading.Event())
    host.go()
    channel = IpcTransport(CudaMemory, WINDOW).open(host.store, 0, 2, "127.0.0.1", TIMEOUT_S)
    for turn in range(3):
        channel.broadcast(pattern(turn), TIMEOUT_S)
        assert ours.poll(TIMEOUT_S)
        assert ours.recv() is True
    process.join(TIMEOUT_S)
    assert process.exitcode == 0
    with pytest.raises(TransferFailed, match=r"did not read within 1\.0 s"):
        channel.broadcast(pattern(9), 1.0)


def test_a_member_that_gets_no_handle_misses_its_deadline() -> None:
    host = HostedStore("127.0.0.1", "gpu", b"", TIMEOUT_S)
    with pytest.raises(TransferFailed, match="no handle"):
        IpcTransport(CudaMemory, WINDOW).open(host.store, 1, 2, "127.0.0.1", 0.5)
