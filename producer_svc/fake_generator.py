"""The shipped fake generator: draws from the weights it was given, without a model (see trainer_svc/fake_engine.py).

The texts depend on request, seed and weights alone, so a strict on-policy run is reproducible bit for bit.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from numpy.typing import NDArray

from producer_svc.errors import GeneratorError
from producer_svc.generator import Completion
from rollout_queue.messages import Finish, Request, Version
from trainer_svc.fake_engine import SIZE, SKILL, WEIGHT_NAME, sigmoid, token_logprobs
from weight_sync.staged import StagedWeights

END = 256
MAX_SLICE_S = 0.25  # longest sleep between two looks at the weights


def draw_tokens(request: Request, sample: int, skill: float) -> NDArray[np.int32]:
    """[T] the right answer with probability σ(skill), else a wrong one, and the end token."""
    rng = np.random.default_rng([request.seed, sample])
    answer = str(request.payload.get("gt_answer", "yes"))
    text = answer if rng.random() < sigmoid(skill) else "no " + "".join(rng.choice(list("abcdef"), 6))
    ids = [*text.encode(), END][: request.sampling.max_new_tokens]
    return np.asarray(ids, dtype=np.int32)


def duration_s(request: Request, base_s: float, sigma: float) -> float:
    """Constant, or lognormal with median base_s, capped at 4 · base_s; drawn from the request's seed."""
    if not sigma:
        return base_s
    draw = np.random.default_rng([request.seed, 2**31]).normal()
    return base_s * min(4.0, math.exp(sigma * draw))


class FakeGenerator:
    """Implements Generator; a generation lasts `base_s`, in slices between which the weights may change.

    `in_flight` as in ProducerConfig; without a KV cache, "keep" and "keep_cache" are the same.
    """

    def __init__(self, base_s: float = 0.0, sigma: float = 0.0, in_flight: str = "keep") -> None:
        self._base_s = base_s
        self._sigma = sigma
        self.in_flight = in_flight
        self._weights: NDArray[np.float32] | None = None
        self._version: Version | None = None
        self._progress = 0
        self._swaps = 0
        self._running = 0
        self._finishing = 0  # loads that wait until nothing runs
        self._idle = asyncio.Event()
        self._may_begin = asyncio.Event()

    async def start(self) -> None:
        """Nothing to load."""

    async def generate(self, request: Request) -> list[Completion]:
        if self._weights is None or self._version is None:
            raise GeneratorError("no weights yet: generate() before load()")
        while self._finishing:
            await self._may_begin.wait()
        self._running += 1
        self._idle.clear()
        try:
            while (completions := await self._try(request)) is None:
                pass
            return completions
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _try(self, request: Request) -> list[Completion] | None:
        """The completions; None when new weights came and in_flight = "abort"."""
        assert self._weights is not None and self._version is not None
        began = self._swaps
        skill = float(self._weights[SKILL])
        drafts = [draw_tokens(request, i, skill) for i in range(request.sampling.num_generations)]
        total_s = duration_s(request, self._base_s, self._sigma)
        slices = max(1, math.ceil(total_s / MAX_SLICE_S))
        rows: list[list[tuple[Version, int, int]]] = [[] for _ in drafts]
        logprobs = [np.empty(len(d), dtype=np.float32) for d in drafts]
        for k in range(slices):
            if total_s:
                await asyncio.sleep(total_s / slices)
            if self.in_flight == "abort" and self._swaps != began:
                return None
            for draft, spans, values in zip(drafts, rows, logprobs, strict=True):
                start, end = len(draft) * k // slices, len(draft) * (k + 1) // slices
                values[start:end] = token_logprobs(self._weights, draft[start:end])
                self._extend(spans, self._version, start, end)
                self._progress += end - start
        return [
            Completion(d, lp, tuple(s), Finish.STOP if d[-1] == END else Finish.LENGTH)
            for d, lp, s in zip(drafts, logprobs, rows, strict=True)
        ]

    @staticmethod
    def _extend(spans: list[tuple[Version, int, int]], version: Version, start: int, end: int) -> None:
        if start == end:
            return
        if spans and spans[-1][0] == version:
            start = spans.pop()[1]
        spans.append((version, start, end))

    async def load(self, staged: StagedWeights) -> None:
        spec = next((s for s in staged.manifest.tensors if s.name == WEIGHT_NAME), None)
        if spec is None or spec.shape != (SIZE,) or spec.dtype != "float32":
            raise GeneratorError(
                f"the fake generator takes {WEIGHT_NAME} float32 [{SIZE}], got {staged.manifest.tensors[:3]}"
            )
        raw = np.fromfile(staged.path, dtype=np.uint8)[spec.offset : spec.offset + spec.nbytes]
        async with self._may_swap():
            self._weights = raw.view("<f4").astype(np.float32)
            self._version = staged.version
            self._swaps += 1

    @asynccontextmanager
    async def _may_swap(self) -> AsyncIterator[None]:
        """With in_flight = "finish": nothing runs, and nothing begins meanwhile."""
        self._finishing += 1
        self._may_begin.clear()
        try:
            while self.in_flight == "finish" and self._running:
                await self._idle.wait()
            yield
        finally:
            self._finishing -= 1
            if not self._finishing:
                self._may_begin.set()

    def progress(self) -> int:
        return self._progress

    async def close(self) -> None:
        """Nothing to stop."""
