"""The transports that a process can open, by name."""

from __future__ import annotations

from collections.abc import Mapping

from weight_sync.channel import Transport
from weight_sync.gloo_channel import GlooTransport


def make_transports() -> Mapping[str, Transport]:
    """Name -> transport of groups. Making them loads nothing; what is missing shows in the facts (choice.py)."""
    return {"gloo": GlooTransport()}


def facts(mode: str) -> dict[str, str]:
    """What this process could use beyond the processor, for the register."""
    return {}
