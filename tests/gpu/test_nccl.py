"""NCCL on real GPUs: one is enough for a group of the publisher alone, two for a transfer."""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing.connection import Connection

import pytest
import torch

from tests.gpu.skips import needs_gpus
from weight_sync.errors import TransferFailed
from weight_sync.nccl_channel import NcclTransport
from weight_sync.nccl_library import NcclLibrary, versions
from weight_sync.rendezvous import HostedStore, join

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(1),
    pytest.mark.skipif(not versions(), reason="nccl4py or libnccl is missing"),
]
SIZE = 1_000_003
TIMEOUT_S = 60.0


def pattern() -> torch.Tensor:
    return torch.arange(SIZE, dtype=torch.int64).remainder(251).to(torch.uint8)


def receive(pipe: Connection, port: int) -> None:
    torch.cuda.set_device(1)
    store, _ = join("127.0.0.1", port, "gpu", 1, TIMEOUT_S, threading.Event())
    channel = NcclTransport(NcclLibrary).open(store, 1, 2, "127.0.0.1", TIMEOUT_S)
    flat = torch.zeros(SIZE, dtype=torch.uint8)
    channel.broadcast(flat, TIMEOUT_S)
    pipe.send(torch.equal(flat, pattern()))
    channel.close()


def test_a_group_of_one_opens_sends_and_is_left() -> None:
    host = HostedStore("127.0.0.1", "gpu", b"", TIMEOUT_S)
    channel = NcclTransport(NcclLibrary).open(host.store, 0, 1, "127.0.0.1", TIMEOUT_S)
    called = []
    channel.broadcast(pattern(), TIMEOUT_S, lambda: called.append(1))
    channel.broadcast(torch.empty(0, dtype=torch.uint8), TIMEOUT_S)
    assert called == [1]
    channel.close()
    channel.close()


def test_a_peer_that_never_comes_is_a_missed_deadline() -> None:
    host = HostedStore("127.0.0.1", "gpu", b"", TIMEOUT_S)
    with pytest.raises(TransferFailed, match="a peer is missing"):
        NcclTransport(NcclLibrary).open(host.store, 0, 2, "127.0.0.1", 3.0)


@needs_gpus(2)
def test_bytes_arrive_on_another_gpu() -> None:
    host = HostedStore("127.0.0.1", "gpu", b"", TIMEOUT_S)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs, host.port), daemon=True)
    process.start()
    assert not host.missing([1], TIMEOUT_S, threading.Event())
    host.go()
    channel = NcclTransport(NcclLibrary).open(host.store, 0, 2, "127.0.0.1", TIMEOUT_S)
    channel.broadcast(pattern(), TIMEOUT_S)
    assert ours.poll(TIMEOUT_S)
    assert ours.recv() is True
    channel.close()
    process.join(TIMEOUT_S)
