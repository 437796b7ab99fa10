"""From deliveries to the batch of a step.

    issue ─▶ poll ─▶ window.deliver ─▶ choose ─▶ fetch ─▶ check_group ─▶ groups of the step
      ▲                                            │          │
      └── reissue: missing in the census ◀─────────┴──────────┴── body lost, refused

waits for: deliveries. Unblocked by: a complete batch, the stop flag, or give_up_s (Stalled).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nbehind.config import Config
from rollout_queue.errors import OutOfMemory, StalenessError
from rollout_queue.messages import DeadNotice, Group, GroupHeader, OpenState, Request, RequestId, Sampling
from rollout_queue.queue import TrainerQueue
from rollout_queue.staleness import check_group, floor_after, min_version
from trainer_svc.data import Item
from trainer_svc.errors import Stalled
from trainer_svc.evaluation import Evaluation, is_evaluation
from trainer_svc.ledger import Ledger
from trainer_svc.order import DataOrder
from trainer_svc.requeued import Requeued
from trainer_svc.window import Window

log = logging.getLogger(__name__)

POLL_S = 0.5


class Versions(Protocol):
    """What the intake must know of the publisher."""

    def history(self) -> Mapping[int, str]: ...

    def given(self, member: str) -> set[int]: ...

    def members(self) -> Mapping[str, int]:
        """Producers on the weight channel -> the newest version each has received, −1 = none."""
        ...

    def troubles(self) -> Mapping[str, str]:
        """Producers -> why they get no weights at present."""
        ...


@dataclass(frozen=True, slots=True)
class Taken:
    """A group of the batch, with the lag of each completion token [T]."""

    header: GroupHeader
    group: Group
    lags: NDArray[np.int32]


class Intake:
    """Owns window and ledger; turns published versions into requests, and deliveries into batches."""

    def __init__(
        self,
        config: Config,
        queue: TrainerQueue,
        versions: Versions,
        items: Sequence[Item],
        order: DataOrder,
        stop_ids: tuple[int, ...],
    ) -> None:
        self._config = config
        self._queue = queue
        self._versions = versions
        self._items = items
        self._order = order
        self.window = Window(order, config.run.n_behind)
        self.requeued = Requeued(queue, items)
        self.ledger = Ledger()
        self.retained: list[GroupHeader | DeadNotice] = []  # consumed, kept until the checkpoint that covers them
        self.incarnation = 0
        self.published = 0
        self.reissued = 0
        self.refused = 0
        self.census: Mapping[RequestId, OpenState] = {}
        self._reconciled_at = 0.0
        self.evaluation: Evaluation | None = None
        self.sampling = Sampling(
            num_generations=config.sampling.num_generations,
            max_new_tokens=config.sampling.max_new_tokens,
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            top_k=config.sampling.top_k,
            stop_token_ids=stop_ids,
        )

    @property
    def malformed(self) -> int:
        """Deliveries that could not be decoded."""
        return self._queue.malformed

    # --- issue
    def request(self, request_id: RequestId) -> Request:
        index = self.requeued.item(request_id)
        item = self._items[self._order.item(request_id) if index is None else index]
        entry = self.window[request_id]
        return Request(
            id=request_id,
            incarnation=self.incarnation,
            min_version=entry.min_version,
            seed=self._order.request_seed(request_id),
            prompt_ids=item.prompt_ids,
            sampling=self.sampling,
            item_id=item.id,
            payload=item.payload,
            attempt=entry.attempt,
            failures=entry.failures,
        )

    def issue_up_to(self, published: int) -> None:
        """Open and issue what version `published` allows."""
        self.published = published
        new = self.window.open_steps(published)
        self.ledger = self.ledger.add(issued=len(new))
        self._issue(new)

    def evaluate(self, step: int) -> None:
        """Issue the evaluation of version `step`, which must be published."""
        if self.evaluation is not None:
            self._queue_up(self.evaluation.begin(step, self.incarnation))

    def reissue_restored(self, published: int) -> None:
        """After a resume: the open requests of the checkpoint that were not delivered meanwhile."""
        self.published = published
        while self._take_deliveries(0.0):
            continue
        census = self._queue.census()
        self.window.note_attempts(census)
        self._queue.withdraw(self.window.strangers(census, (h.id for h in self.retained)))
        undelivered = [r for r in self.window.ids() if self.window[r].header is None]
        for request in undelivered:
            self.window.reopen(request, self.published, failed=False)
        self._issue(undelivered)

    def _issue(self, ids: Sequence[RequestId]) -> None:
        self._queue_up([self.request(r) for r in ids])

    def _queue_up(self, requests: Sequence[Request]) -> None:
        """On a full server they are missing in the next census: open requests come again then, evaluations do not."""
        if not requests:
            return
        try:
            self._queue.issue(requests)
        except OutOfMemory as error:
            log.warning("%d requests cannot be issued yet: %s", len(requests), error)

    # --- deliveries
    def _take_deliveries(self, block_s: float) -> int:
        """How many there were."""
        arrivals = self._queue.poll(block_s)
        for arrival in arrivals:
            if self.evaluation is not None and is_evaluation(arrival.id):
                self.evaluation.take(arrival)
            elif isinstance(arrival, DeadNotice):
                self._take_dead(arrival)
            elif not self.window.deliver(arrival):
                self._take_surplus(arrival)
            elif discarded := self._discarded(arrival):
                self.refused += 1
                self._reissue(arrival, discarded, failed=False)
            elif self._config.algo.skip_zero_variance and arrival.equal_rewards:
                self._filter(arrival)
        return len(arrivals)

    def _discarded(self, header: GroupHeader) -> str:
        """Why a group of an earlier life of the trainer cannot be used; '' if it can.

        Seen before the group counts as delivered, since its deadline would be that of a version which does not exist.
        """
        for version in header.versions:
            if (
                version.incarnation != self.incarnation
                and self._versions.history().get(version.number) != version.checksum
            ):
                return f"version {version.number} of incarnation {version.incarnation} is not on this history"
        return ""

    def _take_surplus(self, header: GroupHeader) -> None:
        """A delivery of something resolved and covered by a checkpoint can go; one in hand or retained stays."""
        in_hand = self.window[header.id].header if header.id in self.window else None
        if (in_hand is None or in_hand.entry != header.entry) and all(h.entry != header.entry for h in self.retained):
            self._queue.release([header])

    def _take_dead(self, notice: DeadNotice) -> None:
        if notice.id not in self.window:
            self._queue.release([notice])
            return
        self.retained.append(notice)
        self._replace_dead(notice.id, notice.reason)

    def _replace_dead(self, request: RequestId, reason: str) -> None:
        log.error("request %s is dead-lettered and replaced: %s", request, reason)
        self.ledger = self.ledger.add(dead_lettered=1, issued=1)
        self._replace(request)

    def _replace(self, request: RequestId) -> None:
        """Open and issue the successor of a resolved request in its slot."""
        successor = self.window.replace(request, self.published)
        self.requeued.resolved(request)
        self.requeued.draw(successor)
        self._issue([successor])

    def _filter(self, header: GroupHeader) -> None:
        if header.id.round >= self._config.algo.max_rounds:
            return
        self.ledger = self.ledger.add(filtered=1, issued=1)
        self.retained.append(header)
        self._replace(header.id)

    # --- the batch
    def wait_for_batch(
        self, step: int, stopping: Callable[[], bool], on_stall: Callable[[float], None]
    ) -> list[Taken] | None:
        """The groups of `step`, checked token by token; None when the run is to stop. `on_stall` hears of long waits."""
        began = time.monotonic()
        while not stopping():
            chosen = self._choose(step)
            taken = self._fetch(step, chosen) if chosen else None
            if taken is not None:
                self.window.resolve(t.header.id for t in taken)
                for t in taken:
                    self.requeued.resolved(t.header.id)
                self.retained += [t.header for t in taken]
                self.ledger = self.ledger.add(trained=len(taken))
                return taken
            self._take_deliveries(POLL_S)
            self.reconcile(self._config.trainer.reconcile_s)
            self._watch(step, time.monotonic() - began, on_stall)
        return None

    def _choose(self, step: int) -> list[GroupHeader] | None:
        if self._config.run.order == "strict":
            return self.window.choose_strict(step)
        if not self.window.enough(step):
            return None
        floor = floor_after(step, self._config.run.n_behind)
        while True:
            started = self._queue.raise_floor(floor)
            needed, chosen = self.window.choose_ready(step, floor, self.published, started)
            if needed == floor:
                return chosen
            floor = needed

    def _fetch(self, step: int, chosen: Sequence[GroupHeader]) -> list[Taken] | None:
        """All bodies, each within the bound; None if one was lost or refused, which is then issued again."""
        taken: list[Taken] = []
        for header, group in zip(chosen, self._queue.fetch(chosen), strict=True):
            if group is None:
                self._reissue(header, "its body is lost", failed=False)
                continue
            try:
                taken.append(Taken(header, group, self._check(step, group)))
            except StalenessError as error:
                self.refused += 1
                self._reissue(header, str(error), failed=True)
        return taken if len(taken) == len(chosen) else None

    def _check(self, step: int, group: Group) -> NDArray[np.int32]:
        if group.num_samples != self.sampling.num_generations:
            raise StalenessError(
                f"group {group.id} has {group.num_samples} samples, not {self.sampling.num_generations}"
            )
        given = self._versions.given(group.producer)
        for version in group.versions:
            if version.incarnation == self.incarnation and version.number not in given:
                raise StalenessError(
                    f"group {group.id}: producer {group.producer} was never given version {version.number}"
                )
        return check_group(step, self._config.run.n_behind, group, self._versions.history())

    def _reissue(self, header: GroupHeader, why: str, *, failed: bool) -> None:
        entry = self.window.reopen(header.id, self.published, failed=failed)
        self._queue.release([header])
        if entry.failures >= self._config.producer.max_attempts:
            self._replace_dead(header.id, f"refused {entry.failures} times, last: {why}")
            return
        log.warning("request %s is issued again (attempt %d): %s", header.id, entry.attempt, why)
        self.reissued += 1
        self._issue([header.id])

    # --- the queue is transport: compare it with the window
    def reconcile(self, every_s: float) -> None:
        """Issue again what the queue has lost, at most once in `every_s` seconds."""
        if time.monotonic() - self._reconciled_at < every_s:
            return
        self._reconciled_at = time.monotonic()
        self.census = self._queue.census()
        self.window.note_attempts(self.census)
        if self.evaluation is not None:
            self.evaluation.compare(self.census)
        missing = self.window.missing(self.census)
        if missing:
            log.warning(
                "the queue has lost %d open requests (first: %s); they are issued again", len(missing), missing[0]
            )
            for request in missing:
                self.window.reopen(request, self.published, failed=False)
            self.reissued += len(missing)
            self._issue(missing)

    def finish_evaluations(self, stopping: Callable[[], bool], timeout_s: float) -> None:
        """Wait for the evaluations under way, at most `timeout_s`."""
        if self.evaluation is None:
            return
        deadline = time.monotonic() + timeout_s
        while self.evaluation.open_steps() and time.monotonic() < deadline and not stopping():
            self._take_deliveries(POLL_S)
            self.reconcile(self._config.trainer.reconcile_s)
        self.evaluation.give_up()

    def _watch(self, step: int, waited_s: float, on_stall: Callable[[float], None]) -> None:
        if waited_s > self._config.run.give_up_s:
            raise Stalled(
                f"no step for {waited_s:.0f} s (run.give_up_s = {self._config.run.give_up_s:g}): {self.who_waits(step)}"
            )
        if waited_s > self._config.run.stall_s:
            on_stall(waited_s)

    def who_waits(self, step: int) -> str:
        """One line: which requests of the step are where, and what the producers have."""
        waiting = [
            r
            for r in self.window.ids()
            if self.window[r].header is None and (r.step == step or self._config.run.order == "ready")
        ]
        states = [self.census[r] for r in waiting if r in self.census]
        leased = sorted({s.owner for s in states if s.state == "leased"})
        queued = sum(s.state == "queued" for s in states)
        first = waiting[0] if waiting else "none"
        return (
            f"step {step} waits for {len(waiting)} requests (first {first}, needs version "
            f"{min_version(step, self._config.run.n_behind)}): {queued} wait for a producer, "
            f"{len(states) - queued} are in work"
            + (f" at {', '.join(leased)}" if leased else "; no producer holds any")
            + f"; {self._producers()}"
        )

    def _producers(self) -> str:
        members, troubles = self._versions.members(), self._versions.troubles()
        if not members and not troubles:
            return "no producer is connected: start one (nbehind producer), or see why they ended in their logs"

        def state(name: str) -> str:
            number = members.get(name, -1)
            has = f"{name} with version {number}" if number >= 0 else f"{name} without weights"
            return f"{has} (the last transfer to it failed: {troubles[name]})" if name in troubles else has

        return "connected: " + ", ".join(map(state, sorted({*members, *troubles})))
