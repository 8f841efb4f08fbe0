"""Probes that ask a child whether it serves: gRPC health of a worker, GET /ready of a gateway, PING of Redis.

A probe is called with the child's process id. It tells True once the child serves, and NeverReady where it never will,
and NotYet where it can say what the child waits for.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx2
from grpc_health.v1 import health_pb2
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.tls.files import CertificateFiles, CertificatePaths
from services.tls.grpc_ends import Channels
from services.tls.roles import CertificateRole


@dataclass(frozen=True, slots=True)
class NeverReady:
    """The child runs, and waiting for it is of no use."""

    reason: str


@dataclass(frozen=True, slots=True)
class NotYet:
    """The child is not ready, and this is what it waits for."""

    reason: str


Probe = Callable[[int], Awaitable[bool | NotYet | NeverReady]]
Serves = Callable[[int], Awaitable[bool]]  # a probe that always has hope

_TIMEOUT_S = 2.0
_DIRECT = (("grpc.enable_http_proxy", 0),)


def grpc_serving(address: str, mtls: Path | None = None) -> Serves:
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


def gateway_ready(admin_url: str, workers: Sequence[str] = ()) -> Probe:
    """True once GET /ready at this URL is answered with 200 by the child, and by no other gateway.

    workers: the addresses of all that there are, where the gateway is told of them. Where it refuses each of them it
    will never be ready.
    """

    async def probe(pid: int) -> bool | NeverReady:
        answer = await _get(f"{admin_url}/ready")
        if answer is not None:
            return bool(answer.json()["pid"] == pid)
        refused = await _refused_workers(admin_url) if workers else {}
        if workers and refused.keys() >= set(workers):
            return NeverReady(f"it refuses every worker; {workers[0]}, since {refused[workers[0]]}")
        return False

    return probe


async def max_model_len(admin_url: str) -> int | None:
    """Tokens of the longest sequence, as the gateway with this admin URL has it; None where it does not answer."""
    answer = await _get(f"{admin_url}/ready")
    return None if answer is None else answer.json().get("max_model_len")


def known_worker(address: str, probe: Probe, admin_url: str) -> Probe:
    """True once the probe is, and the gateway with this admin URL has a connection to the worker at host:port.

    The gateway's metrics say so, and whether it refuses the worker; they ask for no key.
    """

    async def both(pid: int) -> bool | NotYet | NeverReady:
        if (answer := await probe(pid)) is not True:
            return answer
        if (answered := await _get(f"{admin_url}/metrics")) is None:
            return NotYet(f"the worker at {address} serves, and the gateway does not answer at {admin_url}/metrics")
        if address in dict(_read_labels(answered.text, "baton_worker_info")):
            return True
        if (why := _refusals(answered.text).get(address)) is not None:
            return NeverReady(f"the gateway refuses the worker at {address}: {why}")
        return NotYet(
            f"the worker at {address} serves, and the gateway, which Redis tells of it, has no connection yet"
        )

    return both


async def _refused_workers(admin_url: str) -> dict[str, str]:
    """The reasons of the gateway with this admin URL, by the workers' addresses; none where it does not answer."""
    answer = await _get(f"{admin_url}/metrics")
    return {} if answer is None else _refusals(answer.text)


def _refusals(metrics: str) -> dict[str, str]:
    return {worker: labels["why"] for worker, labels in _read_labels(metrics, "baton_worker_refused")}


def _read_labels(text: str, metric: str) -> Iterator[tuple[str, dict[str, str]]]:
    lines = [line for line in text.splitlines() if line.startswith(metric + "{")]
    for family in text_string_to_metric_families("\n".join([f"# TYPE {metric} gauge", *lines, ""])):
        for sample in family.samples:
            yield sample.labels["worker"], sample.labels


async def _get(url: str) -> httpx2.Response | None:
    """The answer where it is 200, else None."""
    # An address of this machine: neither proxies nor certificates have a say.
    async with httpx2.AsyncClient(trust_env=False, verify=False, timeout=_TIMEOUT_S) as client:
        try:
            answer = await client.get(url)
        except httpx2.TransportError:
            return None
    return answer if answer.status_code == httpx2.codes.OK else None


def redis_answers(url: str) -> Serves:
    """True once PING is answered."""

    async def probe(_: int) -> bool:
        async with Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S) as client:
            try:
                return bool(await client.ping())
            except (RedisError, OSError):
                return False

    return probe
