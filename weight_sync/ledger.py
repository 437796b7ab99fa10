"""Which versions exist and who was offered them: what the trainer checks stamps against. Thread-safe, no I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from rollout_queue.messages import Version
from weight_sync.errors import Superseded, TransferFailed

SLICE_S = 0.2  # between two looks at whether the publisher still lives


class VersionLedger:
    """Checksums of this publisher's versions, and the versions that each member was offered."""

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._changed = threading.Condition()
        self._computed: dict[int, str] = {}
        self._offered: dict[int, str] = {}
        self._given: dict[str, set[int]] = {}

    def seed(self, history: Mapping[int, str]) -> None:
        """Versions of the surviving history that earlier incarnations gave out."""
        with self._changed:
            self._offered.update(history)

    def computed(self, version: Version) -> None:
        with self._changed:
            self._computed[version.number] = version.checksum
            self._changed.notify_all()

    def offer(self, version: Version, members: Iterable[str]) -> None:
        """`version` is about to be sent to `members`."""
        with self._changed:
            self._offered[version.number] = version.checksum
            for member in members:
                self._given.setdefault(member, set()).add(version.number)

    def offered(self) -> dict[int, str]:
        with self._changed:
            return dict(self._offered)

    def given(self, member: str) -> set[int]:
        with self._changed:
            return set(self._given.get(member, ()))

    def prune(self, below: int) -> None:
        """Forget versions older than `below`, which nothing open can be stamped with any more."""
        with self._changed:
            for table in (self._computed, self._offered):
                for number in [n for n in table if n < below]:
                    del table[number]
            for member in list(self._given):
                self._given[member] = {n for n in self._given[member] if n >= below}
                if not self._given[member]:
                    del self._given[member]

    def wait(self, number: int, timeout_s: float, check: Callable[[], None]) -> Version:
        """Version `number` with its checksum. Superseded when a newer one overtook it, TransferFailed on timeout.

        `check` raises when nobody will compute it any more.
        """
        end = time.monotonic() + timeout_s
        with self._changed:
            while number not in self._computed:
                check()
                if self._computed and number < max(self._computed):
                    raise Superseded(
                        f"version {number} was overtaken by version {max(self._computed)} before it was sent"
                    )
                left = end - time.monotonic()
                if left <= 0:
                    raise TransferFailed(f"no checksum of version {number} after {timeout_s:g} s; was it published?")
                self._changed.wait(min(left, SLICE_S))
            return Version(self._incarnation, number, self._computed[number])
