"""Readiness as real servers tell it."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from services.config import WorkerRole
from services.gateway.metrics import GatewayMetrics, RefusedWorkers
from services.launcher import readiness
from tests.gateway.scripted_worker import worker_hello

OTHERS = {"127.0.0.1:2": 'it serves model "b", this gateway a', "127.0.0.1:3": "protocol 9"}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes whose answer is asserted wait for it however busy the machine is."""
    monkeypatch.setattr(readiness, "_TIMEOUT_S", 300.0)


@contextlib.contextmanager
def gateway_that_refuses(workers: Mapping[str, str]) -> Iterator[str]:
    """The admin URL of a gateway's metrics, which is not ready."""
    metrics = GatewayMetrics(CollectorRegistry())
    metrics.worker_up("127.0.0.1:1", worker_hello(WorkerRole.DECODE, 1))
    metrics.registry.register(RefusedWorkers(lambda: workers))

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 503)
            self.end_headers()
            self.wfile.write(metrics.render())

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


async def serves(_: int) -> bool:
    return True


async def test_a_worker_that_the_gateway_refuses_will_never_be_ready() -> None:
    with gateway_that_refuses(OTHERS) as url:
        assert await readiness.known_worker("127.0.0.1:1", serves, url)(1) is True
        refused = await readiness.known_worker("127.0.0.1:2", serves, url)(1)
        assert refused == readiness.NeverReady(
            'the gateway refuses the worker at 127.0.0.1:2: it serves model "b", this gateway a'
        )
        unknown = await readiness.known_worker("127.0.0.1:4", serves, url)(1)
        assert isinstance(unknown, readiness.NotYet)
        assert "127.0.0.1:4 serves, and the gateway, which Redis tells of it, has no connection" in unknown.reason
    gone = await readiness.known_worker("127.0.0.1:4", serves, "http://127.0.0.1:1")(1)
    assert isinstance(gone, readiness.NotYet)
    assert "does not answer at http://127.0.0.1:1/metrics" in gone.reason


async def test_a_gateway_that_refuses_all_workers_that_it_is_told_of_will_never_be_ready() -> None:
    with gateway_that_refuses(OTHERS) as url:
        never = await readiness.gateway_ready(url, list(OTHERS))(1)
        assert isinstance(never, readiness.NeverReady)
        assert 'it refuses every worker; 127.0.0.1:2, since it serves model "b"' in never.reason
        assert await readiness.gateway_ready(url, [*OTHERS, "127.0.0.1:4"])(1) is False
        assert await readiness.gateway_ready(url)(1) is False


async def test_a_worker_is_ready_when_its_health_says_serving() -> None:
    server, service = grpc.aio.server(), health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    probe = readiness.grpc_serving(f"127.0.0.1:{port}")
    await service.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    await server.start()
    assert not await probe(1)
    await service.set("", health_pb2.HealthCheckResponse.SERVING)
    assert await probe(1)
    await server.stop(None)
    assert not await probe(1)


async def test_nobody_there_is_not_ready() -> None:
    assert not await readiness.gateway_ready("http://127.0.0.1:1")(1)
    assert not await readiness.grpc_serving("127.0.0.1:1")(1)
