"""The shell around an engine that lives in a thread of its own: everything the event loop hands over, it takes between two steps.

    event loop                         engine thread
    generate ── Add ──▶ ┐
    cancelled ─ Abort ─▶├─ commands ─▶ take ─▶ swap, if weights wait ─▶ admit ─▶ step ─▶ finished ──▶ futures
    load ────── Swap ──▶ ┘                     │
                          in_flight = "keep": KV caches are computed again · "keep_cache": they stay as they are
                          "finish": only when nothing runs · "abort": what runs begins anew after the swap

ends: on close(), or when the engine fails: then every open call and every later one raises GeneratorError.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from producer_svc.errors import GeneratorError, StartTimeout
from producer_svc.generation import Refused
from producer_svc.generator import Completion
from rollout_queue.messages import Request, Version
from weight_sync.staged import StagedWeights

log = logging.getLogger(__name__)

JOIN_S = 30.0


class Backend(Protocol):
    """An engine, used by one thread only; `tokens` alone is read by others.

    Refused, from add() and check(), concerns that call alone; any other error ends the engine.
    """

    tokens: int  # generated so far

    def open(self) -> None:
        """Load the engine and warm it up."""

    def add(self, key: int, request: Request) -> None:
        """Begin a request; its outcome comes from step()."""

    def abort(self, key: int) -> None:
        """Forget a request, if it is known."""

    def busy(self) -> bool:
        """Is anything left to generate?"""

    def step(self) -> Iterable[tuple[int, list[Completion]]]:
        """One token for what runs; the requests that finished by it."""

    def check(self, staged: StagedWeights) -> None:
        """Refuse weights that do not fit, before anything has changed."""

    def swap(self, staged: StagedWeights, keep_cache: bool) -> None:
        """Take the weights; KV caches of running requests are computed again, or stay as they are (`keep_cache`)."""

    def close(self) -> None:
        """Stop every process and free the memory."""


@dataclass(frozen=True, slots=True)
class Call:
    """A command and who waits for its outcome."""

    kind: str  # "add" | "abort" | "swap" | "close"
    key: int
    future: asyncio.Future[Any] | None = None
    value: Any = None  # Request or StagedWeights

    def resolve(self, result: Any = None, error: BaseException | None = None) -> None:
        """From the engine thread; a caller that has gone is no error."""
        if self.future is not None:
            with contextlib.suppress(RuntimeError):  # its event loop is closed
                self.future.get_loop().call_soon_threadsafe(_settle, self.future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


class ThreadedGenerator:
    """Implements Generator over a Backend. `make` runs in the engine thread.

    `in_flight` as in ProducerConfig; a change of it counts from the next swap on.
    """

    def __init__(self, make: Callable[[], Backend], in_flight: str, start_timeout_s: float) -> None:
        self._make = make
        self.in_flight = in_flight
        self._start_timeout_s = start_timeout_s
        self._commands: SimpleQueue[Call] = SimpleQueue()
        self._keys = itertools.count()
        self._lock = threading.Lock()  # guards _end: nothing is queued after it is set
        self._end: GeneratorError | None = GeneratorError("the engine is not started: call start() first")
        self._backend: Backend | None = None
        self._thread: threading.Thread | None = None
        self._version: Version | None = None

    # --- the event loop's side
    async def start(self) -> None:
        """Start the engine thread; StartTimeout or GeneratorError when it does not come up."""
        if self._thread is not None:
            raise GeneratorError("the engine was started before: make a new generator")
        ready = Call("start", -1, asyncio.get_running_loop().create_future())
        assert ready.future is not None
        self._end = None
        self._thread = threading.Thread(target=self._run, args=(ready,), name="engine", daemon=True)
        self._thread.start()
        try:
            await asyncio.wait_for(ready.future, self._start_timeout_s)
        except TimeoutError:
            raise StartTimeout(
                f"the engine did not start within producer.start_timeout_s = {self._start_timeout_s:g} s"
            ) from None

    async def generate(self, request: Request) -> list[Completion]:
        """The request's completions; GeneratorError before the first load(), for a bad request, or from a dead engine."""
        if self._version is None and self._end is None:
            raise GeneratorError("no weights yet: generate() before load()")
        key = next(self._keys)
        try:
            completions: list[Completion] = await self._call("add", key, request)
        except asyncio.CancelledError:
            self._put(Call("abort", key))
            raise
        return completions

    async def load(self, staged: StagedWeights) -> None:
        """Returns when the weights are in and `staged.path` is not needed any more."""
        await self._call("swap", next(self._keys), staged)

    def progress(self) -> int:
        return 0 if self._backend is None else self._backend.tokens

    async def close(self) -> None:
        """Stop the engine; open calls raise. Bounded: an engine that does not stop is left to the end of the process."""
        thread = self._thread
        if thread is None:
            return
        self._put(Call("close", -1))
        await asyncio.to_thread(thread.join, JOIN_S)
        if thread.is_alive():
            log.error("the engine did not stop within %g s; it ends with the process", JOIN_S)

    async def _call(self, kind: str, key: int, value: Any) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        refused = self._put(Call(kind, key, future, value))
        if refused is not None:
            raise GeneratorError(str(refused))
        return await future

    def _put(self, call: Call) -> GeneratorError | None:
        with self._lock:
            if self._end is None:
                self._commands.put(call)
            return self._end

    # --- the engine thread's side
    def _run(self, ready: Call) -> None:
        """The thread: whatever ends it reaches everyone who waits."""
        state = _Open()
        end = GeneratorError("the engine is closed")
        try:
            self._backend = self._make()
            self._backend.open()
            ready.resolve()
            self._loop(self._backend, state)
        except GeneratorError as error:
            end = error
        except BaseException as error:  # the thread's last stop: reported to every caller
            log.exception("the engine failed")
            end = GeneratorError(f"the engine failed: {type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._end = end
            for call in [ready, *state.running.values(), *state.waiting, *_drain(self._commands)]:
                call.resolve(error=end)
            self._close_backend()

    def _close_backend(self) -> None:
        if self._backend is None:
            return
        try:
            self._backend.close()
        except Exception:
            log.exception("the engine did not close cleanly")

    def _loop(self, backend: Backend, state: _Open) -> None:
        while True:
            block = not backend.busy() and not state.waiting
            calls = _drain(self._commands, block)
            for call in calls:
                self._take(backend, state, call)
            if any(call.kind == "close" for call in calls):
                return
            while state.waiting and self._may_begin(backend, state.waiting[0]):
                self._begin(backend, state, state.waiting.pop(0))
            if backend.busy():
                for key, completions in backend.step():
                    state.running.pop(key).resolve(completions)

    def _may_begin(self, backend: Backend, call: Call) -> bool:
        return call.kind != "swap" or self.in_flight != "finish" or not backend.busy()

    @staticmethod
    def _take(backend: Backend, state: _Open, call: Call) -> None:
        """In order of arrival: what comes after weights that wait, waits behind them."""
        if call.kind in ("add", "swap"):
            state.waiting.append(call)
        elif state.running.pop(call.key, None) is not None:
            backend.abort(call.key)
        else:
            state.waiting[:] = [c for c in state.waiting if c.key != call.key]

    def _begin(self, backend: Backend, state: _Open, call: Call) -> None:
        try:
            if call.kind == "swap":
                backend.check(call.value)
                self._swap(backend, state, call.value)
                call.resolve()
            else:
                backend.add(call.key, call.value)
                state.running[call.key] = call
        except Refused as error:
            call.resolve(error=GeneratorError(str(error)))
        except BaseException:
            state.waiting.insert(0, call)  # so that its caller hears of the end
            raise

    def _swap(self, backend: Backend, state: _Open, staged: StagedWeights) -> None:
        began = time.monotonic()
        again = list(state.running.values()) if self.in_flight == "abort" else []
        for call in again:
            backend.abort(call.key)
        backend.swap(staged, self.in_flight == "keep_cache")
        self._version = staged.version
        for call in again:
            backend.add(call.key, call.value)
        seconds = time.monotonic() - began
        log.debug("version %d swapped in, %.3f s, %d begin anew", staged.version.number, seconds, len(again))


class _Open:
    """Calls without an outcome yet: those in the engine, and those not begun."""

    def __init__(self) -> None:
        self.running: dict[int, Call] = {}
        self.waiting: list[Call] = []


def _drain(commands: SimpleQueue[Call], block: bool = False) -> list[Call]:
    out = [commands.get()] if block else []
    while not commands.empty():
        out.append(commands.get())
    return out
