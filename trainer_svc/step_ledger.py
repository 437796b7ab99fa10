"""An account of every optimizer step for an independent judge: which requests, from which versions, and what came out.

    {"kind": "life", incarnation, parent, step, pid, t}     a trainer began at `step`, from a checkpoint of `parent` (0: none)
    {"kind": "step", incarnation, step, t, requests, oldest, newest, weights}     before the step counts as done

Only appended to, by every life of the trainer, and never rotated: a judge needs all of it. So it is off unless
`metrics.step_ledger` asks for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_svc.intake import Taken

if TYPE_CHECKING:
    import torch

LEDGER = "ledger.jsonl"


class StepLedger:
    """Writes the lines of one life."""

    def __init__(self, folder: Path, incarnation: int, parent: int, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / LEDGER, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._incarnation = incarnation
        self._write({"kind": "life", "parent": parent, "step": step, "pid": os.getpid()})

    def trained(self, step: int, taken: Sequence[Taken], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The step is trained; `weights` are those after it."""
        versions = [[v.number for v in t.group.versions] for t in taken]
        row = {
            "kind": "step",
            "step": step,
            "requests": [str(t.group.id) for t in taken],
            "oldest": list(map(min, versions)),
            "newest": list(map(max, versions)),
            "weights": digest(weights),
        }
        self._write(row)

    def close(self) -> None:
        os.close(self._file)

    def _write(self, row: dict[str, Any]) -> None:
        row = {**row, "incarnation": self._incarnation, "t": time.time()}
        os.write(self._file, b"\n" + json.dumps(row).encode() + b"\n")  # the first line end closes a torn line


def digest(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Of names and bytes, 32 hex digits."""
    import torch

    total = hashlib.blake2b(digest_size=16)
    for name, tensor in weights:
        total.update(name.encode())
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
