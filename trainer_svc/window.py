"""The trainer's view of every open request, and the decisions made from it. Pure: no I/O, no clock.

    next_ids ─▶ opened ─▶ deliver ─▶ choose (strict | ready) ─▶ resolve
                  ▲          │
                  └─ reopen ◀┴─ lost, refused, missing from the census

The trainer is the truth: what this class holds is what exists; the queue is compared with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollout_queue.messages import GroupHeader, OpenState, RequestId
from rollout_queue.staleness import deadline, last_open_step
from trainer_svc.order import DataOrder


@dataclass(slots=True)
class OpenRequest:
    """An open request: its newest attempt, its own failures, and its delivery if there is one."""

    attempt: int = 0
    failures: int = 0
    header: GroupHeader | None = None


class Window:
    """Open requests of the steps up to published + n_behind."""

    def __init__(self, order: DataOrder, n_behind: int) -> None:
        self._order = order
        self._n_behind = n_behind
        self._open: dict[RequestId, OpenRequest] = {}
        self.next_step_to_issue = 0

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._open

    def __getitem__(self, request: RequestId) -> OpenRequest:
        return self._open[request]

    def ids(self) -> list[RequestId]:
        return sorted(self._open)

    def delivered(self) -> list[GroupHeader]:
        return [o.header for _, o in sorted(self._open.items()) if o.header is not None]

    # --- issue
    def open_steps(self, published: int) -> list[RequestId]:
        """Open every request that may exist now that `published` is out; returns the new ones in request order."""
        new: list[RequestId] = []
        while self.next_step_to_issue <= last_open_step(published, self._n_behind):
            step = self.next_step_to_issue
            if not self._order.slots(step):
                break
            new += [RequestId(step, slot) for slot in range(self._order.slots(step))]
            self.next_step_to_issue += 1
        self._open.update({request: OpenRequest() for request in new})
        return new

    def replace(self, request: RequestId) -> RequestId:
        """Resolve a filtered or dead request and open its replacement, in the same slot."""
        del self._open[request]
        successor = request._replace(round=request.round + 1)
        self._open[successor] = OpenRequest()
        return successor

    def restore(self, ids: Iterable[RequestId], next_step_to_issue: int) -> None:
        """The state of a checkpoint."""
        self._open = {request: OpenRequest() for request in ids}
        self.next_step_to_issue = next_step_to_issue

    # --- deliveries
    def deliver(self, header: GroupHeader) -> bool:
        """Note a delivery; False when it counts for nothing (resolved before, delivered twice, or unknown)."""
        entry = self._open.get(header.id)
        if entry is None or entry.header is not None:
            return False
        entry.header = header
        entry.attempt = max(entry.attempt, header.attempt)
        return True

    def reopen(self, request: RequestId, *, failed: bool) -> OpenRequest:
        """Forget a delivery that cannot be used, and raise the attempt for a reissue."""
        entry = self._open[request]
        entry.header = None
        entry.attempt += 1
        entry.failures += failed
        return entry

    def missing(self, census: Mapping[RequestId, OpenState]) -> list[RequestId]:
        """Undelivered requests that the queue does not know: they must be issued again."""
        return [r for r, o in sorted(self._open.items()) if o.header is None and r not in census]

    def strangers(self, census: Mapping[RequestId, OpenState], retained: Iterable[RequestId]) -> list[RequestId]:
        """Requests that the queue holds open, but which are neither open here nor kept for the next checkpoint."""
        kept = set(retained)
        return [r for r in sorted(census) if r not in self._open and r not in kept]

    def note_attempts(self, census: Mapping[RequestId, OpenState]) -> None:
        """Take over the attempts that grew by takeovers, so that a reissue is newer than all of them."""
        for request, state in census.items():
            if request in self._open:
                self._open[request].attempt = max(self._open[request].attempt, state.attempt)

    # --- the batch
    def choose_strict(self, step: int) -> list[GroupHeader] | None:
        """The groups requested for `step`, in request order; None while one is missing."""
        mine = [self._open[r].header for r in sorted(self._open) if r.step == step]
        headers = [h for h in mine if h is not None]
        return headers if len(headers) == self._order.slots(step) == len(mine) else None

    def choose_ready(self, step: int, started: Mapping[RequestId, int]) -> list[GroupHeader] | None:
        """Groups whose deadline is `step`, then the nearest deadlines; None while one of the former is unfinished.

        `started` maps the requests in generation or delivered to the version they began with, as of the floor for step + 1.
        """
        slots = self._order.slots(step)
        due = {r for r, v in started.items() if r in self._open and v >= 0 and deadline(v, self._n_behind) <= step}
        if any(self._open[r].header is None for r in due):
            return None
        ranked = sorted(self.delivered(), key=lambda h: (deadline(h.oldest_version, self._n_behind), h.id))
        if len(ranked) < slots:
            return None
        return sorted(ranked[:slots], key=lambda h: h.id)

    def enough(self, step: int) -> bool:
        """Could `step` be formed in the order `ready`, deadlines aside?"""
        return sum(o.header is not None for o in self._open.values()) >= self._order.slots(step) > 0

    def resolve(self, ids: Iterable[RequestId]) -> None:
        for request in ids:
            del self._open[request]
