"""A network between services and their Redis that a test can silence, cut, or put TLS on."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from types import TracebackType

LOADING = b"-LOADING Redis is loading the dataset in memory\r\n"


class Gate:
    """Forwards a loopback port of its own to `target`, in a thread of its own. Use as a context manager."""

    def __init__(self, target: int, tls: ssl.SSLContext | None = None) -> None:
        self._target = target
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gate", daemon=True)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.silent = False  # nothing passes, in either direction; new connections are taken
        self.loading = False  # every request is answered as by a server that reads its data set
        self.port = 0

    def cut(self) -> None:
        """Close every connection."""
        self._loop.call_soon_threadsafe(self._cut)

    def __enter__(self) -> Gate:
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self) -> int:
        self._server = await asyncio.start_server(self._on_client, "127.0.0.1", 0, ssl=self._tls)
        return int(self._server.sockets[0].getsockname()[1])

    async def _close(self) -> None:
        self._server.close()
        self._cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            writers.append(far_writer)
            self._writers.update(writers)
            pumps = [
                asyncio.ensure_future(self._pump(reader, far_writer, writer)),
                asyncio.ensure_future(self._pump(far_reader, writer, None)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            pass  # the server is away: so is this connection
        finally:
            self._writers.difference_update(writers)
            for one in writers:
                one.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, to: asyncio.StreamWriter, back: asyncio.StreamWriter | None
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                while self.silent:
                    await asyncio.sleep(0.05)
                if self.loading and back is not None:
                    back.write(LOADING)
                    await back.drain()
                    return
                to.write(data)
                await to.drain()
