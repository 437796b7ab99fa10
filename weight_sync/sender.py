"""The publisher's thread, step by step.

    staged? ─▶ who lacks it? ─┬─ shares our memory ─▶ checksum ─▶ announce the place ───────────────▶ acks
                     ▲        └─ others ─▶ epoch ─▶ announce ─▶ buckets, summed meanwhile ─▶ checksum ─┤
                     │                      │          │         │                                     │
                     └── left out ◀─────────┴──────────┴─────────┴─────────────────────────────────────┘
                         whoever missed the deadline; the others get the same version in the next epoch
consumes: staged versions, acks, the register.  produces: calls, transfers.
waits for: the trainer's next version, joiners (poll_s), and inside a transfer for its members, each wait with a deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import redis

from rollout_queue.keys import Keys
from rollout_queue.messages import Version
from weight_sync.attendance import Attendance
from weight_sync.buckets import buckets
from weight_sync.calls import ShareCall, TransferCall, send_call
from weight_sync.channel import Channel, SyncSettings, Transport
from weight_sync.checksum import as_bytes
from weight_sync.choice import SHM, common
from weight_sync.epoch import Absent, EpochHost
from weight_sync.errors import TransferFailed
from weight_sync.ledger import VersionLedger
from weight_sync.rendezvous import NotHosted
from weight_sync.staging import StagedVersion, StagingArea

log = logging.getLogger(__name__)

NO_EPOCH = -1
HOST_AGAIN_S = 1.0


class Sender:
    """Brings the newest staged version to every member. `step` is called in a loop by the publisher's thread."""

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        incarnation: int,
        settings: SyncSettings,
        transports: Mapping[str, Transport],
        attendance: Attendance,
        staging: StagingArea,
        ledger: VersionLedger,
        stop: threading.Event,
    ) -> None:
        self._client, self._keys, self._incarnation = client, keys, incarnation
        self._settings, self._staging, self._ledger, self._stop = settings, staging, ledger, stop
        self._there = attendance
        self._epoch = EpochHost(client, keys, incarnation, settings, transports)
        self._current: StagedVersion | None = None
        self._version: Version | None = None
        self._transfer = 0
        self.counters = {"transfers": 0, "failures": 0, "last_seconds": 0.0, "last_bytes": 0}
        self.last_failure = ""

    def step(self) -> bool:
        """Do what is due; False when there was nothing to send."""
        self._take_staged()
        self._there.look()
        if self._current is None:
            return False
        sessions = self._there.due(self._current.number)
        if not sessions:
            self._identify(self._current)
            self._staging.prepare()
            return False
        members = self._there.roster.members
        local = {n: s for n, s in sessions.items() if SHM in members[n].transports and self._current.path is not None}
        remote = {n: s for n, s in sessions.items() if n not in local}
        if local:
            self._share(self._current, local)
        if remote:
            self._deliver(self._current, remote)
        return True

    def reset(self) -> None:
        """After an outage of Redis: members may have missed calls, and we may have missed acks."""
        self._epoch.close()
        self._there.reset()

    def close(self) -> None:
        self._epoch.close()
        if self._current is not None:
            self._current.release()
            self._current = None

    def _take_staged(self) -> None:
        taken = self._staging.take()
        if taken is None:
            return
        if self._current is not None:
            self._current.release()
        self._current, self._version = taken, None

    def _identify(self, staged: StagedVersion) -> Version:
        """The version with its checksum."""
        if self._version is None:
            self._version = Version(self._incarnation, staged.number, staged.sums.hex(staged.manifest.digest))
            self._ledger.computed(self._version)
        return self._version

    # --- members that read our memory
    def _share(self, staged: StagedVersion, sessions: Mapping[str, str]) -> None:
        began = time.monotonic()
        version = self._identify(staged)
        self._transfer += 1
        self._ledger.offer(version, sessions)  # before it is announced: whoever stamps it was given it
        call = ShareCall(
            incarnation=self._incarnation,
            transfer=self._transfer,
            number=version.number,
            checksum=version.checksum,
            manifest_digest=staged.manifest.digest,
            total_bytes=staged.manifest.total_bytes,
            path=str(staged.path),
            sessions=dict(sessions),
        )
        send_call(self._client, self._keys, call)
        self._settle(sessions, NO_EPOCH, version, staged, began)

    # --- members of a group
    def _deliver(self, staged: StagedVersion, sessions: Mapping[str, str]) -> None:
        began = time.monotonic()
        members = self._there.roster.members
        try:
            channel = self._epoch.ensure(
                common(members[n].transports for n in sessions),
                sessions,
                staged.manifest.encode(),
                self._stop,
                lambda: self._there.gone(sessions),
            )
        except Absent as absent:
            if not self._stop.is_set():
                self._failed(absent)
                self._there.drop(dict.fromkeys(absent.members, str(absent)))
            return
        except NotHosted as error:
            self._failed(error)
            self._stop.wait(HOST_AGAIN_S)
            return
        except TransferFailed as error:
            self._failed(error)
            self._blame(sessions, -1, str(error))
            return
        self._transfer += 1
        try:
            self._announce(staged)
            version = self._send(channel, staged, sessions)
        except TransferFailed as error:
            self._epoch.close()  # frees the members that still wait inside a broadcast
            self._failed(error)
            self._blame(sessions, self._transfer, str(error))
            return
        self._settle(sessions, self._epoch.number, version, staged, began)

    def _announce(self, staged: StagedVersion) -> None:
        call = TransferCall(
            incarnation=self._incarnation,
            epoch=self._epoch.number,
            transfer=self._transfer,
            number=staged.number,
            manifest_digest=staged.manifest.digest,
            total_bytes=staged.manifest.total_bytes,
            bucket_bytes=self._settings.bucket_bytes,
            timeout_s=self._settings.transfer_timeout_s,
        )
        send_call(self._client, self._keys, call)

    def _send(self, channel: Channel, staged: StagedVersion, sessions: Mapping[str, str]) -> Version:
        """The weights, then their checksum; members know the version only with it, so it is offered just before."""
        limit_s, total = self._settings.transfer_timeout_s, staged.manifest.total_bytes
        for start, stop in buckets(total, self._settings.bucket_bytes):
            if self._stop.is_set():
                raise TransferFailed("the publisher is closing")
            channel.broadcast(staged.flat[start:stop], limit_s, partial(staged.sums.up_to, stop))
        version = self._identify(staged)
        self._ledger.offer(version, sessions)
        channel.broadcast(as_bytes(version.checksum), limit_s)
        return version

    # --- what became of it
    def _settle(
        self, sessions: Mapping[str, str], epoch: int, version: Version, staged: StagedVersion, began: float
    ) -> None:
        """Wait for the verdicts; whoever gives none in time is left out."""
        limit = self._settings.transfer_timeout_s
        answers = self._there.collect(sessions, epoch, self._transfer, limit)
        failed = {m: a.detail for m, a in answers.items() if a.kind == "failed"}
        silent = [m for m in sessions if m not in answers and not self._stop.is_set()]
        if failed or silent:
            if epoch != NO_EPOCH:
                self._epoch.close()
            why = "; ".join([*(f"{m}: {d}" for m, d in failed.items()), *(f"{m}: no answer" for m in silent)])
            self._failed(TransferFailed(f"version {version.number}: {why}"))
            self._there.failed(failed)
            self._there.drop(dict.fromkeys(silent, f"no verdict on version {version.number} (deadline {limit:g} s)"))
        received = [m for m, a in answers.items() if a.kind == "received"]
        if received:
            seconds = time.monotonic() - began
            self.counters["transfers"] += 1
            self.counters.update(last_seconds=seconds, last_bytes=staged.manifest.total_bytes)
            log.debug("version %d received by %s in %.2f s", version.number, ", ".join(received), seconds)

    def _blame(self, sessions: Mapping[str, str], transfer: int, why: str) -> None:
        """A collective failed, which does not tell by whom: members that live say so at once; the silent are left out."""
        if self._stop.is_set():
            return
        answers = self._there.collect(sessions, self._epoch.number, transfer, self._settings.silent_s)
        self._there.failed({m: a.detail for m, a in answers.items() if a.kind == "failed"})
        self._there.drop({m: f"silent after a failed transfer ({why})" for m in sessions if m not in answers})

    def _failed(self, error: Exception) -> None:
        self.counters["failures"] += 1
        self.last_failure = str(error)
        log.warning("transfer failed: %s", error)

    # --- for the live view
    def status(self) -> dict[str, Any]:
        members = {
            name: {
                "version": v.acked,
                "free": v.free,
                "transport": v.transports[0],
                "state": v.refused or v.dropped or "ok",
            }
            for name, v in list(self._there.roster.members.items())
        }
        counters = {**self.counters, "drops": self._there.drops}
        return {"epoch": self._epoch.number, "members": members, "last_failure": self.last_failure, **counters}
