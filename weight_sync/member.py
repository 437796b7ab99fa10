"""The receiving thread of a member, step by step.

    register ─▶ wait for calls (Redis) ─┬─ EpochCall that names us ─▶ rendezvous ─▶ channel
                     ▲                  ├─ TransferCall ─▶ buckets ─▶ verify ─▶ staged, on_staged ─▶ ack received
                     │                  ├─ ShareCall that names us ─▶ the publisher's memory ─▶ verify ─▶ staged, …
                     │                  ├─ DropCall for us, registration lost ─▶ register
                     │                  └─ RefuseCall for us ─▶ Refused
                     └── failed: leave the channel, ack failed, wait for the next epoch

consumes: calls, bytes.  produces: staged versions, acks.
waits for: calls (short blocking reads); never inside a collective for the next version.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import redis
import torch

from rollout_queue.keys import Keys
from rollout_queue.messages import Version
from weight_sync.buckets import BLOCK, buckets
from weight_sync.calls import Ack, Call, CallReader, DropCall, EpochCall, RefuseCall, ShareCall, TransferCall
from weight_sync.channel import Channel, SyncSettings, Transport
from weight_sync.checksum import CHECKSUM_BYTES, BlockSums, from_bytes
from weight_sync.errors import Refused, SyncError, TransferFailed
from weight_sync.manifest import Manifest
from weight_sync.rendezvous import join, local_address
from weight_sync.reporter import Reporter
from weight_sync.shm_files import SharedFiles, Slot
from weight_sync.staged import StagedWeights

log = logging.getLogger(__name__)

NO_ROOM = "both places hold versions that the generator has not taken yet"
BLOCK_S = 0.2  # longest blocking read, so that close() is seen soon


class Member:
    """Follows the publisher of the newest incarnation. `step` is called in a loop by the receiver's thread."""

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        name: str,
        settings: SyncSettings,
        transports: Mapping[str, Transport],
        files: SharedFiles,
        reporter: Reporter,
        on_staged: Callable[[StagedWeights], None],
        stop: threading.Event,
    ) -> None:
        self._name, self._settings, self._transports = name, settings, transports
        self._files, self._reporter, self._on_staged, self._stop = files, reporter, on_staged, stop
        self._calls = CallReader(client, keys)
        self._channel: Channel | None = None
        self._manifest: Manifest | None = None
        self._incarnation = 0
        self._epoch = -1
        self._newest: Version | None = None  # received and handed over
        self._registered = False

    def step(self) -> None:
        """Register if that is due, then handle what has been called within BLOCK_S."""
        if not self._registered or self._reporter.lost.is_set():
            self._leave_channel()
            self._calls.skip()
            self._reporter.register(self._newest)
            self._registered = True
        for call in newest_epoch_only(self._calls.read(BLOCK_S)):
            if call.incarnation >= self._incarnation and not self._stop.is_set():
                self._handle(call)

    def reset(self) -> None:
        """After an outage of Redis: join again, since calls may have been missed."""
        self._leave_channel()
        self._registered = False

    def close(self) -> None:
        self._leave_channel()

    # --- calls
    def _handle(self, call: Call) -> None:
        if call.incarnation > self._incarnation:
            self._follow(call.incarnation)
        if isinstance(call, EpochCall):
            self._enter(call)
        elif isinstance(call, TransferCall):
            if call.epoch == self._epoch and self._channel is not None:
                self._take_transfer(call, self._channel)
        elif isinstance(call, ShareCall):
            if call.sessions.get(self._name) == self._reporter.session:
                self._take_shared(call)
        elif isinstance(call, DropCall | RefuseCall) and (call.member, call.session) == (
            self._name,
            self._reporter.session,
        ):
            self._leave_channel()
            if isinstance(call, RefuseCall):
                raise Refused(call.reason)
            log.warning("the publisher left us out (%s); joining again", call.reason)
            self._registered = False

    def _follow(self, incarnation: int) -> None:
        """A new publisher: whatever it has is newer than anything from the one before."""
        if self._incarnation:
            log.info("following the publisher of incarnation %d", incarnation)
        self._leave_channel()
        self._incarnation = incarnation
        self._epoch = -1

    def _enter(self, call: EpochCall) -> None:
        if call.epoch <= self._epoch:
            return
        self._leave_channel()
        self._epoch = call.epoch
        if call.sessions.get(self._name) != self._reporter.session:
            return
        try:
            end = time.monotonic() + call.timeout_s
            rank = call.ranks[self._name]
            store, raw = join(call.host, call.port, call.prefix, rank, call.timeout_s, self._stop)
            manifest = Manifest.decode(raw)
            address = local_address(self._settings.interface, call.host)
            left_s = max(0.1, end - time.monotonic())
            transport = self._transports.get(call.transport)
            if transport is None:
                raise TransferFailed(f"the publisher chose the transport {call.transport!r}, which is unknown here")
            self._channel = transport.open(store, rank, len(call.ranks) + 1, address, left_s)
            self._manifest = manifest
        except SyncError as error:
            self._answer_failed(call.epoch, -1, -1, error)

    def _leave_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel, self._manifest = None, None

    def _answer_failed(self, epoch: int, transfer: int, number: int, error: Exception) -> None:
        self._leave_channel()
        log.warning("no weights from epoch %d: %s", epoch, error)
        self._reporter.answer(Ack("", "", "failed", 0, 0, self._incarnation, epoch, transfer, number, str(error)[:300]))

    # --- one transfer
    def _take_transfer(self, call: TransferCall, channel: Channel) -> None:
        def receive() -> tuple[Slot, Manifest, str]:
            manifest = self._agreed_manifest(call)
            slot = self._files.acquire(call.total_bytes)
            if slot is None:
                raise TransferFailed(NO_ROOM)
            try:
                return slot, manifest, self._receive(call, channel, slot)
            except SyncError:
                self._files.discard(slot)
                raise

        self._take(call, call.epoch, receive)

    def _take_shared(self, call: ShareCall) -> None:
        def read() -> tuple[Slot, Manifest, str]:
            self._check_newer(call)
            slot = self._files.borrow(Path(call.path), call.total_bytes)
            if slot is None:
                raise TransferFailed(NO_ROOM)
            try:
                return slot, self._read(call, slot), call.checksum
            except SyncError:
                self._files.discard(slot)
                raise

        self._take(call, -1, read)

    def _take(
        self, call: TransferCall | ShareCall, epoch: int, bring: Callable[[], tuple[Slot, Manifest, str]]
    ) -> None:
        """Bring the version in, hand it over and say so; or say what failed."""
        began = time.monotonic()
        try:
            slot, manifest, checksum = bring()
        except SyncError as error:
            self._answer_failed(epoch, call.transfer, call.number, error)
            return
        version = Version(call.incarnation, call.number, checksum)
        self._files.keep(slot, version)
        self._newest = version
        seconds = time.monotonic() - began
        self._reporter.received(version, epoch, seconds, call.total_bytes)
        log.debug("version %d received and verified in %.2f s", version.number, seconds)
        self._on_staged(StagedWeights(version, manifest, slot.path, seconds))
        self._reporter.answer(Ack("", "", "received", 0, 0, call.incarnation, epoch, call.transfer, call.number))

    def _check_newer(self, call: TransferCall | ShareCall) -> None:
        newest = self._newest
        if newest is not None and newest.incarnation == call.incarnation and call.number <= newest.number:
            raise TransferFailed(f"version {call.number} was offered after version {newest.number}")

    def _agreed_manifest(self, call: TransferCall) -> Manifest:
        """The epoch's manifest, if the call is one that may be taken."""
        self._check_newer(call)
        manifest = self._manifest
        if manifest is None or (manifest.digest, manifest.total_bytes) != (call.manifest_digest, call.total_bytes):
            raise TransferFailed("the weights announced do not fit the epoch's manifest")
        return manifest

    def _receive(self, call: TransferCall, channel: Channel, slot: Slot) -> str:
        """Fill the slot bucket by bucket, each verified while the next one comes. Returns the checksum. Raises TransferFailed."""
        assert slot.flat is not None
        if call.bucket_bytes <= 0 or call.bucket_bytes % BLOCK:
            raise TransferFailed(f"announced with buckets of {call.bucket_bytes} bytes, not of whole blocks of {BLOCK}")
        sums, flat = BlockSums(slot.flat), slot.flat
        for start, stop in buckets(call.total_bytes, call.bucket_bytes):
            if self._stop.is_set():
                raise TransferFailed("the receiver is closing")
            channel.broadcast(flat[start:stop], call.timeout_s, partial(sums.up_to, start))
        told = torch.empty(CHECKSUM_BYTES, dtype=torch.uint8)
        channel.broadcast(told, call.timeout_s, partial(sums.up_to, call.total_bytes))
        _verify(sums, call, from_bytes(told))
        return from_bytes(told)

    def _read(self, call: ShareCall, slot: Slot) -> Manifest:
        """Verify the publisher's memory in place. Raises TransferFailed, SyncError for a manifest that is none."""
        assert slot.reading is not None
        manifest = Manifest.decode(slot.reading.trailer)
        if (manifest.digest, manifest.total_bytes) != (call.manifest_digest, call.total_bytes):
            raise TransferFailed("the publisher's memory holds other weights than were announced")
        sums = BlockSums(slot.reading.raw)
        for _, stop in buckets(call.total_bytes, self._settings.bucket_bytes):
            if self._stop.is_set():
                raise TransferFailed("the receiver is closing")
            sums.up_to(stop)
        _verify(sums, call, call.checksum)
        return manifest


def _verify(sums: BlockSums, call: TransferCall | ShareCall, told: str) -> None:
    found = sums.hex(call.manifest_digest)
    if found != told:
        raise TransferFailed(f"version {call.number} arrived damaged: checksum {found} instead of {told!r}")


def newest_epoch_only(calls: list[Call]) -> list[Call]:
    """Calls without those of epochs that a later call has ended: whoever slept does not go to an old rendezvous."""
    ends: dict[int, int] = {}
    for call in calls:
        if isinstance(call, EpochCall):
            ends[call.incarnation] = max(call.epoch, ends.get(call.incarnation, -1))
    return [
        call
        for call in calls
        if not isinstance(call, EpochCall | TransferCall) or call.epoch >= ends.get(call.incarnation, -1)
    ]
