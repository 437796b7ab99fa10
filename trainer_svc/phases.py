"""Where the time of a step went."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """Seconds by phase since `restart`; `total` is wall time, so what no phase covers shows as the difference."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._began = time.monotonic()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] += time.monotonic() - start

    def seconds(self) -> dict[str, float]:
        return {**self._seconds, "total": time.monotonic() - self._began}
