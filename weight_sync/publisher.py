"""The trainer's end of the weight channel.

trainer thread: publish(n) ─copy─▶ staging            returns after one copy
own thread:     staging ─▶ sender.step(): checksum ─▶ epoch ─▶ transfer ─▶ acks     (sender.py)
                beside the copy, when nothing else is due: staging.follow() sums it up
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import redis
import torch

from rollout_queue.connection import repeat
from rollout_queue.keys import Keys
from rollout_queue.messages import Version
from weight_sync.attendance import Attendance
from weight_sync.calls import Started, send_call
from weight_sync.channel import SyncSettings, Transport
from weight_sync.choice import SHM
from weight_sync.errors import ChannelClosed, SyncError
from weight_sync.ledger import VersionLedger
from weight_sync.redis_io import Outage
from weight_sync.regions import Region
from weight_sync.sender import Sender
from weight_sync.shm_files import clean, region_path
from weight_sync.staging import StagingArea
from weight_sync.transports import facts, make_transports

log = logging.getLogger(__name__)


class Publisher:
    """Gives every member each new version of the weights, without holding up the trainer."""

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        incarnation: int,
        hello: Mapping[str, str],
        settings: SyncSettings | None = None,
        transport: Transport | None = None,
        gpu: Mapping[str, str] | None = None,
    ) -> None:
        """`client` returns bytes. `hello` is compared with every member's (membership.mismatch); `transport` replaces
        the one of its name, `gpu` what this process finds of GPUs (transports.facts).

        SyncError when `settings.interface` is not there.
        """
        self._client, self._keys, self._incarnation = client, keys, incarnation
        self._settings = settings or SyncSettings()
        self._dtype = _dtype(hello)
        mode = self._settings.transport
        self._staging = StagingArea(self._make_region)
        self._ledger = VersionLedger(incarnation)
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._error: BaseException | None = None
        own = facts(mode) if gpu is None else gpu
        self._there = Attendance(client, keys, incarnation, hello, own, self._settings, self._ledger, self._stop)
        self._sender = Sender(
            client,
            keys,
            incarnation,
            self._settings,
            make_transports(self._settings, transport),
            self._there,
            self._staging,
            self._ledger,
            self._stop,
        )
        if mode in (SHM, "auto"):
            clean(self._settings.shm_dir)
        self._thread = threading.Thread(target=self._run, name="weight publisher", daemon=True)

    # --- life
    def start(self) -> None:
        """Announce this incarnation and begin to serve. Superseded when a newer one exists."""
        repeat(
            self._client,
            lambda: send_call(self._client, self._keys, Started(self._incarnation)),
            self._settings.retry_s,
        )
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop serving. A broadcast that hangs on a stopped member is not waited for longer than `timeout_s`."""
        self._stop.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning("the weight publisher still waits for a member and is left behind after %g s", timeout_s)
        self._staging.close()

    def healthy(self) -> bool:
        """Does the thread serve?"""
        return self._error is None and self._thread.is_alive() and not self._stop.is_set()

    def check(self) -> None:
        """Raise what ended the thread, if it ended."""
        if self._error is not None:
            raise SyncError(f"the weight publisher has ended: {self._error}") from self._error
        if self._thread.ident is not None and not self._thread.is_alive() and not self._stop.is_set():
            raise SyncError("the weight publisher's thread has ended without an error")

    # --- versions
    def publish(self, number: int, named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> None:
        """Copy the weights of version `number` once, and return; they are sent in the background.

        Floating tensors are cast to `dtype` (default: the hello's `dtype`, else as they are) while copying. Tied weights are
        given once. Raises Refused when the tensors differ in name, shape or dtype from the first version's, SyncError when
        the thread has died or `number` does not grow.
        """
        self.check()
        if self._stop.is_set():
            raise ChannelClosed(f"version {number} is published after the publisher was closed")
        began = time.monotonic()
        self._wake.set()  # to follow the copy
        self._staging.stage(number, named, dtype if dtype is not None else self._dtype)
        self._wake.set()
        log.debug("version %d staged in %.3f s", number, time.monotonic() - began)

    def seed_history(self, history: Mapping[int, str]) -> None:
        """Versions of the surviving history that an earlier incarnation gave out, after a resume."""
        self._ledger.seed(history)

    def history(self) -> dict[int, str]:
        """Number -> checksum of every version that was ever offered to a member, and of those seeded."""
        return self._ledger.offered()

    def given(self, member: str) -> set[int]:
        """Numbers of the versions that `member` was offered by this publisher, marked before they are sent."""
        return self._ledger.given(member)

    def prune(self, below: int) -> None:
        """Forget history and offers of versions older than `below`."""
        self._ledger.prune(below)

    def wait_checksum(self, number: int, timeout_s: float) -> Version:
        """Identity of the published version `number`. Superseded when a newer one overtook it, TransferFailed on timeout."""
        return self._ledger.wait(number, timeout_s, self.check)

    # --- for the live view
    def members(self) -> dict[str, int]:
        """Fresh, accepted members -> the newest version each has received (−1: none yet)."""
        return {name: view.acked for name, view in list(self._there.roster.members.items()) if view.usable}

    def troubles(self) -> dict[str, str]:
        """Members -> why the last transfer to them failed, until one succeeds."""
        return self._there.troubles()

    def status(self) -> dict[str, Any]:
        return {
            "incarnation": self._incarnation,
            "staged": self._staging.newest,
            "skipped": self._staging.skipped,
            "healthy": self.healthy(),
            **self._sender.status(),
        }

    def _make_region(self) -> Region:
        """Memory for a version, which members on this machine can read where the mode allows it."""
        mode = self._settings.transport
        if mode not in (SHM, "auto"):
            return Region(None)
        return Region(region_path(self._settings.shm_dir, self._keys.run), must_share=mode == SHM)

    # --- the thread
    def _run(self) -> None:
        outage = Outage(self._settings.retry_s, "weight publisher")
        try:
            while not self._stop.is_set():
                self._wake.clear()
                try:
                    busy = self._sender.step()
                    outage.over()
                except redis.RedisError as error:
                    self._sender.reset()
                    outage.wait(error, self._stop)
                    continue
                if not busy and not self._staging.follow(self._settings.poll_s):
                    self._wake.wait(self._settings.poll_s)
        except BaseException as error:  # raised again by check() in the trainer's thread
            if not isinstance(error, SyncError):
                log.exception("the weight publisher has ended")
            self._error = error
        finally:
            self._sender.close()


def _dtype(hello: Mapping[str, str]) -> torch.dtype | None:
    name = hello.get("dtype")
    if name is None:
        return None
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype):
        raise SyncError(f"the hello's dtype {name!r} is not a torch dtype, such as float32 or bfloat16")
    return kind
