"""What a member says of itself: its session, its heartbeat, its status and its acks."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace

import redis

from rollout_queue.keys import Keys
from rollout_queue.messages import Version
from weight_sync.calls import Ack, send_ack
from weight_sync.channel import SyncSettings
from weight_sync.errors import Refused
from weight_sync.membership import Record, Register
from weight_sync.shm_files import SharedFiles

SESSIONS_REMEMBERED = 8


class Reporter:
    """Thread-safe. Every statement carries a growing `order`, so that the last one holds whatever overtakes what."""

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        member: str,
        hello: Mapping[str, str],
        settings: SyncSettings,
        files: SharedFiles,
    ) -> None:
        self._client, self._keys, self._member, self._hello = client, keys, member, dict(hello)
        self._settings, self._files = settings, files
        self._register = Register(client, keys)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._order = 0
        self._sessions: list[str] = []  # ours, the newest last
        self._changed = False
        self._status: dict[str, object] = {}
        self.lost = threading.Event()  # the registration is gone; the receiving thread has to register again

    @property
    def session(self) -> str:
        return self._sessions[-1] if self._sessions else ""

    def register(self, have: Version | None) -> None:
        """Join under a new session; `have` is the newest version received."""
        session = secrets.token_hex(6)
        with self._lock:
            self._sessions = [*self._sessions[1 - SESSIONS_REMEMBERED :], session]
        where = f"host {socket.gethostname()}, pid {os.getpid()}"
        record = Record(session, self._hello, where, have, self._files.free)
        self._register.register(self._member, record, self._ack("joined"), self._settings.alive_ttl_s)
        self.lost.clear()

    def answer(self, ack: Ack) -> None:
        """Answer a call. Identity, order and free buffers are filled in here."""
        filled = self._ack(ack.kind)
        send_ack(
            self._client,
            self._keys,
            replace(ack, member=filled.member, session=filled.session, order=filled.order, free=filled.free),
        )

    def received(self, version: Version, epoch: int, seconds: float, nbytes: int) -> None:
        """For the status: a version has arrived."""
        self._note(version=list(version), epoch=epoch, seconds=round(seconds, 4), bytes=nbytes)

    def swapped(self, version: Version) -> None:
        """For the status, and for the publisher: a version was swapped in and its buffer is free. Does not block."""
        self._note(swapped=list(version))

    def wake(self) -> None:
        self._wake.set()

    def step(self) -> None:
        """Heartbeat, and what has changed. Waits up to a third of the ttl for a change. Refused when the name is taken."""
        self._wake.wait(self._settings.alive_ttl_s / 3)
        self._wake.clear()
        if not self.session or self.lost.is_set():
            return
        held = self._register.refresh(self._member, self.session, self._settings.alive_ttl_s)
        if not held:
            self.lost.set()
        elif held not in self._sessions:
            raise Refused(
                f"another process has joined as producer {self._member}; give every producer a name of its own"
            )
        with self._lock:
            changed, self._changed = self._changed, False
        ack = self._ack("free")
        with self._lock:
            status = {**self._status, "session": ack.session, "order": ack.order, "free": ack.free}
        self._register.report(self._member, status)
        if changed:
            send_ack(self._client, self._keys, ack)

    def leave(self) -> None:
        """Forget the registration, if Redis still answers."""
        if not self.session:
            return
        try:
            self._register.leave(self._member, self.session)
        except redis.RedisError:
            return  # the mark expires by itself

    def _note(self, **values: object) -> None:
        with self._lock:
            self._status.update(values)
            self._changed = True
        self._wake.set()

    def _ack(self, kind: str) -> Ack:
        with self._lock:
            self._order += 1
            return Ack(self._member, self.session, kind, self._order, self._files.free)
