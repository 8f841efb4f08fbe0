"""A gateway that is told to end: what came in by any of its doors has one time to end, and none is cut off before."""

import asyncio
import signal
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from loadtest.processes import free_ports
from protos import inference_pb2, inference_pb2_grpc
from services.config import WorkerRole
from services.protocol.outcomes import FinishReason
from tests.gateway.gateway_process import CLOSED, gateway, how_it_ended, ready, write_model
from tests.gateway.scripted_worker import ScriptedWorker, serving, worker_hello

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
RESTARTING = "The server is restarting. Try again."
COMPLETION = {"model": "small", "prompt": [50, 51, 52], "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@dataclass
class Running:
    """A gateway over one scripted worker, and clients of both kinds."""

    process: Process
    worker: ScriptedWorker
    http: httpx2.AsyncClient
    inference: Any
    health: Any
    reflection: Any
    port: int
    admin_port: int

    def generate(self) -> Any:
        """Starts a call, as a stream."""
        prompt = inference_pb2.TokenIds(ids=[50, 51, 52])
        return self.inference.Generate(inference_pb2.GenerateRequest(token_ids=prompt, max_tokens=3))

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Tells it to end."""
        self.process.send_signal(number)

    async def until_in_flight(self, number: int) -> None:
        """Returns when it answers so many requests, over HTTP and gRPC."""
        line = f"baton_requests_in_flight {number:.1f}"
        async with asyncio.timeout(120):
            while line not in (await self.http.get(f"http://127.0.0.1:{self.admin_port}/metrics")).text.splitlines():
                await asyncio.sleep(0.01)

    async def until_not_ready(self) -> None:
        """Returns when it drains."""
        async with asyncio.timeout(60):
            while (await self.http.get(f"http://127.0.0.1:{self.admin_port}/ready")).status_code == 200:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running(model: Path, budget_s: float, **options: Any) -> AsyncIterator[Running]:
    port, grpc_port, admin_port = free_ports(3)
    worker = ScriptedWorker(worker_hello(WorkerRole.DECODE, 0xD1))
    options = {**options, "process": {"drain_timeout_s": budget_s}}
    async with (
        serving(worker),
        gateway(model, port, admin_port, worker.address, grpc_port=grpc_port, **options) as process,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, limits=CLOSED) as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
    ):
        await ready(client)
        inference: Any = inference_pb2_grpc.InferenceStub(channel)
        health: Any = health_pb2_grpc.HealthStub(channel)
        stub: Any = reflection_pb2_grpc.ServerReflectionStub
        reflecting = stub(channel)
        yield Running(process, worker, client, inference, health, reflecting, port, admin_port)


async def refused(call: Any) -> grpc.StatusCode:
    """How a call ended that brought no answer."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code()


async def test_a_drain_waits_for_grpc_streams_though_there_is_no_http_connection(model: Path):
    async with running(model, 60) as gateway:
        watching = gateway.health.Watch(health_pb2.HealthCheckRequest())
        while (await watching.read()).status == NOT_SERVING:
            """Looked at twice a second."""
        reflecting = gateway.reflection.ServerReflectionInfo()
        await reflecting.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert len((await reflecting.read()).list_services_response.service) == 3
        call = gateway.generate()
        submit = await gateway.worker.submit()
        gateway.worker.say_tokens(submit, [60], cached=0)
        assert list((await call.read()).token_ids) == [60]
        gateway.end(signal.SIGHUP)
        assert (await watching.read()).status == NOT_SERVING
        await gateway.until_not_ready()
        assert await refused(gateway.inference.ListModels(inference_pb2.ListModelsRequest())) in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.CANCELLED,  # it crossed the GOAWAY
        )
        assert await asyncio.wait_for(reflecting.read(), 20) is grpc.aio.EOF
        await asyncio.sleep(1)  # with nothing over HTTP
        gateway.worker.say_tokens(submit, [61, 62], after=1, finish=FinishReason.LENGTH)
        assert list((await call.read()).token_ids) == [61, 62]
        assert (await call.read(), await call.code()) == (grpc.aio.EOF, grpc.StatusCode.OK)
        assert await watching.read() is grpc.aio.EOF  # or who watches would hold it up
        assert (await how_it_ended(gateway.process))[0] == 0


@pytest.mark.long
async def test_what_does_not_end_in_time_ends_in_one_error_each_at_every_door(model: Path):
    """The last two calls have no attempt at a worker: one body does not come, one call waits for a worker."""
    async with running(model, 3, no_worker_wait_s=60) as gateway:
        streamed = gateway.generate()
        await gateway.worker.submit(1)
        asked = asyncio.create_task(gateway.http.post("/v1/completions", json=COMPLETION))
        await gateway.worker.submit(2)
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9"
        writer.write(head.encode() + b"\r\n\r\n")
        waiting = gateway.inference.Embed(inference_pb2.EmbedRequest(inputs=[{"text": "a"}]))
        embedding = asyncio.create_task(refused(waiting))
        await gateway.until_in_flight(4)
        begin = time.monotonic()
        gateway.end()
        answer = await asked
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, RESTARTING)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await streamed.read()
        assert (error.value.code(), error.value.details()) == (grpc.StatusCode.UNAVAILABLE, RESTARTING)
        assert (await reader.readline()).startswith(b"HTTP/1.1 503 ")
        assert await embedding is grpc.StatusCode.UNAVAILABLE
        assert await waiting.details() == RESTARTING
        writer.close()
        code, _, log = await how_it_ended(gateway.process)
        assert (code, "Traceback" in log) == (0, False)
        assert time.monotonic() - begin > 1.5, "nothing was cut off at once"


@pytest.mark.long
async def test_a_second_signal_ends_every_door_at_once(model: Path):
    async with running(model, 600) as gateway:
        call = gateway.generate()
        await gateway.worker.submit()
        gateway.end()
        await gateway.until_not_ready()
        gateway.end()
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        assert (await how_it_ended(gateway.process))[0] == 0
