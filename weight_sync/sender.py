"""The publisher's thread, step by step.

    staged? ─▶ checksum ─▶ who lacks it? ─▶ epoch ─▶ announce ─▶ buckets ─▶ acks
                              ▲                │         │          │         │
                              └── left out ◀───┴─────────┴──────────┴─────────┘  whoever missed the deadline; the others get
                                                                                 the same version in the next epoch
consumes: staged versions, acks, the register.  produces: calls, transfers.
waits for: the trainer's next version, joiners (poll_s), and inside a transfer for its members, each wait with a deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import redis

from rollout_queue.keys import Keys
from rollout_queue.messages import Version
from weight_sync.buckets import buckets
from weight_sync.calls import Ack, AckReader, DropCall, RefuseCall, TransferCall, send_call
from weight_sync.channel import Channel, SyncSettings, Transport
from weight_sync.checksum import checksum
from weight_sync.epoch import Absent, EpochHost
from weight_sync.errors import TransferFailed
from weight_sync.ledger import VersionLedger
from weight_sync.membership import MAX_FAILURES, Register, Roster, mismatch
from weight_sync.rendezvous import GONE_S
from weight_sync.staging import StagedVersion, StagingArea

log = logging.getLogger(__name__)

REFRESH_S = 1.0  # between two looks at the register when nobody reports


class Sender:
    """Brings the newest staged version to every member. `step` is called in a loop by the publisher's thread."""

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        incarnation: int,
        hello: Mapping[str, str],
        settings: SyncSettings,
        transport: Transport,
        staging: StagingArea,
        ledger: VersionLedger,
        stop: threading.Event,
    ) -> None:
        self._client, self._keys, self._incarnation, self._hello = client, keys, incarnation, dict(hello)
        self._settings, self._staging, self._ledger, self._stop = settings, staging, ledger, stop
        self._register = Register(client, keys)
        self._acks = AckReader(client, keys)
        self._epoch = EpochHost(client, keys, incarnation, settings, transport)
        self._current: StagedVersion | None = None
        self._version: Version | None = None
        self._transfer = 0
        self._refreshed = float("-inf")
        self._resync = True
        self.roster = Roster(incarnation)
        self.counters = {"transfers": 0, "failures": 0, "drops": 0, "last_seconds": 0.0, "last_bytes": 0}
        self.last_failure = ""

    def step(self) -> bool:
        """Do what is due; False when there was nothing to send."""
        self._take_staged()
        if self._resync:
            self._acks.skip()
            self._resync = False
        joined = self._take_acks(self._acks.read(0))
        if joined or time.monotonic() - self._refreshed >= REFRESH_S:
            self._refresh()
        if self._current is None or self._version is None:
            return False
        sessions = self.roster.targets(self._current.number)
        if not sessions:
            return False
        self._deliver(self._current, self._version, sessions)
        return True

    def reset(self) -> None:
        """After an outage of Redis: members may have missed calls, and we may have missed acks."""
        self._epoch.close()
        self._refreshed = float("-inf")
        self._resync = True

    def close(self) -> None:
        self._epoch.close()
        if self._current is not None:
            self._current.release()
            self._current = None

    # --- what is to be sent
    def _take_staged(self) -> None:
        taken = self._staging.take()
        if taken is None:
            return
        if self._current is not None:
            self._current.release()
        self._current = taken
        value = checksum(taken.flat, taken.manifest.digest)
        self._version = Version(self._incarnation, taken.number, value)
        self._ledger.computed(self._version)

    # --- who is there
    def _refresh(self) -> None:
        fresh = self._register.fresh()
        for name in self.roster.update(fresh, self._ledger.offered()):
            self._greet(name)
        for name, status in self._register.statuses().items():
            self.roster.take_status(name, status)
        self._refreshed = time.monotonic()
        for name, view in self.roster.members.items():
            if view.dropped and self._refreshed - view.dropped_at > self._settings.join_timeout_s:
                self._announce_drop(name, view.dropped)  # it may have missed the call

    def _greet(self, name: str) -> None:
        view = self.roster.members[name]
        reason = mismatch(self._hello, name, view.record)
        if reason:
            view.refused = reason
            log.error("refused: %s", reason)
            send_call(self._client, self._keys, RefuseCall(self._incarnation, name, view.record.session, reason))
        else:
            log.info("member %s (%s) has joined", name, view.record.where)

    def _take_acks(self, acks: list[Ack]) -> bool:
        """Take in acks; True when somebody registered."""
        for ack in acks:
            self.roster.take_ack(ack)
        return any(ack.kind == "joined" for ack in acks)

    def _drop(self, names: Mapping[str, str]) -> None:
        for name, reason in names.items():
            if name in self.roster.members:
                self.counters["drops"] += 1
                log.warning("member %s is left out and must join again: %s", name, reason)
                self._announce_drop(name, reason)

    def _announce_drop(self, name: str, reason: str) -> None:
        view = self.roster.members[name]
        view.dropped, view.dropped_at = reason, time.monotonic()
        send_call(self._client, self._keys, DropCall(self._incarnation, name, view.record.session, reason))

    # --- one transfer
    def _deliver(self, staged: StagedVersion, version: Version, sessions: Mapping[str, str]) -> None:
        began = time.monotonic()
        try:
            channel = self._epoch.ensure(
                sessions, staged.manifest.encode(), self._stop, lambda: self._register.gone(sessions)
            )
        except Absent as absent:
            if not self._stop.is_set():
                self._failed(dict.fromkeys(absent.members, str(absent)), absent)
            return
        except TransferFailed as error:
            self._failed({}, error)
            self._blame(sessions, -1, str(error))
            return
        self._transfer += 1
        self._ledger.offer(version, sessions)  # before the first byte: whoever stamps it was given it
        try:
            self._announce(staged, version)
            self._send(channel, staged)
        except TransferFailed as error:
            self._epoch.close()  # frees the members that still wait inside a broadcast
            self._failed({}, error)
            self._blame(sessions, self._transfer, str(error))
            return
        self._settle(sessions, version, staged, began)

    def _announce(self, staged: StagedVersion, version: Version) -> None:
        call = TransferCall(
            incarnation=self._incarnation,
            epoch=self._epoch.number,
            transfer=self._transfer,
            number=version.number,
            checksum=version.checksum,
            manifest_digest=staged.manifest.digest,
            total_bytes=staged.manifest.total_bytes,
            bucket_bytes=self._settings.bucket_bytes,
            timeout_s=self._settings.transfer_timeout_s,
        )
        send_call(self._client, self._keys, call)

    def _send(self, channel: Channel, staged: StagedVersion) -> None:
        for start, stop in buckets(staged.manifest.total_bytes, self._settings.bucket_bytes):
            if self._stop.is_set():
                raise TransferFailed("the publisher is closing")
            channel.broadcast(staged.flat[start:stop], self._settings.transfer_timeout_s)

    def _settle(self, sessions: Mapping[str, str], version: Version, staged: StagedVersion, began: float) -> None:
        """Wait for the verdicts; whoever gives none in time is left out."""
        answers = self._collect(sessions, self._transfer, self._settings.transfer_timeout_s)
        failed = {m: a.detail for m, a in answers.items() if a.kind == "failed"}
        silent = [m for m in sessions if m not in answers and not self._stop.is_set()]
        if failed or silent:
            self._epoch.close()
            why = "; ".join([*(f"{m}: {d}" for m, d in failed.items()), *(f"{m}: no answer" for m in silent)])
            self._failed({}, TransferFailed(f"version {version.number}: {why}"))
            self._count_failures(failed)
            limit = self._settings.transfer_timeout_s
            self._drop(dict.fromkeys(silent, f"no verdict on version {version.number} (deadline {limit:g} s)"))
        received = [m for m, a in answers.items() if a.kind == "received"]
        if received:
            seconds = time.monotonic() - began
            self.counters["transfers"] += 1
            self.counters.update(last_seconds=seconds, last_bytes=staged.manifest.total_bytes)
            log.info("version %d received by %s in %.2f s", version.number, ", ".join(received), seconds)

    def _collect(self, sessions: Mapping[str, str], transfer: int, timeout_s: float) -> dict[str, Ack]:
        """The members' answers to this transfer (−1: to the epoch), after at most `timeout_s`."""
        answers: dict[str, Ack] = {}
        now = time.monotonic()
        end, ask = now + timeout_s, now + GONE_S
        while len(answers) < len(sessions) and not self._stop.is_set():
            now = time.monotonic()
            left = end - now
            if left <= 0:
                break
            if now >= ask:
                if set(sessions) - set(answers) <= self._register.gone(sessions):
                    break
                ask = now + GONE_S
            acks = self._acks.read(min(left, self._settings.poll_s))
            if self._take_acks(acks):
                self._refreshed = float("-inf")
            for ack in acks:
                mine = ack.incarnation == self._incarnation and ack.epoch == self._epoch.number
                if mine and ack.transfer == transfer and sessions.get(ack.member) == ack.session:
                    answers[ack.member] = ack
        return answers

    def _blame(self, sessions: Mapping[str, str], transfer: int, why: str) -> None:
        """A collective failed, which does not tell by whom: members that live say so at once; the silent are left out."""
        if self._stop.is_set():
            return
        answers = self._collect(sessions, transfer, self._settings.silent_s)
        self._count_failures({m: a.detail for m, a in answers.items() if a.kind == "failed"})
        self._drop({m: f"silent after a failed transfer ({why})" for m in sessions if m not in answers})

    def _count_failures(self, failed: Mapping[str, str]) -> None:
        for name, detail in failed.items():
            view = self.roster.members.get(name)
            if view is not None:
                view.failures += 1
                if view.failures >= MAX_FAILURES:
                    self._drop({name: f"{view.failures} failures in a row, the last: {detail}"})

    def _failed(self, drops: Mapping[str, str], error: Exception) -> None:
        self.counters["failures"] += 1
        self.last_failure = str(error)
        log.warning("transfer failed: %s", error)
        self._drop(drops)

    # --- for the live view
    def status(self) -> dict[str, Any]:
        members = {
            name: {"version": v.acked, "free": v.free, "state": v.refused or v.dropped or "ok"}
            for name, v in list(self.roster.members.items())
        }
        return {"epoch": self._epoch.number, "members": members, "last_failure": self.last_failure, **self.counters}
