"""A producer's end of the weight channel.

own thread: register ─▶ calls ─▶ rendezvous ─▶ receive into shared memory ─▶ verify ─▶ on_staged ─▶ ack   (member.py)
reporter:   stays fresh, reports versions and free buffers                                              (reporter.py)
producer:   on_staged(weights) ─▶ generator swaps ─▶ swapped(version)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

import redis

from rollout_queue.keys import Keys
from rollout_queue.messages import Version
from weight_sync.channel import SyncSettings, Transport
from weight_sync.choice import SHM, shm_offer
from weight_sync.errors import Refused, SyncError
from weight_sync.member import Member
from weight_sync.redis_io import Outage
from weight_sync.reporter import Reporter
from weight_sync.shm_files import SharedFiles
from weight_sync.staged import StagedWeights
from weight_sync.transports import facts, make_transports

log = logging.getLogger(__name__)


class Receiver:
    """Receives each new version in the background and hands it over, whole and verified."""

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        member: str,
        hello: Mapping[str, str],
        settings: SyncSettings,
        on_staged: Callable[[StagedWeights], None],
        transport: Transport | None = None,
        gpu: Mapping[str, str] | None = None,
    ) -> None:
        """`client` returns bytes. `on_staged` is called in the receiver's thread and should return soon.

        `transport` replaces the one of its name, `gpu` what this process finds of GPUs (transports.facts).

        A version whose file is still to be read has to be answered by `swapped` before a third one can arrive.
        """
        self._settings = settings
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._files = SharedFiles(settings.shm_dir, keys.run, member)
        offers = dict(facts(settings.transport) if gpu is None else gpu)
        if settings.transport in (SHM, "auto"):
            offers |= shm_offer(self._files.token())
        self._reporter = Reporter(client, keys, member, {**hello, **offers}, settings, self._files)
        self._member = Member(
            client,
            keys,
            member,
            settings,
            make_transports(settings, transport),
            self._files,
            self._reporter,
            on_staged,
            self._stop,
        )
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=f"weight {name} {member}", daemon=True)
            for name, work in (("receiver", self._receive), ("reporter", self._report))
        ]

    # --- life
    def start(self) -> None:
        """Join. Returns at once; errors come by check()."""
        for thread in self._threads:
            thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Leave, and remove the shared files. A broadcast that hangs is not waited for longer than `timeout_s`."""
        self._stop.set()
        self._reporter.wake()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(timeout_s)
                if thread.is_alive():
                    log.warning(
                        "%s still waits for the publisher and is left behind after %g s", thread.name, timeout_s
                    )
        self._files.close()
        self._reporter.leave()

    @property
    def error(self) -> BaseException | None:
        """What ended the receiver, if it has ended on its own."""
        return self._error

    def failed(self) -> bool:
        """Has the receiver ended on its own? Then no more versions come, and the producer has to end too."""
        return self._error is not None

    def check(self) -> None:
        """Raise Refused or SyncError when the receiver has ended on its own."""
        if isinstance(self._error, Refused):
            raise Refused(str(self._error)) from self._error
        if self._error is not None:
            raise SyncError(f"the weight receiver has ended: {self._error}") from self._error

    # --- versions
    def swapped(self, version: Version) -> None:
        """The generator has taken `version`: its file, and those of versions received before it, may be written again.

        SyncError for a version that was not handed out.
        """
        self._files.swapped(version)
        self._reporter.swapped(version)

    # --- the threads
    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised again by check() in the producer
            if not isinstance(error, SyncError):
                log.exception("the weight receiver has ended")
            self._error = self._error or error
        finally:
            self._stop.set()
            self._reporter.wake()

    def _receive(self) -> None:
        outage = Outage(self._settings.retry_s, "weight receiver")
        try:
            while not self._stop.is_set():
                try:
                    self._member.step()
                    outage.over()
                except redis.RedisError as error:
                    self._member.reset()
                    outage.wait(error, self._stop)
        finally:
            self._member.close()

    def _report(self) -> None:
        outage = Outage(self._settings.retry_s, "weight reporter")
        while not self._stop.is_set():
            try:
                self._reporter.step()
                outage.over()
            except redis.RedisError as error:
                outage.wait(error, self._stop)
