"""Control logic of the NCCL and the IPC channel: every call of either side fails or hangs in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from weight_sync.channel import Channel, Transport
from weight_sync.errors import ChannelClosed, SyncError, TransferFailed
from weight_sync.fake_gpu import FakeIpc, FakeNccl
from weight_sync.ipc_channel import IpcTransport
from weight_sync.nccl_channel import NcclTransport

DEADLINE_S = 0.3
PATIENCE_S = 30.0
SIZES = (1000, 0, 256, 1)  # more and less than a window of 256 bytes
MOST_CALLS = 40


def sent(turn: int) -> torch.Tensor:
    return torch.arange(SIZES[turn], dtype=torch.int64).add(turn).to(torch.uint8)


class Side(threading.Thread):
    """One rank: opens, broadcasts all, closes twice. `error` is what ended it."""

    def __init__(self, transport: Transport, store: Any, rank: int, size: int, timeout_s: float = DEADLINE_S) -> None:
        super().__init__(daemon=True)
        self._arguments = (store, rank, size, "127.0.0.1", timeout_s)
        self._transport, self._rank, self._timeout_s = transport, rank, timeout_s
        self.channel: Channel | None = None
        self.error: BaseException | None = None
        self.got: list[torch.Tensor] = []
        self.beside = 0

    def run(self) -> None:
        try:
            self.channel = self._transport.open(*self._arguments)
            for turn, size in enumerate(SIZES):
                flat = sent(turn) if self._rank == 0 else torch.zeros(size, dtype=torch.uint8)
                self.channel.broadcast(flat, self._timeout_s, self._count)
                self.got.append(flat)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    def _count(self) -> None:
        self.beside += 1


def meet(*transports: Transport, timeout_s: float = DEADLINE_S) -> list[Side]:
    store = HashStore()
    sides = [Side(t, store, rank, len(transports), timeout_s) for rank, t in enumerate(transports)]
    for side in sides:
        side.start()
    for side in sides:
        side.join(PATIENCE_S)
        assert not side.is_alive(), "it waits without end"
    return sides


def check_end(side: Side) -> bool:
    """Did the side succeed? Else it failed as it must, and its channel is closed for good."""
    if side.error is not None:
        assert isinstance(side.error, TransferFailed), side.error
        if side.channel is not None:
            with pytest.raises(ChannelClosed):
                side.channel.broadcast(torch.zeros(1, dtype=torch.uint8), 1.0)
    if side.channel is not None:
        side.channel.close()
        side.channel.close()
    return side.error is None


@pytest.mark.parametrize("members", [1, 3])
def test_nccl_moves_the_bytes(members: int) -> None:
    hub = FakeNccl()
    libraries = [hub.library() for _ in range(members + 1)]
    sides = meet(*(NcclTransport(lambda one=one: one) for one in libraries), timeout_s=PATIENCE_S)
    for side, library in zip(sides, libraries, strict=True):
        assert check_end(side), side.error
        assert side.beside == len(SIZES)
        assert all(torch.equal(got, sent(turn)) for turn, got in enumerate(side.got))
        assert library.calls.names.count("abort") == 1


@pytest.mark.parametrize("members", [1, 3])
def test_ipc_moves_the_bytes_through_a_small_window(members: int) -> None:
    hub = FakeIpc()
    sides = meet(*(IpcTransport(hub.memory, 256) for _ in range(members + 1)), timeout_s=PATIENCE_S)
    for side in sides:
        assert check_end(side), side.error
        assert side.beside == len(SIZES)
        assert all(torch.equal(got, sent(turn)) for turn, got in enumerate(side.got))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["fail_at", "hang_at"])
def test_every_call_of_nccl_fails_in_turn(rank: int, what: str) -> None:
    """The side where it fails aborts once; the other one succeeds or fails at its deadline; nobody waits for ever."""
    seen: set[str] = set()
    at = 0
    while at < MOST_CALLS:
        hub = FakeNccl()
        libraries = [hub.library(**({what: at} if r == rank else {})) for r in (0, 1)]
        sides = meet(*(NcclTransport(lambda one=one: one) for one in libraries))
        fine = [check_end(side) for side in sides]
        names = libraries[rank].calls.names
        if all(fine):
            break  # the call number `at` is not made any more, or it is the abort of close()
        if len(names) > at:  # else the machine was so slow that a deadline came first
            seen.add(names[at])
            assert not fine[rank], names
            assert names.count("abort") == ("init" in names and (what == "hang_at" or names[at] != "init")), names
            at += 1
    assert at < MOST_CALLS, "there is no end of calls"
    wanted = {"init", "ready", "start", "done"} | ({"unique_id"} if rank == 0 else set())
    assert seen >= (wanted if what == "fail_at" else {"ready", "done"})


@pytest.mark.parametrize("rank", [0, 1])
def test_every_call_of_ipc_fails_in_turn(rank: int) -> None:
    seen: set[str] = set()
    at = 0
    while at < MOST_CALLS:
        hub = FakeIpc()
        memories = [hub.memory(fail_at=at if r == rank else -1) for r in (0, 1)]
        sides = meet(*(IpcTransport(lambda one=one: one, 2000) for one in memories))
        names = list(memories[rank].calls.names)
        if all(side.error is None for side in sides):
            break
        if len(names) > at:
            seen.add(names[at])
            assert isinstance(sides[rank].error, TransferFailed), names
            assert isinstance(sides[1 - rank].error, TransferFailed | None)
            at += 1
    assert at < MOST_CALLS, "there is no end of calls"
    assert seen >= ({"create", "handle", "fill"} if rank == 0 else {"attach", "drain"})


@pytest.mark.parametrize(
    "make", [lambda: NcclTransport(FakeNccl().library), lambda: IpcTransport(FakeIpc().memory, 64)]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_that_never_comes_is_a_missed_deadline(make: Callable[[], Transport], rank: int) -> None:
    side = Side(make(), HashStore(), rank, 2)
    side.run()
    assert isinstance(side.error, TransferFailed)
    assert str(DEADLINE_S) in str(side.error)


def test_an_error_beside_the_transfer_closes_the_channel() -> None:
    library = FakeNccl().library()
    channel = NcclTransport(lambda: library).open(HashStore(), 0, 1, "", 1.0)

    def bad() -> None:
        raise SyncError("lost")

    with pytest.raises(SyncError, match="lost"):
        channel.broadcast(torch.zeros(8, dtype=torch.uint8), 1.0, bad)
    with pytest.raises(ChannelClosed):
        channel.broadcast(torch.zeros(8, dtype=torch.uint8), 1.0)
    assert library.calls.names[-1] == "abort"
