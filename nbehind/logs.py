"""One logging set-up for all services: ISO time (UTC), level, service, message, on standard error."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

OWN_PACKAGES = ("nbehind", "rollout_queue", "weight_sync", "producer_svc", "trainer_svc")


class ServiceFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO producer-0: message`; a traceback follows on lines of its own."""

    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {service}: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        when = datetime.fromtimestamp(record.created, UTC)
        return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def setup_logging(service: str, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send the records of this process to `stream` (standard error). Other people's loggers: WARNING and above."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(ServiceFormatter(service))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for package in OWN_PACKAGES:
        logging.getLogger(package).setLevel(level)
    logging.captureWarnings(True)
