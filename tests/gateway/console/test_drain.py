"""The end of a gateway's process: a feed does not hold it up, and where it may it shows the end."""

import asyncio
import signal
from pathlib import Path

import httpx2

from loadtest.processes import free_ports
from services.config import WorkerRole
from services.protocol.outcomes import FinishReason
from tests.gateway.console.feed_reader import feed
from tests.gateway.gateway_process import CLOSED, gateway, how_it_ended, ready, write_model
from tests.gateway.keys.key_files import bearer
from tests.gateway.scripted_worker import ScriptedWorker, serving, worker_hello

KEY = bearer("a-key")


async def test_a_drain_ends_feeds_at_the_port_for_clients_and_is_shown_at_the_admin_port(tmp_path: Path):
    port, admin_port = free_ports(2)
    worker = ScriptedWorker(worker_hello(WorkerRole.DECODE, 0xD1))
    async with (
        serving(worker),
        gateway(write_model(tmp_path), port, admin_port, worker.address, api_keys=["a-key"]) as process,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, limits=CLOSED) as client,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{admin_port}", timeout=120, limits=CLOSED) as admin,
    ):
        await ready(client)
        async with feed(client, KEY) as ending, feed(admin, KEY) as staying:
            await ending.next("tick")
            body = {"model": "small", "prompt": [50, 51, 52], "max_tokens": 3, "temperature": 0}
            asking = asyncio.create_task(client.post("/v1/completions", json=body, headers=KEY))
            submit = await worker.submit()
            process.send_signal(signal.SIGTERM)
            assert (await ending.rest())[-1] == ("end", {"why": "the gateway ends"})
            tick = await staying.next("tick", lambda tick: tick["gateway"]["draining"])
            assert tick["unhealthy"][0]["why"] == "it drains: it takes no new requests, and ends soon"
            assert tick["gateway"]["in_flight"] == 1
            worker.say_tokens(submit, [60, 61, 62], cached=0, finish=FinishReason.LENGTH)
            assert (await asking).status_code == 200
            assert (await staying.rest())[-1] == ("end", {"why": "the gateway ends"})
        code, _, log = await how_it_ended(process)
        assert (code, "Traceback" in log, "error" in log) == (0, False, False)
