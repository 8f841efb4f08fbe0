"""The gateway as a process: HTTP at one end, workers that speak the protocol at the other."""

import asyncio
import fcntl
import os
import signal
import socket
from pathlib import Path

import httpx2
import pytest

from loadtest.processes import free_ports
from services.config import WorkerRole
from services.protocol.outcomes import FinishReason
from tests.gateway.gateway_process import CLOSED, gateway, how_it_ended, ready, write_model
from tests.gateway.scripted_worker import ScriptedWorker, serving, worker_hello


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def admin_port() -> int:
    return free_ports(1)[0]


async def test_a_request_goes_through_a_pair_and_sigterm_lets_it_end(model: Path, port: int, admin_port: int):
    prefill = ScriptedWorker(worker_hello(WorkerRole.PREFILL, 0xF1))
    decode = ScriptedWorker(worker_hello(WorkerRole.DECODE, 0xD1))
    async with (
        serving(prefill),
        serving(decode),
        gateway(model, port, admin_port, prefill.address, decode.address) as process,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, limits=CLOSED) as client,
    ):
        await ready(client)
        body = {"model": "small", "prompt": [50, 51, 52], "max_tokens": 3, "temperature": 0}
        asking = asyncio.create_task(client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"}))
        submit = await decode.submit()
        prefill.say_tokens(submit, [60], cached=0)
        (row,) = (await client.get(f"http://127.0.0.1:{admin_port}/debug/ledger")).json()["rows"]
        assert (row["request_id"], row["prefill"], row["decode"]) == ("mine", prefill.address, decode.address)
        lines = (await client.get(f"http://127.0.0.1:{admin_port}/metrics")).text.splitlines()
        assert "baton_attempts_total 1.0" in lines
        assert f'baton_blocks_available{{role="decode",worker="{decode.address}"}} 64.0' in lines
        process.send_signal(signal.SIGTERM)
        while (await client.get(f"http://127.0.0.1:{admin_port}/ready")).status_code == 200:
            await asyncio.sleep(0.01)  # until the signal has come
        decode.say_tokens(submit, [60, 61, 62], finish=FinishReason.LENGTH)
        answer = await asking
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 3
        code, _, log = await how_it_ended(process)
        assert code == 0
        assert "Traceback" not in log
        (placed,) = (line for line in log.splitlines() if "placed" in line)
        assert "request_id=mine" in placed


@pytest.mark.few(1)
@pytest.mark.parametrize("log", ["a full disk", "a pipe that nobody reads"])
async def test_requests_are_answered_though_no_log_line_can_be_written(
    model: Path, port: int, admin_port: int, log: str
):
    reading, writing = os.pipe()
    if log == "a full disk":
        os.close(writing)
        writing = os.open("/dev/full", os.O_WRONLY)
    else:
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        os.write(writing, b"x" * 4096)
    decode = ScriptedWorker(worker_hello(WorkerRole.DECODE, 0xD1))
    async with (
        serving(decode),
        gateway(model, port, admin_port, decode.address, stderr=writing) as process,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, limits=CLOSED) as client,
    ):
        await ready(client)
        body = {"model": "small", "prompt": [50, 51, 52], "max_tokens": 1, "temperature": 0}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        decode.say_tokens(await decode.submit(), [60], cached=0, finish=FinishReason.LENGTH)
        assert (await asking).status_code == 200
        assert "baton_gateway_log_lines_dropped" in (await client.get(f"http://127.0.0.1:{admin_port}/metrics")).text
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
    os.close(reading)
    os.close(writing)


@pytest.mark.few(1)
@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
async def test_a_taken_port_is_one_line_and_an_exit_code(model: Path, port: int, admin_port: int, flag: str):
    taken = port if flag == "--port" else admin_port
    with socket.create_server(("127.0.0.1", taken)):
        async with gateway(model, port, admin_port, "127.0.0.1:1") as process:
            code, out, error = await how_it_ended(process)
    assert code == 1
    words = f"127.0.0.1:{taken} is in use already; choose another with {flag}"
    assert (out, error) == ("", f"baton gateway: {words}\n")


@pytest.mark.long
async def test_a_missing_model_is_one_line_and_an_exit_code(tmp_path: Path, port: int, admin_port: int):
    missing = tmp_path / "nowhere"
    async with gateway(missing, port, admin_port, "127.0.0.1:1") as process:
        code, out, error = await how_it_ended(process)
    assert code == 1
    assert (out, error) == ("", f"baton gateway: model directory {missing} does not exist\n")
