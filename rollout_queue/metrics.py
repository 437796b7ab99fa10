"""The Prometheus metrics of both services, by name, and the small web server that shows them.

Names begin with `nbehind_` and end with their unit. Builders take the registry: nothing is global.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rollout_queue.web import MetricsServer, serve

__all__ = ["MetricsServer", "ProducerMetrics", "TrainerMetrics", "serve"]

LAG_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
COMMIT_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)


class TrainerMetrics:
    """What the trainer counts. `groups_open` is a gauge per state, the other group counts only grow."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"nbehind_trainer_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"nbehind_trainer_{name}", text, labels, registry=registry)

        self.steps = counter("steps_total", "Steps trained in this life of the trainer.")
        self.step = gauge("step", "Steps trained in the history of the run.")
        self.published_version = gauge("published_version", "Newest weight version given out.")
        self.incarnation = gauge("incarnation", "Life of the trainer that owns the run.")
        self.lag = Histogram(
            "nbehind_trainer_lag_steps",
            "Lag of trained groups: step minus the oldest version of the group.",
            buckets=LAG_BUCKETS,
            registry=registry,
        )
        self.lag_tokens = counter("lag_tokens_total", "Trained completion tokens by their lag in steps.", ("lag",))
        self.groups_issued = counter("groups_issued_total", "Requests issued for the first time.")
        self.groups_trained = counter("groups_trained_total", "Groups trained.")
        self.groups_filtered = counter("groups_filtered_total", "Groups replaced by dynamic sampling.")
        self.groups_dead_lettered = counter("groups_dead_lettered_total", "Requests given up after max_attempts.")
        self.groups_open = gauge("groups_open", "Open requests: queued, leased or delivered.", ("state",))
        self.groups_reissued = counter("groups_reissued_total", "Requests issued again because the queue lost them.")
        self.groups_refused = counter("groups_refused_total", "Groups refused by the check of the staleness bound.")
        self.malformed = counter("malformed_entries_total", "Deliveries that could not be decoded.")
        self.phase_seconds = counter("phase_seconds_total", "Seconds spent in each phase of the loop.", ("phase",))
        self.step_seconds = Histogram(
            "nbehind_trainer_step_seconds", "Seconds from step to step.", buckets=SECONDS_BUCKETS, registry=registry
        )
        self.checkpoint_seconds = Histogram(
            "nbehind_trainer_checkpoint_seconds", "Seconds of a checkpoint.", buckets=SECONDS_BUCKETS, registry=registry
        )
        self.stalled_seconds = gauge("stalled_seconds", "Seconds without a step past run.stall_s, 0 while steps come.")
        self.tokens = counter("tokens_total", "Completion tokens trained.")
        self.reward_mean = gauge("reward_mean", "Mean reward of the newest step.")
        self.loss = gauge("loss", "Loss of the newest step.")
        self.grad_norm = gauge("grad_norm", "Gradient norm of the newest step, before clipping.")


class ProducerMetrics:
    """What one producer counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"nbehind_producer_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str, buckets: tuple[float, ...] = SECONDS_BUCKETS) -> Histogram:
            return Histogram(f"nbehind_producer_{name}_seconds", text, buckets=buckets, registry=registry)

        self.version = Gauge(
            "nbehind_producer_version", "Weight version in use, -1 before the first.", registry=registry
        )
        self.requests_in_flight = Gauge(
            "nbehind_producer_requests_in_flight", "Requests held by this producer.", registry=registry
        )
        self.tokens = counter("tokens_total", "Completion tokens generated.")
        self.groups = counter(
            "groups_total", "Groups pushed, by the queue's answer (OK, DUP, GONE, FENCED).", ("result",)
        )
        self.failures = counter("failures_total", "Requests given back as failed.")
        self.leases_lost = counter("leases_lost_total", "Leases lost while their request was worked on.")
        self.generation_seconds = seconds("generation", "Seconds to generate a group.")
        self.reward_seconds = seconds("reward", "Seconds to score a group.", COMMIT_BUCKETS)
        self.reward_timeouts = counter("reward_timeouts_total", "Completions whose reward took too long.")
        self.commit_seconds = seconds("commit", "Seconds to push a group.", COMMIT_BUCKETS)
        self.weight_swap_seconds = seconds("weight_swap", "Seconds that a new version held the engine up.")
        self.transfer_seconds = seconds("transfer", "Seconds to receive a weight version.")
        self.transfer_bytes = counter("transfer_bytes_total", "Bytes of weights received.")
        self.version.set(-1)
