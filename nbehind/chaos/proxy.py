"""A TCP proxy between a service and Redis that can be silent or cut, so that a network fault has a place to happen.

service ─▶ 127.0.0.1:port ─▶ Redis        open: bytes pass    silent: nothing passes, connections stay    cut: all end, new ones too
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Coroutine
from typing import Any, Literal

log = logging.getLogger(__name__)

Mode = Literal["open", "silent", "cut"]
READ_BYTES = 256 * 1024
CALL_TIMEOUT_S = 10.0
TICK_S = 0.25
PAUSE_S = 2.0  # a tick later than this means that not even the judge could run


class ProxyLoop:
    """One thread with an event loop for all proxies. It also notes when this process itself did not run."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.pauses: list[
            tuple[float, float]
        ] = []  # seconds since the epoch: the machine stood still, or was overloaded
        self._thread = threading.Thread(target=self.loop.run_forever, name="chaos proxies", daemon=True)
        self._thread.start()
        self._ticks = asyncio.run_coroutine_threadsafe(self._tick(time.time()), self.loop)

    async def _tick(self, before: float) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.time()
            if now - before > PAUSE_S:
                self.pauses.append((before, now))
            before = now

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run it in the loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(CALL_TIMEOUT_S)

    def close(self) -> None:
        self.call(_cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CALL_TIMEOUT_S)
        self.loop.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Proxy:
    """Listens on `port` of loopback and passes on to `upstream`, also on loopback."""

    def __init__(self, loop: ProxyLoop, upstream: int) -> None:
        self._loop = loop
        self._upstream = upstream
        self._writers: set[asyncio.StreamWriter] = set()
        self._passing = asyncio.Event()
        self._passing.set()
        self._mode: Mode = "open"
        self._server: asyncio.Server | None = None
        self.port = 0
        loop.call(self._start())

    def set(self, mode: Mode) -> None:
        self._loop.call(self._set(mode))

    def close(self) -> None:
        self._loop.call(self._close())

    # --- in the loop
    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def _set(self, mode: Mode) -> None:
        self._mode = mode
        (self._passing.clear if mode == "silent" else self._passing.set)()
        if mode == "cut":
            self._drop()

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._drop()

    def _drop(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._mode == "cut":
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:  # Redis is down: the service sees a closed connection
            writer.transport.abort()
            return
        ends = {writer, up_writer}
        self._writers |= ends
        try:
            pumps = [
                asyncio.ensure_future(self._pump(reader, up_writer)),
                asyncio.ensure_future(self._pump(up_reader, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(READ_BYTES):
                await self._passing.wait()
                sink.write(data)
                await sink.drain()
