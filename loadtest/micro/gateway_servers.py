"""Gateways over workers without a model: Baton's own, and NVIDIA Dynamo's front end with its mock workers."""

import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from loadtest.compare.servers import MODEL_NAME
from loadtest.http_stream import Address
from loadtest.micro.own_redis import own_redis
from loadtest.processes import Process, Started, free_ports, http_ok, started, until_ready
from services.config import MTLS_VARIABLE, REDIS_URL_VARIABLE, HandoffMode, WorkerRole
from services.launcher import certificates
from services.launcher.readiness import grpc_serving
from services.process import lifeline
from services.tls.roles import CertificateRole

_START_S = 90.0
_LOOPBACK = "127.0.0.1"
_DYNAMO_SPEEDUP = 50  # of its mock workers over the GPU that they stand for


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway's process that answers on a port of loopback."""

    port: int
    process: psutil.Process
    grpc_port: int = 0  # 0: it has none
    admin_port: int = 0  # 0: it has none

    def cpu_s(self) -> float:
        """CPU seconds that all threads of the process used so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@asynccontextmanager
async def baton(
    model: Path, handoff: HandoffMode, step_ms: float, *, mtls: bool = False, max_num_seqs: int = 256
) -> AsyncIterator[Gateway]:
    """Starts a gateway, two workers, whose steps take `step_ms`, and Redis. Raises ProcessError.

    mtls: TLS between gateway and workers, with certificates for the purpose. max_num_seqs: in the batch of a worker.
    """
    ports = free_ports(5)
    roles = dict(zip(WorkerRole, ports, strict=False))
    http, grpc, admin = ports[2:]
    async with own_redis() as url, AsyncExitStack() as stack:
        environment = {REDIS_URL_VARIABLE: url}
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-"))) if mtls else None
        if directory is not None:
            certificates.make(directory, _LOOPBACK)
        operator = None if directory is None else directory / CertificateRole.OPERATOR
        workers, probes = [], []
        for role, port in roles.items():
            command = ["loadtest.micro.simulated_worker", role, str(model), str(port), str(step_ms)]
            command.append(str(max_num_seqs))
            starting = _python(role, sys.executable, command, environment | _mtls(directory, role))
            worker = await stack.enter_async_context(starting)
            workers.append(worker)
            probes.append(partial(grpc_serving(f"{_LOOPBACK}:{port}", operator), worker.process.pid))
        await until_ready(probes, workers, _START_S)
        command = ["services.cli", "gateway", "--model", str(model), "--served-model-name", MODEL_NAME]
        command += ["--port", str(http), "--grpc-port", str(grpc), "--admin-port", str(admin)]
        command += ["--handoff", handoff]
        environment |= _mtls(directory, CertificateRole.GATEWAY)
        gateway = await stack.enter_async_context(_python("gateway", sys.executable, command, environment))
        processes = [*workers, gateway]
        await until_ready([http_ok(Address(_LOOPBACK, http), "/ready")], processes, _START_S)
        yield Gateway(http, psutil.Process(gateway.process.pid), grpc, admin)
        for process in processes:
            process.check()


def _mtls(directory: Path | None, role: str) -> dict[str, str]:
    return {} if directory is None else {MTLS_VARIABLE: str(directory / role)}


@asynccontextmanager
async def dynamo(venv: Path, model: Path) -> AsyncIterator[Gateway]:
    """Starts Dynamo's front end, routing by KV and tokenizing as fast as it can, and a mock pair. Raises ProcessError.

    venv: a virtual environment that has ai-dynamo and ai-dynamo-runtime 1.6.1.
    """
    python = str(venv / "bin" / "python")
    (port,) = free_ports(1)
    async with AsyncExitStack() as stack:
        environment = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": stack.enter_context(tempfile.TemporaryDirectory()),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_LOG": "error",
            "HF_HUB_OFFLINE": "1",
        }
        front = ["dynamo.frontend", "--http-host", _LOOPBACK, "--http-port", str(port)]
        front += ["--router-mode", "kv", "--kv-cache-block-size", "16", "--tokenizer", "fastokens"]
        gateway = await stack.enter_async_context(_python("dynamo", python, front, environment))
        processes = [gateway]
        for role in WorkerRole:
            worker = ["dynamo.mocker", "--model-path", str(model), "--model-name", MODEL_NAME, "--block-size", "16"]
            worker += ["--num-gpu-blocks-override", "20000", "--max-model-len", "8192"]
            worker += ["--speedup-ratio", str(_DYNAMO_SPEEDUP), "--disaggregation-mode", role]
            worker += ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
            processes.append(await stack.enter_async_context(_python(role, python, worker, environment)))
        await until_ready([http_ok(Address(_LOOPBACK, port), f"/v1/models/{MODEL_NAME}")], processes, _START_S)
        yield Gateway(port, psutil.Process(gateway.process.pid))
        for process in processes:
            process.check()


@asynccontextmanager
async def _python(name: str, python: str, module: list[str], environment: Mapping[str, str]) -> AsyncIterator[Started]:
    """Starts `python -m` with a module and its arguments."""
    process = Process(name, (python, "-m", *module), {**lifeline.environment(), **environment})
    async with started(process) as running:
        yield running
