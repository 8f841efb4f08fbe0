"""Readiness as real servers tell it."""

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.launcher import readiness


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
