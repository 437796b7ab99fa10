"""The trainer's metrics for Prometheus, fed from the lines of metrics.jsonl, and its health."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter

from rollout_queue.metrics import TrainerMetrics

log = logging.getLogger(__name__)

WARN_EVERY_S = 60.0


class Telemetry:
    """Turns totals of the run into counters of this process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._metrics = TrainerMetrics(self.registry)
        self._totals: dict[int, float] = {}
        self._stall = ""
        self._warned_at = float("-inf")

    def claimed(self, incarnation: int) -> None:
        """The run is ours."""
        self._metrics.incarnation.set(incarnation)

    def step(self, row: Mapping[str, Any]) -> None:
        """A step is done; `row` is its line of metrics.jsonl."""
        m, counters = self._metrics, row["counters"]
        self._stall = ""
        m.stalled_seconds.set(0.0)
        m.steps.inc()
        m.step.set(row["version"])
        m.published_version.set(row["published"])
        for lag, count in row["lag_histogram"].items():
            m.lag_tokens.labels(lag=lag).inc(count)
        m.lag.observe(row["lag_max"])
        for counter, total in (
            (m.groups_issued, counters["issued"]),
            (m.groups_trained, counters["trained"]),
            (m.groups_filtered, counters["filtered"]),
            (m.groups_dead_lettered, counters["dead_lettered"]),
            (m.groups_reissued, row["reissued"]),
            (m.groups_refused, row["refused"]),
            (m.malformed, row["malformed"]),
        ):
            self._raise_to(counter, total)
        for state in ("queued", "leased", "delivered"):
            m.groups_open.labels(state=state).set(row["queue"][state])
        for phase, seconds in row["seconds"].items():
            if phase != "total":
                m.phase_seconds.labels(phase=phase).inc(seconds)
        m.step_seconds.observe(row["seconds"]["total"])
        if row["seconds"].get("checkpoint", 0.0) > 0.0:
            m.checkpoint_seconds.observe(row["seconds"]["checkpoint"])
        m.tokens.inc(row["tokens"])
        m.reward_mean.set(row["reward_mean"])
        m.loss.set(row.get("loss", 0.0))
        m.grad_norm.set(row.get("grad_norm", 0.0))

    def _raise_to(self, counter: Counter, total: float) -> None:
        """The first total of a resumed run is where this process begins to count."""
        before = self._totals.get(id(counter), 0.0)
        counter.inc(max(0.0, total - before))
        self._totals[id(counter)] = total

    def stalled(self, waited_s: float, who: str) -> None:
        """No step for long: say it now and then, and be unhealthy."""
        self._metrics.stalled_seconds.set(waited_s)
        self._stall = f"no step for {waited_s:.0f} s: {who}"
        if time.monotonic() - self._warned_at > WARN_EVERY_S:
            self._warned_at = time.monotonic()
            log.warning("%s", self._stall)

    def health(self) -> tuple[bool, str]:
        return not self._stall, self._stall or "ok"
