"""Worker processes that score completions. Each is started when a job needs it, killed when it hangs, reaped by its pid.

run(job) ─▶ free slot ─▶ [start worker] ─▶ job ─▶ answer in time ─▶ slot is free again, with its worker
                                            ├─▶ no answer in timeout_s: kill, None
                                            └─▶ the worker died: kill, once more with a new one, then None
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack

from nbehind.process import describe_exit, service_env
from producer_svc.errors import RewardError
from producer_svc.rewards.frames import LENGTH, pack_frame

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0
TRIES = 2


class WorkerDied(Exception):
    """Internal: a worker ended before it answered."""


class Worker:
    """One process and its pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def start(cls, setup: Mapping[str, Any]) -> Worker:
        """A worker that is ready. RewardError if it cannot make the reward, WorkerDied if it ended without a word."""
        env = service_env(1)
        env["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT), env.get("PYTHONPATH", "")) if p)
        command = [sys.executable, "-m", "producer_svc.rewards.worker"]
        pipe = asyncio.subprocess.PIPE
        worker = cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=env))
        try:
            answer = await worker.ask(setup, START_TIMEOUT_S)
            if "error" in answer:
                raise RewardError(f"reward.name = {setup['reward']}: {answer['error']}")
        except TimeoutError:
            await worker.kill()
            raise RewardError(
                f"a reward worker was not ready within {START_TIMEOUT_S:g} s: is the machine overloaded?"
            ) from None
        except BaseException:
            await worker.kill()
            raise
        return worker

    async def ask(self, job: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to `job`. TimeoutError or WorkerDied: it must be killed then."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                stdin.write(pack_frame(job))
                await stdin.drain()
                (length,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
                answer: dict[str, Any] = msgpack.unpackb(await stdout.readexactly(length))
                return answer
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise WorkerDied from error

    async def kill(self) -> int:
        """End and reap it; returns its exit code."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        return await self._process.wait()


class WorkerPool:
    """Up to `workers` processes that run the reward of `setup` ({reward, options}). Lives in one event loop."""

    def __init__(self, setup: Mapping[str, Any], workers: int, timeout_s: float) -> None:
        self._setup = setup
        self._timeout_s = timeout_s
        self._slots: asyncio.Queue[Worker | None] = asyncio.Queue()
        for _ in range(workers):
            self._slots.put_nowait(None)
        self._workers = workers
        self._running: set[asyncio.Task[dict[str, Any] | None]] = set()
        self._closed = False

    async def run(self, job: Mapping[str, Any]) -> dict[str, Any] | None:
        """The worker's answer; None if there was none within `timeout_s` of its start, or two workers died of it.

        RewardError if no worker can be started. A cancelled caller leaves the worker to finish.
        """
        worker = await self._slots.get()
        task = asyncio.create_task(self._run_in_slot(worker, job))
        self._running.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Kill and reap every worker. Jobs that still run or wait raise RewardError or CancelledError."""
        self._closed = True
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for _ in range(self._workers):
            worker = await self._slots.get()
            if worker is not None:
                await worker.kill()
        for _ in range(self._workers):  # whoever waits for a slot hears that it is closed
            self._slots.put_nowait(None)

    async def _run_in_slot(self, worker: Worker | None, job: Mapping[str, Any]) -> dict[str, Any] | None:
        try:
            for trial in range(TRIES):
                if self._closed:
                    raise RewardError("the scorer is closed")
                try:
                    worker = worker or await self._start(last=trial == TRIES - 1)
                    return await worker.ask(job, self._timeout_s)
                except TimeoutError:
                    assert worker is not None
                    log.warning("a completion took longer than reward.timeout_s = %g s; worker killed", self._timeout_s)
                    await worker.kill()
                    worker = None
                    return None
                except WorkerDied:
                    await self._bury(worker)
                    worker = None
            return None
        except BaseException:
            await self._bury(worker)
            worker = None
            raise
        finally:
            self._slots.put_nowait(worker)

    async def _start(self, last: bool) -> Worker:
        try:
            return await Worker.start(self._setup)
        except WorkerDied as error:
            if not last:
                raise
            raise RewardError("a reward worker ended before it was ready: see the lines above") from error
        except OSError as error:
            raise RewardError(f"a reward worker cannot be started: {error}") from error

    @staticmethod
    async def _bury(worker: Worker | None) -> None:
        if worker is not None:
            log.warning("reward worker %d ended: %s", worker.pid, describe_exit(await worker.kill()))

    def _done(self, task: asyncio.Task[dict[str, Any] | None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.debug("a reward job failed: %s", task.exception())  # its caller, if it is still there, gets it too
