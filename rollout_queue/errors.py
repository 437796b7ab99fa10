"""Errors of the contract package.

QueueError
├── MessageError          bytes that are not a message of this schema (carries the payload's head)
├── TooLarge              a body above the size limit, refused by the sender
├── StalenessError        a group that breaks the bound or stamps a version it was never given
├── Fenced                a newer incarnation has taken the run; this process must stop
├── ConnectionRefused     Redis cannot be reached or refuses the credentials
├── UnsuitableRedis       reachable, but configured so that data would be lost
└── OutOfMemory           Redis is full; the caller waits and tries again
"""

from __future__ import annotations


class QueueError(Exception):
    """Base of every error that this package raises on purpose."""


class MessageError(QueueError):
    """Bytes that are not a message of this schema; `payload_head` holds their first bytes."""

    def __init__(self, reason: str, payload: bytes = b"") -> None:
        super().__init__(reason)
        self.reason = reason
        self.payload_head = bytes(payload[:256])


class TooLarge(QueueError):
    """A group body above `redis.max_body_mb`."""


class StalenessError(QueueError):
    """A group with a token of lag > n_behind, lag < 0, or of a version that was never given out."""


class Fenced(QueueError):
    """A newer incarnation owns the run."""


class ConnectionRefused(QueueError):
    """Redis cannot be reached, or refuses user or password. The message never holds the secret."""


class UnsuitableRedis(QueueError):
    """Redis would lose data: an evicting policy, or a version below 6.2."""


class OutOfMemory(QueueError):
    """Redis refused a write because its memory is full."""
