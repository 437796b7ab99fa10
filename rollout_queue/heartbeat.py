"""One `heartbeat` for both sides of the queue: the trainer's takes a time, a producer's also who it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, overload


class HeartbeatArguments(ABC):
    """`heartbeat(ttl_s)` of TrainerQueue and `heartbeat(owner, ttl_s, info)` of ProducerQueue in one class."""

    @overload
    def heartbeat(self, ttl_s: float) -> None: ...

    @overload
    def heartbeat(self, owner: str, ttl_s: float, info: Mapping[str, str]) -> None: ...

    def heartbeat(self, *args: Any, **named: Any) -> None:
        if len(args) + len(named) == 1:
            self._trainer_heartbeat(*args, **named)
        else:
            self._producer_heartbeat(*args, **named)

    @abstractmethod
    def _trainer_heartbeat(self, ttl_s: float) -> None: ...

    @abstractmethod
    def _producer_heartbeat(self, owner: str, ttl_s: float, info: Mapping[str, str]) -> None: ...
