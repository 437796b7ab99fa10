"""Names of metrics, and the server that shows them."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from rollout_queue.errors import QueueError
from rollout_queue.metrics import ProducerMetrics, TrainerMetrics, serve

UNITS = ("_total", "_seconds", "_bytes", "_steps")


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("build", [TrainerMetrics, ProducerMetrics])
def test_every_metric_has_our_prefix_and_help(build: Callable[[CollectorRegistry], object]) -> None:
    registry = CollectorRegistry()
    build(registry)
    families = list(registry.collect())
    assert len(families) > 8
    for family in families:
        assert family.name.startswith("nbehind_")
        assert family.documentation.endswith(".")
        if family.type == "histogram":
            assert family.name.endswith(UNITS)


def test_two_services_in_one_process_do_not_mix() -> None:
    one, other = CollectorRegistry(), CollectorRegistry()
    first, _second = ProducerMetrics(one), ProducerMetrics(other)
    first.tokens.inc(7)
    first.groups.labels(result="OK").inc()
    assert one.get_sample_value("nbehind_producer_tokens_total") == 7
    assert other.get_sample_value("nbehind_producer_tokens_total") == 0
    assert one.get_sample_value("nbehind_producer_version") == -1


def test_metrics_and_health() -> None:
    registry = CollectorRegistry()
    TrainerMetrics(registry).steps.inc(3)
    health = [True, "training step 3"]
    server = serve(registry, "127.0.0.1", 0, lambda: (bool(health[0]), str(health[1])))
    status, text = get(server.port, "/metrics")
    assert (status, "nbehind_trainer_steps_total 3.0" in text) == (200, True)
    assert get(server.port, "/healthz") == (200, "training step 3\n")
    health[:] = [False, "no step for 300 s"]
    assert get(server.port, "/healthz?x=1") == (503, "no step for 300 s\n")
    assert get(server.port, "/etc/passwd")[0] == 404
    port = server.port
    server.close()
    server.close()
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_an_open_connection_does_not_hold_close_up() -> None:
    server = serve(CollectorRegistry(), "127.0.0.1", 0, lambda: (True, "well"))
    with socket.create_connection(("127.0.0.1", server.port)) as idle:
        idle.sendall(b"GET /met")
        closing = threading.Thread(target=server.close)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_an_address_that_cannot_be_taken(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(QueueError, match=rf"{host}:{port}: .*choose another metrics\.trainer_port"):
            serve(CollectorRegistry(), host, port, lambda: (True, ""))
