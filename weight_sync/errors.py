"""Errors of the weight channel.

SyncError
├── Refused        the two ends do not fit; names both sides and the remedy
├── TransferFailed a rendezvous, broadcast or verification that failed or missed its deadline
├── Superseded     a newer version or a newer publisher has taken the place
└── ChannelClosed  used after close
"""

from __future__ import annotations


class SyncError(Exception):
    """Base of every error that the weight channel raises on purpose."""


class Refused(SyncError):
    """The two ends do not fit."""


class TransferFailed(SyncError):
    """A rendezvous, broadcast or verification that failed or missed its deadline."""


class Superseded(SyncError):
    """A newer version or a newer publisher has taken the place."""


class ChannelClosed(SyncError):
    """Used after close."""
