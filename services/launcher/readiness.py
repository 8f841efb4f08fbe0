"""Probes that ask a child whether it serves: gRPC health of a worker, GET /ready of a gateway, PING of Redis."""

from collections.abc import Awaitable, Callable

import grpc
import httpx2
from grpc_health.v1 import health_pb2
from redis.asyncio import Redis
from redis.exceptions import RedisError

Probe = Callable[[], Awaitable[bool]]

_TIMEOUT_S = 2.0


def grpc_serving(address: str) -> Probe:
    """True once the standard health service at host:port reports SERVING."""

    async def probe() -> bool:
        # A channel of its own for each question: an old one would wait out its back-off before it tries again.
        async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            try:
                answer = await check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    return probe


def http_ready(url: str) -> Probe:
    """True once GET on the URL answers 200."""

    async def probe() -> bool:
        # Loopback: neither proxies nor certificates have a say.
        async with httpx2.AsyncClient(trust_env=False, verify=False, timeout=_TIMEOUT_S) as client:
            try:
                answer = await client.get(url)
            except httpx2.TransportError:
                return False
        return answer.status_code == httpx2.codes.OK

    return probe


def redis_answers(url: str) -> Probe:
    """True once PING is answered."""

    async def probe() -> bool:
        async with Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S) as client:
            try:
                return bool(await client.ping())
            except (RedisError, OSError):
                return False

    return probe
