"""Conservation: issued = trained + filtered + dead_lettered + open, at every moment of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from trainer_svc.errors import TrainerError


@dataclass(frozen=True, slots=True)
class Ledger:
    """How the requests of the surviving history were resolved. Retries and reissues are not counted here."""

    issued: int = 0
    trained: int = 0
    filtered: int = 0
    dead_lettered: int = 0

    def add(self, *, issued: int = 0, trained: int = 0, filtered: int = 0, dead_lettered: int = 0) -> Ledger:
        return Ledger(
            self.issued + issued, self.trained + trained, self.filtered + filtered, self.dead_lettered + dead_lettered
        )

    @property
    def open(self) -> int:
        return self.issued - self.trained - self.filtered - self.dead_lettered

    def check(self, open_requests: int) -> None:
        """Compare with an independent count of the open requests; TrainerError when they differ."""
        if self.open != open_requests:
            raise TrainerError(f"conservation broken: {self.line()}, but {open_requests} requests are open")

    def line(self) -> str:
        return (
            f"issued {self.issued} = trained {self.trained} + filtered {self.filtered} "
            f"+ dead_lettered {self.dead_lettered} + open {self.open}"
        )

    def as_dict(self) -> dict[str, int]:
        return {**dataclasses.asdict(self), "open": self.open}

    @classmethod
    def from_dict(cls, raw: Mapping[str, int]) -> Ledger:
        return cls(*(int(raw[f.name]) for f in dataclasses.fields(cls)))
