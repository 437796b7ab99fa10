"""A reward by its name: one that ships, or `module:function` (`FILE.py:function`)."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from producer_svc.errors import RewardError
from producer_svc.reward import Reward, RewardResult, ScoredText
from producer_svc.rewards.answers import Check
from producer_svc.rewards.pool import WorkerPool
from producer_svc.rewards.shipped import IN_LOOP, IN_WORKERS, check_options, make_check, near_name
from rollout_queue.messages import Request

if TYPE_CHECKING:  # workers import this package too, and need no pydantic
    from nbehind.config import RewardConfig

NEEDED = ("gt_answer", "reasoning_gym")  # of the payload, by workers


@dataclass(frozen=True, slots=True)
class LoopReward:
    """A shipped reward that is quick for any text."""

    check: Check

    def __call__(self, request: Request, completion: ScoredText) -> RewardResult:
        return RewardResult(*self.check(completion.text, request.payload))


class PooledReward:
    """A shipped reward that runs in worker processes. `close()` ends them."""

    def __init__(self, config: RewardConfig) -> None:
        self._pool = WorkerPool({"reward": config.name, "options": config.options}, config.workers, config.timeout_s)

    async def __call__(self, request: Request, completion: ScoredText) -> RewardResult:
        payload = {key: request.payload[key] for key in NEEDED if key in request.payload}
        answer = await self._pool.run({"text": completion.text, "payload": payload})
        if answer is None:
            return RewardResult(0.0, {"timeout": 1.0})
        if "error" in answer:
            raise RewardError(answer["error"])
        return RewardResult(answer["total"], answer["parts"])

    async def close(self) -> None:
        await self._pool.close()


def load_reward(config: RewardConfig) -> Reward:
    """The reward of the config. RewardError, with the remedy, if there is none or its options do not fit."""
    if config.name in IN_LOOP:
        return LoopReward(make_check(config.name, config.options))
    if config.name in IN_WORKERS:
        check_options(config.name, IN_WORKERS[config.name], config.options)
        if config.name == "regex":
            make_check(config.name, config.options)  # a bad pattern is heard of now
        return PooledReward(config)
    return load_function(config.name, config.options)


def load_function(name: str, options: Mapping[str, Any]) -> Reward:
    """The user's own function, with the options as keyword arguments."""
    place, colon, attribute = name.rpartition(":")
    if not (colon and place and attribute):
        shipped = [*IN_LOOP, *IN_WORKERS]
        raise RewardError(
            f'reward.name = "{name}": no such reward; {near_name(name, shipped)}, or give module:function'
        )
    module = _import(name, place)
    function = getattr(module, attribute, None)
    if function is None:
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise RewardError(f'reward.name = "{name}": {place} has no {attribute}; {near_name(attribute, own)}')
    if not callable(function) or inspect.isclass(function):
        raise RewardError(f'reward.name = "{name}": {attribute} is a {type(function).__name__}, not a function')
    try:
        inspect.signature(function).bind(None, None, **options)
    except TypeError as error:
        raise RewardError(
            f'reward.name = "{name}": it must take (request, completion) and reward.options = {dict(options)}: {error}'
        ) from error
    except ValueError:  # a builtin that does not tell its signature
        pass
    return partial(function, **options) if options else function


def _import(name: str, place: str) -> ModuleType:
    folder = str(Path(place).expanduser().resolve().parent if place.endswith(".py") else Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that no file in it hides an installed package
    try:
        return (
            _import_file(Path(place).expanduser().resolve())
            if place.endswith(".py")
            else importlib.import_module(place)
        )
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
        raise RewardError(
            f'reward.name = "{name}": {place} cannot be imported: {reason}; '
            f"give FILE.py:function, or put the module into {folder}"
        ) from error


def _import_file(path: Path) -> ModuleType:
    name = f"nbehind_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
