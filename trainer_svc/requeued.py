"""Prompts of dead requests that somebody re-queued (`nbehind dead --requeue`).

The trainer has replaced a dead request at once, so the request itself cannot come back: that would train a slot twice.
Its prompt goes to the next replacement instead, whichever slot that fills; the main order is not touched.

    list in Redis ─▶ draw (a replacement is opened) ─▶ checkpoint that knows of it is durable ─▶ forgotten in Redis
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from rollout_queue.messages import RequestId
from rollout_queue.queue import TrainerQueue
from trainer_svc.data import Item

log = logging.getLogger(__name__)


class Requeued:
    """Which replacement rolls out which re-queued prompt. A mark is `<dead letter's entry> <item id>`."""

    def __init__(self, queue: TrainerQueue, items: Sequence[Item]) -> None:
        self._queue = queue
        self._items = {item.id: index for index, item in enumerate(items)}
        self._open: dict[RequestId, str] = {}
        self._drawn: set[str] = set()  # not to be drawn again

    def item(self, request: RequestId) -> int | None:
        """Index of the re-queued item that the request rolls out; None: the order decides."""
        mark = self._open.get(request)
        return None if mark is None else self._items[_item_id(mark)]

    def draw(self, replacement: RequestId) -> None:
        """Give the replacement the oldest re-queued prompt, if there is one."""
        for mark in self._queue.requeued():
            if mark in self._drawn:
                continue
            self._drawn.add(mark)
            if _item_id(mark) in self._items:
                self._open[replacement] = mark
                log.info("request %s rolls out the re-queued prompt %s", replacement, _item_id(mark))
                return
            log.warning("the re-queued prompt %s is not in the data of this run; passed over", _item_id(mark))

    def resolved(self, request: RequestId) -> None:
        self._open.pop(request, None)

    def drawn(self) -> list[str]:
        """Marks that a checkpoint written now covers."""
        return sorted(self._drawn)

    def forget(self, marks: Sequence[str]) -> None:
        """The checkpoint that covers them is durable."""
        if marks:
            self._queue.forget_requeued(marks)
            self._drawn -= set(marks) - set(self._open.values())

    def as_dict(self) -> dict[str, str]:
        return {str(request): mark for request, mark in sorted(self._open.items())}

    def restore(self, state: Mapping[str, str]) -> None:
        """The state of a checkpoint; a prompt that the data no longer has is left to the order."""
        self._open = {RequestId.parse(r): mark for r, mark in state.items() if _item_id(mark) in self._items}
        self._drawn = set(self._open.values())


def _item_id(mark: str) -> str:
    return mark.partition(" ")[2]
