"""Members and publishers of the weight channel as processes of their own, and transports that fail on purpose."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing.connection import Connection
from typing import Any

import torch

from rollout_queue.connection import connect
from rollout_queue.keys import Keys
from rollout_queue.messages import Version
from weight_sync.channel import Channel, SyncSettings, nothing
from weight_sync.gloo_channel import GlooTransport
from weight_sync.manifest import Manifest
from weight_sync.publisher import Publisher
from weight_sync.receiver import Receiver
from weight_sync.staged import StagedWeights

HELLO = {"schema": "1", "dtype": "float32", "tokenizer": "t", "model": "m", "transport": "gloo"}
SETTINGS = SyncSettings(
    transport="gloo",
    bucket_bytes=64 * 1024,
    join_timeout_s=3.0,
    transfer_timeout_s=3.0,
    alive_ttl_s=3.0,
    poll_s=0.02,
    silent_s=1.0,
)
PATIENCE_S = 60.0  # for what must happen soon, on a machine that is busy

torch.set_num_threads(1)


def weights(number: int, size: int = 100_000) -> list[tuple[str, torch.Tensor]]:
    """Weights of version `number`: several dtypes, a scalar, an empty and a non-contiguous tensor; 10 buckets in all."""
    seeded = torch.Generator().manual_seed(number)
    return [
        ("embed", torch.randn(size // 10, 10, generator=seeded)),
        ("scale", torch.randn((), generator=seeded)),
        ("nothing", torch.empty(0, 7)),
        ("turned", torch.randn(30, 50, generator=seeded).t()),
        ("half", torch.randn(333, generator=seeded).to(torch.bfloat16)),
        ("steps", torch.tensor([number, -number])),
        ("mask", torch.rand(17, generator=seeded) > 0.5),
    ]


def fingerprint(named: Mapping[str, torch.Tensor]) -> str:
    """Of names, shapes, dtypes and bits."""
    digest = sha256()
    for name, tensor in named.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def expected(number: int, size: int = 100_000, dtype: torch.dtype = torch.float32) -> str:
    """What a member must hold of weights(number)."""
    return fingerprint({n: t.to(dtype) if t.is_floating_point() else t for n, t in weights(number, size)})


def file_fingerprint(staged: StagedWeights) -> str:
    """Of the weights in the shared file, as an engine's process would map them."""
    size = staged.manifest.total_bytes
    flat = torch.from_file(str(staged.path), shared=False, size=size, dtype=torch.uint8)
    return fingerprint(Manifest.decode(staged.manifest.encode()).views(flat))


# --- transports that fail
class Faulty:
    """A transport whose channels call `fault(flat)` at their broadcasts number `first`, `first` + 1, … (counted over all)."""

    name = "gloo"

    def __init__(
        self,
        fault: Callable[[torch.Tensor], None],
        first: int,
        times: int = 1,
        after: bool = False,
        at_open: bool = False,
    ) -> None:
        self._inner = GlooTransport()
        self._at_open = at_open
        self._fault, self._first, self._times, self._after = fault, first, times, after
        self.count = 0

    def open(self, store: Any, rank: int, size: int, address: str, timeout_s: float) -> Channel:
        if self._at_open:
            self._fault(torch.empty(0))
        return _FaultyChannel(self, self._inner.open(store, rank, size, address, timeout_s))

    def around(self, flat: torch.Tensor, broadcast: Callable[[], None]) -> None:
        due = self._first <= self.count < self._first + self._times
        self.count += 1
        if due and not self._after:
            self._fault(flat)
        broadcast()
        if due and self._after:
            self._fault(flat)


class _FaultyChannel:
    def __init__(self, owner: Faulty, inner: Channel) -> None:
        self._owner, self._inner = owner, inner

    def broadcast(self, flat: torch.Tensor, timeout_s: float, beside: Callable[[], None] = nothing) -> None:
        self._owner.around(flat, lambda: self._inner.broadcast(flat, timeout_s, beside))

    def close(self) -> None:
        self._inner.close()


def _signal_self(number: int) -> Callable[[torch.Tensor], None]:
    return lambda _: os.kill(os.getpid(), number)


def _flip(flat: torch.Tensor) -> None:
    flat[flat.numel() // 2] ^= 1


FAULTS: Mapping[str, Callable[[], Faulty | None]] = {
    "none": lambda: None,
    "kill": lambda: Faulty(_signal_self(signal.SIGKILL), 4),
    "stop": lambda: Faulty(_signal_self(signal.SIGSTOP), 4),
    "kill_open": lambda: Faulty(_signal_self(signal.SIGKILL), 0, times=0, at_open=True),
    "kill_last": lambda: Faulty(_signal_self(signal.SIGKILL), 7, after=True),
    "flip": lambda: Faulty(_flip, 4, after=True),
    "flip_always": lambda: Faulty(_flip, 0, times=10**9, after=True),
}


# --- processes
def member_main(
    pipe: Connection,
    url: str,
    run: str,
    name: str,
    hello: Mapping[str, str],
    settings: SyncSettings,
    fault: str,
    swap: bool,
) -> None:
    """A member that reports what it is handed; `swap` answers each version at once, else on command."""
    client = connect(url)

    def on_staged(staged: StagedWeights) -> None:
        pipe.send(("staged", staged.version, file_fingerprint(staged), str(staged.path)))
        if swap:
            receiver.swapped(staged.version)

    receiver = Receiver(client, Keys(run), name, hello, settings, on_staged, FAULTS[fault]())
    receiver.start()
    try:
        while not receiver.failed():
            if pipe.poll(0.02):
                command, argument = pipe.recv()
                if command == "close":
                    break
                receiver.swapped(argument)
        else:
            pipe.send(("failed", type(receiver.error).__name__, str(receiver.error), ""))
    finally:
        receiver.close()
        client.close()


def publisher_main(
    pipe: Connection,
    url: str,
    run: str,
    incarnation: int,
    hello: Mapping[str, str],
    settings: SyncSettings,
    fault: str,
) -> None:
    """A publisher that publishes what it is told to."""
    client = connect(url)
    publisher = Publisher(client, Keys(run), incarnation, hello, settings, FAULTS[fault]())
    publisher.start()
    try:
        while True:
            command, argument = pipe.recv()
            if command == "close":
                break
            publisher.publish(argument, weights(argument))
    finally:
        publisher.close()


@dataclass
class Handle:
    """The parent's end of a process."""

    process: Any
    pipe: Connection

    def next(self, timeout_s: float = PATIENCE_S) -> tuple[str, Any, str, str]:
        """What the process said next; AssertionError when it says nothing in time."""
        assert self.pipe.poll(timeout_s), f"{self.process.name} said nothing for {timeout_s} s"
        said: tuple[str, Any, str, str] = self.pipe.recv()
        return said

    def staged(self, timeout_s: float = PATIENCE_S) -> tuple[Version, str]:
        """The next version that was handed out, with its fingerprint."""
        kind, version, found, _ = self.next(timeout_s)
        assert kind == "staged", (kind, version, found)
        return version, found

    def silent(self, for_s: float) -> bool:
        return not self.pipe.poll(for_s)

    def tell(self, command: str, argument: Any = None) -> None:
        self.pipe.send((command, argument))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def continue_(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def wait_stopped(self) -> None:
        """Until the process has stopped itself."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            with open(f"/proc/{self.process.pid}/stat") as stat:  # noqa: PTH123
                if stat.read().rsplit(")", 1)[1].split()[0] in "Tt":
                    return
            time.sleep(0.02)
        raise AssertionError("the process did not stop")


@contextmanager
def processes(url: str, run: str) -> Iterator[Spawner]:
    """Starts members and publishers; whatever is left at the end is ended."""
    spawner = Spawner(url, run)
    try:
        yield spawner
    finally:
        spawner.close()


class Spawner:
    """Processes come from a fork server that has torch loaded, which saves seconds for each."""

    def __init__(self, url: str, run: str) -> None:
        self._url, self._run = url, run
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._handles: list[Handle] = []

    def member(
        self,
        name: str,
        hello: Mapping[str, str] = HELLO,
        settings: SyncSettings = SETTINGS,
        fault: str = "none",
        swap: bool = True,
    ) -> Handle:
        return self._start(member_main, name, (self._run, name, hello, settings, fault, swap))

    def publisher(
        self,
        incarnation: int,
        settings: SyncSettings = SETTINGS,
        fault: str = "none",
        hello: Mapping[str, str] = HELLO,
    ) -> Handle:
        return self._start(publisher_main, f"publisher {incarnation}", (self._run, incarnation, hello, settings, fault))

    def _start(self, main: Callable[..., None], name: str, arguments: tuple[Any, ...]) -> Handle:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=main, name=name, args=(theirs, self._url, *arguments), daemon=True)
        process.start()
        theirs.close()
        handle = Handle(process, ours)
        self._handles.append(handle)
        return handle

    def close(self) -> None:
        for handle in self._handles:
            if handle.process.is_alive():
                handle.continue_()
                try:
                    handle.tell("close")
                    handle.process.join(10)
                except OSError:
                    handle.kill()
            if handle.process.is_alive():
                handle.kill()
            handle.pipe.close()
