"""Gateways over workers without a model: Baton's own, and NVIDIA Dynamo's front end with its mock workers."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest.micro.own_redis import own_redis
from services.config import REDIS_URL_VARIABLE, HandoffMode, WorkerRole
from services.launcher.ports import free_ports
from services.launcher.readiness import Probe, grpc_serving, http_ready
from services.process import lifeline

MODEL_NAME = "m"

_START_S, _STOP_S = 90.0, 10.0
_POLL_S = 0.1
_DYNAMO_SPEEDUP = 50  # of its mock workers over the GPU that they stand for


@dataclass(frozen=True, slots=True)
class Server:
    """A gateway that answers."""

    port: int
    process: psutil.Process

    def cpu_s(self) -> float:
        """What its process used so far, all threads."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@asynccontextmanager
async def baton(model: Path, handoff: HandoffMode, step_ms: float) -> AsyncIterator[Server]:
    """A gateway, a prefill and a decode worker, and Redis; a worker's step takes `step_ms`."""
    ports = free_ports("127.0.0.1", 4)
    roles = dict(zip(WorkerRole, ports, strict=False))
    http, grpc = ports[2:]
    async with own_redis() as url:
        environment = _environment({REDIS_URL_VARIABLE: url})
        with ExitStack() as children:
            for role, port in roles.items():
                command = ["loadtest.micro.simulated_worker", role, str(model), str(port), str(step_ms)]
                children.enter_context(_python(sys.executable, command, environment))
            for port in roles.values():
                await _until(grpc_serving(f"127.0.0.1:{port}"))
            command = ["services.cli", "gateway", "--model", str(model), "--served-model-name", MODEL_NAME]
            command += ["--port", str(http), "--grpc-port", str(grpc), "--handoff", handoff]
            pid = children.enter_context(_python(sys.executable, command, environment))
            await _until(http_ready(f"http://127.0.0.1:{http}/ready"))
            yield Server(http, psutil.Process(pid))


@asynccontextmanager
async def dynamo(venv: Path, model: Path) -> AsyncIterator[Server]:
    """Dynamo's front end, routing by KV and tokenizing as fast as it can, and a mock pair.

    venv: where ai-dynamo and ai-dynamo-runtime 1.6.1 are installed.
    """
    python = str(venv / "bin" / "python")
    (port,) = free_ports("127.0.0.1", 1)
    store = tempfile.TemporaryDirectory()
    said = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": store.name,
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_LOG": "error",
        "HF_HUB_OFFLINE": "1",
    }
    environment = _environment(said)
    with store, ExitStack() as children:
        front = ["dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
        front += ["--router-mode", "kv", "--kv-cache-block-size", "16", "--tokenizer", "fastokens"]
        pid = children.enter_context(_python(python, front, environment))
        for role in WorkerRole:
            worker = ["dynamo.mocker", "--model-path", str(model), "--model-name", MODEL_NAME, "--block-size", "16"]
            worker += ["--num-gpu-blocks-override", "20000", "--max-model-len", "8192"]
            worker += ["--speedup-ratio", str(_DYNAMO_SPEEDUP), "--disaggregation-mode", role]
            worker += ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
            children.enter_context(_python(python, worker, environment))
        await _until(http_ready(f"http://127.0.0.1:{port}/v1/models/{MODEL_NAME}"))
        yield Server(port, psutil.Process(pid))


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **lifeline.environment(), **more}


@contextmanager
def _python(python: str, module: Sequence[str], environment: Mapping[str, str]) -> Iterator[int]:
    """A process that runs a module; its id. What it says goes into a file, shown if it ends by itself."""
    with tempfile.TemporaryFile() as said:
        command = [python, "-m", *module]
        process = subprocess.Popen(command, env=dict(environment), stdout=said, stderr=subprocess.STDOUT)
        try:
            yield process.pid
        finally:
            if process.poll() is not None:
                said.seek(0)
                sys.stderr.write(said.read()[-4000:].decode(errors="replace"))
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _until(answers: Probe) -> None:
    deadline = time.monotonic() + _START_S
    while not await answers():
        if time.monotonic() > deadline:
            raise TimeoutError(f"a server was not ready after {_START_S:g} s")
        await asyncio.sleep(_POLL_S)
