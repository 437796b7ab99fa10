"""Every Redis key of a run. All share the hash tag {run}, so they live in one cluster slot."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_queue.messages import RequestId

PREFIX = "nbehind"
REQUEST_GROUP = "producers"  # consumer group of the request stream
ROLLOUT_GROUP = "trainer"  # consumer group of the rollout stream
ROLLOUT_CONSUMER = "rank0"


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of the run `run`."""

    run: str

    def _key(self, *parts: str) -> str:
        return ":".join((PREFIX, "{" + self.run + "}", *parts))

    # --- queue
    @property
    def run_state(self) -> str:
        """Hash: incarnation, published, floor, ended, refused (bodies that could not be set)."""
        return self._key("state")

    @property
    def requests(self) -> str:
        """Stream of requests, read by the group `producers`."""
        return self._key("requests")

    @property
    def open(self) -> str:
        """Hash: request id -> what the queue knows of it."""
        return self._key("open")

    @property
    def rollouts(self) -> str:
        """Stream of group headers and dead notices, read by the group `trainer`."""
        return self._key("rollouts")

    @property
    def dead(self) -> str:
        """Stream of dead letters, kept to the newest 1,000."""
        return self._key("dead")

    @property
    def requeued(self) -> str:
        """List of `<entry> <item id>`: prompts of dead requests that the next replacements roll out."""
        return self._key("requeued")

    def body(self, request_id: RequestId, incarnation: int, attempt: int) -> str:
        """One binary value: the arrays of a group."""
        return self._key("body", str(request_id), str(incarnation), str(attempt))

    @property
    def trainer_alive(self) -> str:
        """Exists while the trainer's heartbeat is fresh."""
        return self._key("alive", "trainer")

    def producer_alive(self, producer: str) -> str:
        """Exists while the producer's heartbeat is fresh."""
        return self._key("alive", "producer", producer)

    @property
    def producer_info(self) -> str:
        """Hash: producer id -> msgpack map for the live view."""
        return self._key("producers")

    # --- weight channel
    @property
    def members(self) -> str:
        """Hash: member id -> msgpack hello (library versions, dtype, hashes)."""
        return self._key("sync", "members")

    def member_alive(self, member: str) -> str:
        """Exists while the member's receiver runs."""
        return self._key("sync", "alive", member)

    @property
    def member_status(self) -> str:
        """Hash: member id -> msgpack status (version, epoch, last transfer seconds and bytes)."""
        return self._key("sync", "status")

    @property
    def sync_calls(self) -> str:
        """Stream of the publisher's announcements (rendezvous and transfers), kept to the newest 64."""
        return self._key("sync", "calls")

    @property
    def sync_acks(self) -> str:
        """Stream of the members' answers, kept to the newest 1,000."""
        return self._key("sync", "acks")
