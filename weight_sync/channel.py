"""The seam between the weight channel and what moves the bytes, and the settings of both ends. Imports no torch.

store (rendezvous.py) ─▶ Transport.open ─▶ Channel ─▶ broadcast, broadcast, … ─▶ close
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from weight_sync.buckets import BLOCK
from weight_sync.choice import MODES

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """All times in seconds. The first four are configuration, the others have values that fit every run."""

    bucket_bytes: int = 32 * 1024 * 1024  # sent in one broadcast; rounded down to whole blocks, at least one
    join_timeout_s: float = 20.0  # deadline of the rendezvous of an epoch
    transfer_timeout_s: float = 120.0  # deadline of one bucket, and of the verification after the last
    transport: str = "auto"  # one of choice.MODES; the same on both ends
    interface: str = ""  # network interface; empty = loopback for a loopback Redis, else the way to Redis
    alive_ttl_s: float = 6.0  # a member silent for this long has left
    poll_s: float = 0.05  # longest wait between two looks at Redis
    retry_s: float = 60.0  # longest outage of Redis that is waited out
    silent_s: float = 2.0  # after a failed broadcast, a member that says nothing for this long is left out
    shm_dir: Path = Path("/dev/shm")  # noqa: S108 - memory that other processes of this machine can map

    def __post_init__(self) -> None:
        if self.transport not in MODES:
            raise ValueError(f"sync setting transport = {self.transport!r} must be one of {', '.join(MODES)}")
        for name in (
            "bucket_bytes",
            "join_timeout_s",
            "transfer_timeout_s",
            "alive_ttl_s",
            "poll_s",
            "retry_s",
            "silent_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"sync setting {name} = {getattr(self, name)} must be above 0")
        object.__setattr__(self, "bucket_bytes", max(1, self.bucket_bytes // BLOCK) * BLOCK)


def nothing() -> None:
    """No work beside a broadcast."""


class Channel(Protocol):
    """One group of processes: the publisher as rank 0 and the members of an epoch. Used by one thread."""

    def broadcast(self, flat: torch.Tensor, timeout_s: float, beside: Callable[[], None] = nothing) -> None:
        """Send `flat` (uint8, contiguous) from rank 0 to all, in place; `beside` is called once while the bytes move.

        Raises TransferFailed when a peer is lost or the deadline is missed; after that the channel can only be closed.
        """
        ...

    def close(self) -> None:
        """Leave the group. Peers inside a broadcast fail soon after. Bounded in time; may be repeated."""
        ...


class Transport(Protocol):
    """Makes channels."""

    @property
    def name(self) -> str:
        """As in `sync.transport`; both ends must have the same."""
        ...

    def open(self, store: Store, rank: int, size: int, address: str, timeout_s: float) -> Channel:
        """Meet the other `size` − 1 processes through `store`. `address` is this process's own on the network.

        Raises TransferFailed when not all of them came before the deadline.
        """
        ...
