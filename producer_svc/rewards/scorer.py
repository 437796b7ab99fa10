"""Scores the completions of a request: every call bounded in time, every result checked."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from producer_svc.errors import RewardError
from producer_svc.reward import RewardResult, ScoredText
from producer_svc.rewards.registry import LoopReward, PooledReward, load_reward
from rollout_queue.messages import Request

if TYPE_CHECKING:  # workers import this package too, and need neither pydantic nor torch
    from nbehind.config import RewardConfig
    from producer_svc.generator import Completion

log = logging.getLogger(__name__)

THREADS = 8  # calls of a sync reward at a time
MAX_HANGING = 32
TIMEOUT = RewardResult(0.0, {"timeout": 1.0})


class Scorer:
    """The reward of a config, ready to be called. Lives in one event loop."""

    def __init__(self, config: RewardConfig, decode: Callable[[Sequence[int]], str]) -> None:
        """RewardError if the reward cannot be loaded. `decode`: token ids to text without special tokens."""
        self._config = config
        self._decode = decode
        self._reward: Callable[..., Any] = load_reward(config)
        self._free = asyncio.Semaphore(THREADS)
        self._hanging = 0  # threads of calls that were given up and still run

    async def score(
        self, request: Request, completions: list[Completion]
    ) -> tuple[NDArray[np.float32], dict[str, NDArray[np.float32]]]:
        """(rewards [N], parts {name: [N]}); a part that a sample lacks is 0.

        A completion that takes longer than `timeout_s` gets 0 and the part timeout = 1. RewardError if the reward failed.
        """
        tasks = [asyncio.create_task(self._score_one(request, i, c)) for i, c in enumerate(completions)]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        names = sorted({name for result in results for name in result.parts})
        rewards = np.array([result.total for result in results], dtype=np.float32)
        return rewards, {n: np.array([r.parts.get(n, 0.0) for r in results], dtype=np.float32) for n in names}

    async def close(self) -> None:
        """End the worker processes; call close() of a user's reward object if it has one."""
        close = getattr(getattr(self._reward, "func", self._reward), "close", None)
        if callable(close):
            outcome = close()
            if inspect.isawaitable(outcome):
                await outcome

    async def _score_one(self, request: Request, index: int, completion: Completion) -> RewardResult:
        text = self._decode(completion.token_ids.tolist())
        scored = ScoredText(text, completion.token_ids, completion.finish)
        try:
            return checked(await self._call(request, scored))
        except RewardError as error:
            raise RewardError(f"reward {self._config.name} on request {request.id}, sample {index}: {error}") from error
        except Exception as error:
            reason = (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:300]
            raise RewardError(
                f"reward {self._config.name} failed on request {request.id}, sample {index}: {reason}"
            ) from error

    async def _call(self, request: Request, scored: ScoredText) -> Any:
        if isinstance(self._reward, LoopReward):
            return self._reward(request, scored)
        if isinstance(self._reward, PooledReward):  # bounds the time itself, without that of waiting for a worker
            return await self._reward(request, scored)
        if is_async(self._reward):
            return await self._in_time(self._reward(request, scored))
        result = await self._in_thread(request, scored)
        return await self._in_time(result) if inspect.isawaitable(result) else result

    async def _in_time(self, awaitable: Any) -> Any:
        task = asyncio.ensure_future(awaitable)
        try:
            done, _ = await asyncio.wait([task], timeout=self._config.timeout_s)
        finally:
            task.cancel()  # no effect on a finished one; not waited for, since it may not listen
        if not done:
            self._warn()
            return TIMEOUT
        return task.result()

    async def _in_thread(self, request: Request, scored: ScoredText) -> Any:
        if self._hanging >= MAX_HANGING:
            raise RewardError(
                f"{self._hanging} of its calls still run past reward.timeout_s: bound it, or make it async"
            )
        async with self._free:
            outcome = run_in_thread(self._reward, request, scored)
            done, _ = await asyncio.wait([outcome], timeout=self._config.timeout_s)
        if not done:
            self._hanging += 1
            outcome.add_done_callback(self._returned)
            self._warn()
            return TIMEOUT
        ok, value = outcome.result()
        if not ok:
            raise value
        return value

    def _returned(self, _: object) -> None:
        self._hanging -= 1

    def _warn(self) -> None:
        log.warning("a completion took longer than reward.timeout_s = %g s: its reward is 0", self._config.timeout_s)


def run_in_thread(function: Callable[..., Any], *args: Any) -> asyncio.Future[tuple[bool, Any]]:
    """(True, result) or (False, exception), from a daemon thread: one that hangs does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[bool, Any]] = loop.create_future()

    def deliver(outcome: tuple[bool, Any]) -> None:
        if not future.done():
            future.set_result(outcome)

    def run() -> None:
        try:
            outcome = (True, function(*args))
        except BaseException as error:  # noqa: BLE001  # goes to the caller
            outcome = (False, error if isinstance(error, Exception) else RuntimeError(repr(error)))
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(deliver, outcome)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return future


def is_async(reward: Callable[..., Any]) -> bool:
    """A coroutine function, a partial of one, or an object whose __call__ is one."""
    inner = getattr(reward, "func", reward)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def checked(result: object) -> RewardResult:
    """The result with floats that float32 can hold. RewardError if it is none."""
    if not isinstance(result, RewardResult):
        raise RewardError(f"it returned a {type(result).__name__}: return a RewardResult(total, parts)")
    if not isinstance(result.parts, Mapping) or not all(isinstance(name, str) for name in result.parts):
        raise RewardError("its parts are not a map of names to numbers")
    numbers = {name: _number(value, f"part {name}") for name, value in result.parts.items()}
    return RewardResult(_number(result.total, "total"), numbers)


def _number(value: Any, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise RewardError(f"its {what} is {str(value)[:40]!r}, not a number") from None
    if not (math.isfinite(number) and abs(number) <= float(np.finfo(np.float32).max)):
        raise RewardError(f"its {what} is {number}, which float32 cannot hold")
    return number
