"""Signals of a service: the first SIGTERM or SIGINT asks it to drain, a second one ends it at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType

log = logging.getLogger(__name__)

EXIT_INTERRUPTED = 130


class StopFlag:
    """Set by the first signal."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason = ""

    def __call__(self) -> bool:
        return self._event.is_set()

    def set(self, reason: str) -> None:
        self.reason = self.reason or reason
        self._event.set()

    def install(self) -> None:
        """Take over SIGTERM and SIGINT (main thread only)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def receive(self, reason: str) -> None:
        """A signal came: the first one asks, the second one ends the process."""
        if self._event.is_set():
            os._exit(EXIT_INTERRUPTED)
        self.set(reason)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.receive(signal.Signals(number).name)
