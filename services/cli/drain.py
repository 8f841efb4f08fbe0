"""`baton drain`: has a worker finish what it does, and end."""

import asyncio
from pathlib import Path

import grpc
import typer

from protos import worker_pb2, worker_pb2_grpc
from services.config.option import OptionError, Refusal
from services.process.configs import parse_workers
from services.protocol.grpc_options import CLIENT_OPTIONS
from services.tls.certificate import TlsError
from services.tls.files import CertificateFiles, CertificatePaths
from services.tls.grpc_ends import Channels
from services.tls.roles import CertificateRole

_LONGEST_S = 24 * 3600.0  # of a drain whose time is the worker's own, which this command does not know
_LAST_WORDS_S = 15.0  # for the answer of a worker whose time is over


def drain(address: str, timeout_s: float | None, mtls: Path | None = None) -> int:
    """Drains the worker at host:port, and prints one line when it is over. Returns 0. Raises Refusal.

    timeout_s: the time of the drain; None: the worker's own. mtls: directory with an operator's certificate.
    """
    typer.echo(asyncio.run(drain_worker(address, timeout_s, mtls)))
    return 0


async def drain_worker(address: str, timeout_s: float | None, mtls: Path | None) -> str:
    """Drains a worker, and says in a line what came of it. Raises Refusal. The arguments are those of `drain`."""
    try:
        (worker,) = parse_workers(address)
    except (OptionError, ValueError) as error:
        raise Refusal(f"drain takes one worker as HOST:PORT: {error}") from error
    request = worker_pb2.DrainRequest() if timeout_s is None else worker_pb2.DrainRequest(timeout_s=timeout_s)
    try:
        channels = Channels(None if mtls is None else CertificateFiles(CertificatePaths.in_directory(mtls)))
        reply = await _ask(channels, worker, request)
    except (grpc.RpcError, TlsError) as error:
        raise Refusal(f"{worker} cannot be drained: {_reason(error)}") from error
    moved = f"; {reply.moved} of its attempts continue on other workers" if reply.moved else ""
    return f"{worker} is drained and ends{moved}" if reply.done else f"{worker} ends: its time was over{moved}"


async def _ask(channels: Channels, worker: str, request: worker_pb2.DrainRequest) -> worker_pb2.DrainReply:
    async with channels.open(worker, CertificateRole.WORKER, CLIENT_OPTIONS) as channel:
        within_s = (request.timeout_s if request.HasField("timeout_s") else _LONGEST_S) + _LAST_WORDS_S
        reply: worker_pb2.DrainReply = await worker_pb2_grpc.WorkerStub(channel).Drain(request, timeout=within_s)
    return reply


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return "what listens there is no worker that can"
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return "its time is over, and it has not ended: it hangs; look at its log, and end it by SIGKILL"
        return str(error.details())
    return str(error)
