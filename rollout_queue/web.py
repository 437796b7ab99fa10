"""A small web server in a thread: /metrics for Prometheus, /healthz for whoever supervises the service."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from rollout_queue.errors import QueueError

log = logging.getLogger(__name__)

Health = Callable[[], tuple[bool, str]]
_REQUEST_TIMEOUT_S = 10.0


class WebError(QueueError):
    """The address of /metrics cannot be taken."""


class MetricsServer:
    """Serves until close(). `port` is the one taken."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving and free the port. Safe to repeat."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def serve(registry: CollectorRegistry, host: str, port: int, health: Health) -> MetricsServer:
    """Serve /metrics of `registry` and /healthz of `health` -> (well, one line). Port 0 takes any free one.

    Raises WebError when the address is in use or not of this machine.
    """
    try:
        server = _Server((host, port), _handler(registry, health))
    except (OSError, OverflowError) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise WebError(
            f"metrics cannot be served on {host}:{port}: {cause}; choose another metrics.trainer_port or "
            "metrics.producer_port (0 = any free one), or another metrics.host"
        ) from None
    return MetricsServer(server)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that keeps its connection open must not hold the service up
    allow_reuse_port = False

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("a request for metrics from %s failed", client_address, exc_info=True)


def _handler(registry: CollectorRegistry, health: Health) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_TIMEOUT_S

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
            elif path == "/healthz":
                well, line = health()
                self._answer(200 if well else 503, "text/plain; charset=utf-8", f"{line}\n".encode())
            else:
                self._answer(404, "text/plain; charset=utf-8", b"/metrics or /healthz\n")

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            log.debug("metrics: " + format, *args)

    return Handler
