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
from rollout_queue.staleness import deadline, last_open_step, min_version
from trainer_svc.order import DataOrder


@dataclass(slots=True)
class OpenRequest:
    """An open request: the oldest version it may begin with, its newest attempt, its own failures, its delivery if there is one."""

    min_version: int
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
        self._open.update({r: OpenRequest(min_version(r.step, self._n_behind)) for r in new})
        return new

    def replace(self, request: RequestId, published: int) -> RequestId:
        """Resolve a filtered or dead request and open its replacement, in the same slot.

        It begins with `published` or newer, so its deadline is never nearer than that of what it replaces.
        """
        del self._open[request]
        successor = request._replace(round=request.round + 1)
        self._open[successor] = OpenRequest(max(published, min_version(request.step, self._n_behind)))
        return successor

    def restore(self, ids: Iterable[RequestId], next_step_to_issue: int) -> None:
        """The state of a checkpoint."""
        self._open = {r: OpenRequest(min_version(r.step, self._n_behind)) for r in ids}
        self.next_step_to_issue = next_step_to_issue

    # --- deliveries
    def deliver(self, header: GroupHeader) -> bool:
        """Note a delivery; False when it counts for nothing: resolved before, delivered twice, unknown, or of an attempt
        before a reissue and begun with a version older than the reissue may begin with (Redis was set back).
        """
        entry = self._open.get(header.id)
        if entry is None or entry.header is not None:
            return False
        if header.attempt < entry.attempt and header.oldest_version < entry.min_version:
            return False
        entry.header = header
        entry.attempt = max(entry.attempt, header.attempt)
        return True

    def reopen(self, request: RequestId, published: int, *, failed: bool) -> OpenRequest:
        """Forget a delivery that cannot be used, and raise the attempt for a reissue, which begins with `published` or newer."""
        entry = self._open[request]
        entry.min_version = max(entry.min_version, published)
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

    def choose_ready(
        self, step: int, floor: int, published: int, started: Mapping[RequestId, int]
    ) -> tuple[int, list[GroupHeader] | None]:
        """(floor, groups): the delivered groups with the nearest deadlines, if the rest can still be trained in time.

        `started` maps the requests in generation or delivered to the version they began with, as of `floor`. The rest is in
        time when for every later step d at most slots(step+1) + … + slots(d) groups are left whose deadline is ≤ d
        (earliest deadline first is optimal, Liu and Layland 1973); a request not begun counts with the deadline it
        would have if it began with the oldest version that is still allowed. If a higher floor (≤ `published`) is needed for that, it is
        returned: raise it and ask again. Groups are None while they cannot be chosen.
        """
        ranked = sorted(self.delivered(), key=lambda h: (deadline(h.oldest_version, self._n_behind), h.id))
        batch = ranked[: self._order.slots(step)]
        if len(batch) < self._order.slots(step):
            return floor, None
        rest = set(self._open) - {h.id for h in batch}
        for candidate in range(floor, max(floor, published) + 1):
            if self._in_time(step, sorted(self._worst_deadline(r, candidate, started) for r in rest)):
                return candidate, sorted(batch, key=lambda h: h.id)
        return floor, None

    def _worst_deadline(self, request: RequestId, floor: int, started: Mapping[RequestId, int]) -> int:
        entry = self._open[request]
        if entry.header is not None:
            return deadline(entry.header.oldest_version, self._n_behind)
        return deadline(started.get(request, max(floor, entry.min_version)), self._n_behind)

    def _in_time(self, step: int, deadlines: list[int]) -> bool:
        """Can groups with these ascending deadlines all be trained after `step`?"""
        capacity, d = 0, step
        for count, due in enumerate(deadlines, start=1):
            while d < due and self._order.slots(d + 1):
                d += 1
                capacity += self._order.slots(d)
            if count > capacity:
                return False
        return True

    def enough(self, step: int) -> bool:
        """Could `step` be formed in the order `ready`, deadlines aside?"""
        return sum(o.header is not None for o in self._open.values()) >= self._order.slots(step) > 0

    def resolve(self, ids: Iterable[RequestId]) -> None:
        for request in ids:
            del self._open[request]
