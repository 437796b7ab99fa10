"""Who is there, as the publisher's thread sees it: the register, acks, and who is left out or refused."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import redis

from rollout_queue.keys import Keys
from weight_sync.calls import Ack, AckReader, DropCall, RefuseCall, send_call
from weight_sync.channel import SyncSettings
from weight_sync.choice import SHM, has_died, possible, shares_memory
from weight_sync.errors import Refused
from weight_sync.ledger import VersionLedger
from weight_sync.membership import MAX_FAILURES, Register, Roster, mismatch
from weight_sync.rendezvous import GONE_S

log = logging.getLogger(__name__)

REFRESH_S = 1.0  # between two looks at the register when nobody reports
MAX_REST_S = 5.0


@dataclass(frozen=True, slots=True)
class Trouble:
    """A member's failures in a row, over all its sessions."""

    failures: int
    rests_until: float  # monotonic
    reason: str


class Attendance:
    """The roster, kept up to date. Used by the publisher's thread; `roster` and `counters` may be read by any."""

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        incarnation: int,
        hello: Mapping[str, str],
        facts: Mapping[str, str],
        settings: SyncSettings,
        ledger: VersionLedger,
        stop: threading.Event,
    ) -> None:
        """`facts`: what we can do ourselves (gpu.facts), against the members' of the same names."""
        self._client, self._keys, self._incarnation = client, keys, incarnation
        self._hello, self._facts, self._settings = dict(hello), dict(facts), settings
        self._ledger, self._stop = ledger, stop
        self._register = Register(client, keys)
        self._acks = AckReader(client, keys)
        self._refreshed = float("-inf")
        self._resync = True
        self.roster = Roster(incarnation)
        self.drops = 0
        self._trouble: dict[str, Trouble] = {}

    def look(self) -> None:
        """Take in what has been said, and the register when it is time."""
        if self._resync:
            self._acks.skip()
            self._resync = False
        self._take(self._acks.read(0))
        if time.monotonic() - self._refreshed >= REFRESH_S:
            self._refresh()

    def due(self, number: int) -> dict[str, str]:
        """Member -> session of those that lack version `number` and are not resting after failures."""
        now = time.monotonic()
        targets = self.roster.targets(number)
        return {n: s for n, s in targets.items() if n not in self._trouble or self._trouble[n].rests_until <= now}

    def troubles(self) -> dict[str, str]:
        """Member -> why its last transfer failed, until one succeeds. May be called by any thread."""
        return {name: trouble.reason for name, trouble in list(self._trouble.items())}

    def reset(self) -> None:
        """After an outage of Redis: acks may have been missed."""
        self._refreshed = float("-inf")
        self._resync = True

    def gone(self, sessions: Mapping[str, str]) -> set[str]:
        """Members of `sessions` that have left meanwhile, or have died on this machine."""
        views = self.roster.members
        local = (n for n in sessions if n in views and SHM in views[n].transports)
        return self._register.gone(sessions) | {n for n in local if has_died(views[n].record.hello)}

    def collect(self, sessions: Mapping[str, str], epoch: int, transfer: int, timeout_s: float) -> dict[str, Ack]:
        """The members' answers to this transfer (−1: to the epoch), after at most `timeout_s`; the dead are not waited for."""
        answers: dict[str, Ack] = {}
        now = time.monotonic()
        end, ask = now + timeout_s, now + GONE_S
        while len(answers) < len(sessions) and not self._stop.is_set():
            now = time.monotonic()
            left = end - now
            if left <= 0:
                break
            if now >= ask:
                if set(sessions) - set(answers) <= self.gone(sessions):
                    break
                ask = now + GONE_S
            acks = self._acks.read(min(left, self._settings.poll_s))
            self._take(acks)
            for ack in acks:
                mine = ack.incarnation == self._incarnation and ack.epoch == epoch
                if mine and ack.transfer == transfer and sessions.get(ack.member) == ack.session:
                    answers[ack.member] = ack
        return answers

    def failed(self, failures: Mapping[str, str]) -> None:
        """Members that said that a transfer failed, and why; after some failures in a row they are left out, and then
        tried again less and less often, since what they lack (memory, say) seldom comes back at once."""
        for name, detail in failures.items():
            count = self._trouble[name].failures + 1 if name in self._trouble else 1
            rest_s = 0.0 if count < MAX_FAILURES else min(MAX_REST_S, 0.1 * 2.0 ** min(count - MAX_FAILURES, 16))
            self._trouble[name] = Trouble(count, time.monotonic() + rest_s, detail)
            view = self.roster.members.get(name)
            if view is None:
                continue
            view.failures += 1
            if view.failures >= MAX_FAILURES:
                self.drop({name: f"{view.failures} failures in a row, the last: {detail}"})

    def drop(self, names: Mapping[str, str]) -> None:
        """Leave members out, for these reasons: they must join again."""
        for name, reason in names.items():
            if name in self.roster.members:
                self.drops += 1
                log.warning("member %s is left out and must join again: %s", name, reason)
                self._announce_drop(name, reason)

    def _take(self, acks: list[Ack]) -> None:
        for ack in acks:
            if self.roster.take_ack(ack) and ack.kind == "received":
                self._trouble.pop(ack.member, None)
        if any(ack.kind == "joined" for ack in acks):
            self._refreshed = float("-inf")

    def _refresh(self) -> None:
        fresh = self._register.fresh()
        for name in self.roster.update(fresh, self._ledger.offered()):
            self._greet(name)
        for name, status in self._register.statuses().items():
            self.roster.take_status(name, status)
        for name in self._trouble.keys() - fresh.keys():
            del self._trouble[name]
        self._refreshed = time.monotonic()
        for name, view in self.roster.members.items():
            if view.dropped and self._refreshed - view.dropped_at > self._settings.join_timeout_s:
                self._announce_drop(name, view.dropped)  # it may have missed the call

    def _greet(self, name: str) -> None:
        view = self.roster.members[name]
        theirs = view.record.hello
        reason = mismatch(self._hello, name, view.record)
        if not reason:
            try:
                shared = shares_memory(theirs)
                view.transports = possible(self._settings.transport, self._facts, theirs, shared, name)
            except Refused as error:
                reason = str(error)
        if reason:
            view.refused = reason
            log.error("refused: %s", reason)
            send_call(self._client, self._keys, RefuseCall(self._incarnation, name, view.record.session, reason))
        else:
            log.info("member %s (%s) has joined, over %s", name, view.record.where, view.transports[0])

    def _announce_drop(self, name: str, reason: str) -> None:
        view = self.roster.members[name]
        view.dropped, view.dropped_at = reason, time.monotonic()
        send_call(self._client, self._keys, DropCall(self._incarnation, name, view.record.session, reason))
