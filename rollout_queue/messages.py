"""What travels through Redis: requests, groups and what describes them.

Array shapes use N = samples of a group, P = prompt tokens, T = completion tokens of all samples
together (ragged, without padding), K = version spans of all samples together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SCHEMA_VERSION = 1


class RequestId(NamedTuple):
    """Place of a request in the data order. `round` > 0 is the n-th replacement of a slot."""

    step: int
    slot: int
    round: int = 0

    def __str__(self) -> str:
        return f"{self.step}.{self.slot}.{self.round}"

    @classmethod
    def parse(cls, text: str) -> RequestId:
        """Inverse of str(); ValueError on anything else."""
        step, slot, round_ = (int(part) for part in text.split("."))
        if min(step, slot, round_) < 0:
            raise ValueError(f"negative part in request id {text!r}")
        return cls(step, slot, round_)


class Version(NamedTuple):
    """Identity of a set of weights: never the number alone. `checksum` is hex, '' only before the first publish."""

    incarnation: int
    number: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the completions of a request are drawn. top_k = 0 and top_p = 1.0 mean off."""

    num_generations: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)  # arrays have no truth value when compared: identity counts
class Request:
    """One prompt to be rolled out `sampling.num_generations` times.

    `attempt` is the fencing token: it grows with every reissue and takeover, and a commit under an older one
    is refused. `failures` counts tries that failed on their own account; deaths of producers do not count.
    """

    id: RequestId
    incarnation: int
    min_version: int
    seed: int
    prompt_ids: NDArray[np.int32]  # [P]
    sampling: Sampling
    item_id: str  # the data set's id of the prompt
    payload: Mapping[str, Any] = field(default_factory=dict)  # what a reward needs: gt_answer, messages, ...
    attempt: int = 0
    failures: int = 0

    def with_attempt(self, attempt: int, failures: int | None = None) -> Request:
        return dataclasses.replace(self, attempt=attempt, failures=self.failures if failures is None else failures)


class Finish(IntEnum):
    """Why a completion ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The answer to a request: its N samples, flat and ragged.

    `spans` rows are (sample, index into `versions`, start, end): completion tokens [start, end) of that sample
    were drawn from that version. The rows of one sample cover all of its tokens, in order.
    """

    id: RequestId
    incarnation: int
    attempt: int
    producer: str
    versions: tuple[Version, ...]
    prompt_ids: NDArray[np.int32]  # [P]
    lengths: NDArray[np.int32]  # [N] completion tokens per sample
    token_ids: NDArray[np.int32]  # [T]
    logprobs: NDArray[np.float32]  # [T]
    spans: NDArray[np.int32]  # [K, 4]
    rewards: NDArray[np.float32]  # [N]
    finish: NDArray[np.uint8]  # [N] of Finish
    reward_parts: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)  # name -> [N]
    started_at: float = 0.0  # seconds since the epoch, producer's clock: generation began
    generated_at: float = 0.0  # ... ended
    scored_at: float = 0.0  # ... rewards were there

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    def token_versions(self) -> NDArray[np.int32]:
        """[T] the version number of each completion token."""
        out = np.full(len(self.token_ids), -1, dtype=np.int32)
        starts = np.concatenate(([0], np.cumsum(self.lengths)))
        for sample, version, start, end in self.spans.tolist():
            out[starts[sample] + start : starts[sample] + end] = self.versions[version].number
        return out


@dataclass(frozen=True, slots=True)
class GroupHeader:
    """The small part of a delivered group: enough to form a batch without its body."""

    id: RequestId
    incarnation: int
    attempt: int
    producer: str
    versions: tuple[Version, ...]
    num_tokens: int  # prompt (once per sample) and completion tokens
    equal_rewards: bool  # every sample has the same reward: no learning signal
    body_bytes: int
    entry: str  # stream entry id
    raw: bytes  # the encoded header, decoded again with the body
    body_key: str

    @property
    def oldest_version(self) -> int:
        return min(v.number for v in self.versions)


@dataclass(frozen=True, slots=True)
class DeadNotice:
    """A request that failed `max_attempts` times and will not be answered."""

    id: RequestId
    incarnation: int
    reason: str
    entry: str


class CommitResult(StrEnum):
    """What the queue says to a pushed group."""

    OK = "OK"  # it counts
    DUP = "DUP"  # it counted already: the same commit was repeated
    GONE = "GONE"  # the request is resolved or withdrawn
    FENCED = "FENCED"  # another attempt or incarnation owns the request


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """A producer's hold on a request. `entry` is its place in the request stream."""

    request: Request
    owner: str
    entry: str


@dataclass(frozen=True, slots=True)
class OpenState:
    """What the queue knows of one open request (see TrainerQueue.census)."""

    attempt: int
    state: str  # "queued" | "leased" | "delivered"
    start_version: int  # the version its generation began with, -1 while queued
    owner: str  # producer id, '' while queued


@dataclass(frozen=True, slots=True)
class RunState:
    """What every service of a run must know, read in one round trip.

    `floor`: a generation may only begin with weights of at least this version. `published`: the newest announced,
    −1 before the first.
    """

    incarnation: int
    published: int
    floor: int
    ended: str  # '' while the run goes on, else the reason
    trainer_alive: bool  # its heartbeat is fresh


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An entry of the dead-letter stream."""

    entry: str
    kind: str  # "request" | "rollout"
    reason: str
    request_id: str
    payload: bytes
