"""Probes that ask a child whether it serves: gRPC health of a worker, GET /ready of a gateway, PING of Redis.

A probe is called with the child's process id.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import httpx2
from grpc_health.v1 import health_pb2
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.tls.files import CertificateFiles, CertificatePaths
from services.tls.grpc_ends import Channels
from services.tls.roles import CertificateRole

Probe = Callable[[int], Awaitable[bool]]

_TIMEOUT_S = 2.0
_DIRECT = (("grpc.enable_http_proxy", 0),)


def grpc_serving(address: str, mtls: Path | None = None) -> Probe:
    """True once the standard health service at host:port, a worker's, reports SERVING.

    mtls: directory with a certificate to ask with. Raises TlsError where that cannot be used.
    """
    channels = Channels(None if mtls is None else CertificateFiles(CertificatePaths.in_directory(mtls)))

    async def probe(_: int) -> bool:
        # A channel of its own for each question: an old one would wait out its back-off before it tries again.
        async with channels.open(address, CertificateRole.WORKER, _DIRECT) as channel:
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


def gateway_ready(admin_url: str) -> Probe:
    """True once GET /ready at this URL is answered with 200 by the child, and by no other gateway."""

    async def probe(pid: int) -> bool:
        answer = await _get(f"{admin_url}/ready")
        return answer is not None and answer.json()["pid"] == pid

    return probe


def known_worker(address: str, probe: Probe, admin_url: str) -> Probe:
    """True once the probe is, and the gateway with this admin URL has a connection to the worker at host:port.

    The gateway's metrics say so; they ask for no key.
    """

    async def both(pid: int) -> bool:
        if not await probe(pid):
            return False
        answer = await _get(f"{admin_url}/metrics")
        if answer is None:
            return False
        connected = [line for line in answer.text.splitlines() if line.startswith("baton_worker_info{")]
        return any(f'worker="{address}"' in line for line in connected)

    return both


async def _get(url: str) -> httpx2.Response | None:
    """The answer where it is 200, else None."""
    # An address of this machine: neither proxies nor certificates have a say.
    async with httpx2.AsyncClient(trust_env=False, verify=False, timeout=_TIMEOUT_S) as client:
        try:
            answer = await client.get(url)
        except httpx2.TransportError:
            return None
    return answer if answer.status_code == httpx2.codes.OK else None


def redis_answers(url: str) -> Probe:
    """True once PING is answered."""

    async def probe(_: int) -> bool:
        async with Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S) as client:
            try:
                return bool(await client.ping())
            except (RedisError, OSError):
                return False

    return probe
