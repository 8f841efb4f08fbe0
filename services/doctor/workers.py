"""Workers by their addresses: reached, and serving or not."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2

from services.doctor.finding import Finding, error, ok, warning
from services.protocol.grpc_options import CLIENT_OPTIONS
from services.tls.certificate import TlsError
from services.tls.files import CertificateFiles, CertificatePaths
from services.tls.grpc_ends import Channels
from services.tls.roles import CertificateRole

_TIMEOUT_S = 2.0


async def check_workers(addresses: Sequence[str], mtls: Path | None) -> list[Finding]:
    """Asks each worker for its health. mtls: directory with a certificate of any role; None: in plain text."""
    try:
        channels = Channels(None if mtls is None else CertificateFiles(CertificatePaths.in_directory(mtls)))
    except TlsError as reason:
        return [error("workers", f"not asked: {reason}", "see the findings on certificates")]
    return await asyncio.gather(*(_ask(channels, address) for address in addresses))


async def _ask(channels: Channels, address: str) -> Finding:
    start = time.perf_counter()
    async with channels.open(address, CertificateRole.WORKER, CLIENT_OPTIONS) as channel:
        check = channel.unary_unary(
            f"/{health.SERVICE_NAME}/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = await check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as reason:
            return error(address, describe(reason), "look at the address, the network, and TLS on both sides (--mtls)")
    took_ms = (time.perf_counter() - start) * 1e3
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        return warning(address, "answers, and does not serve: it loads its model, or drains", "look at its log")
    return ok(address, f"serves; connected and answered in {took_ms:.1f} ms")


def describe(reason: grpc.aio.AioRpcError) -> str:
    """Returns what gRPC says of a failure, in one line."""
    if reason.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "what listens there is no worker"
    return " ".join((reason.details() or reason.code().name).split())
