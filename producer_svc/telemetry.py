"""The producer's metrics for Prometheus, its health, and its line in the live view."""

from __future__ import annotations

import logging
import time
from collections import Counter

from prometheus_client import CollectorRegistry

from rollout_queue.messages import CommitResult, Group, Version
from rollout_queue.metrics import ProducerMetrics

log = logging.getLogger(__name__)

FULL_WARN_S = 30.0


class Telemetry:
    """What one producer tells of itself."""

    def __init__(self, name: str) -> None:
        self.registry = CollectorRegistry()
        self._name = name
        self._metrics = ProducerMetrics(self.registry)
        self._results: Counter[str] = Counter()
        self._tokens = 0
        self._rate = 0.0
        self._rate_from = (time.monotonic(), 0)
        self._full_at = float("-inf")
        self.stage = "starting"

    def committed(self, result: CommitResult, group: Group, commit_s: float) -> None:
        """The queue answered a push."""
        m = self._metrics
        self._results[result.value] += 1
        self._tokens += len(group.token_ids)
        m.groups.labels(result=result.value).inc()
        m.tokens.inc(len(group.token_ids))
        m.generation_seconds.observe(group.generated_at - group.started_at)
        m.reward_seconds.observe(group.scored_at - group.generated_at)
        m.commit_seconds.observe(commit_s)
        m.reward_timeouts.inc(float(group.reward_parts["timeout"].sum()) if "timeout" in group.reward_parts else 0.0)
        if result is not CommitResult.OK:
            log.info("group %s (attempt %d) was answered %s", group.id, group.attempt, result.value)

    def failed(self) -> None:
        self._metrics.failures.inc()

    def lost(self) -> None:
        self._metrics.leases_lost.inc()

    def swapped(self, version: Version, seconds: float) -> None:
        self._metrics.version.set(version.number)
        self._metrics.weight_swap_seconds.observe(seconds)
        log.debug("version %d.%d is in use after %.3f s", version.incarnation, version.number, seconds)

    def received(self, nbytes: int, seconds: float) -> None:
        self._metrics.transfer_bytes.inc(nbytes)
        self._metrics.transfer_seconds.observe(seconds)

    def full(self, reason: str) -> None:
        """Redis is full; say so now and then."""
        if time.monotonic() - self._full_at > FULL_WARN_S:
            self._full_at = time.monotonic()
            log.warning("waiting to push: %s", reason)

    def info(self, version: Version | None, in_flight: int) -> dict[str, str]:
        """The producer's line in the live view; tokens per second since the last call that was a second ago."""
        self._metrics.requests_in_flight.set(in_flight)
        since, tokens = self._rate_from
        elapsed = time.monotonic() - since
        if elapsed >= 1.0:
            self._rate = (self._tokens - tokens) / elapsed
            self._rate_from = (time.monotonic(), self._tokens)
        return {
            "stage": self.stage,
            "version": str(version.number) if version else "-",
            "tokens": str(self._tokens),
            "tokens_per_s": f"{self._rate:.1f}",
            "in_flight": str(in_flight),
            "groups": str(self._results["OK"]),
        }

    def health(self) -> tuple[bool, str]:
        return True, f"{self._name}: {self.stage}"
