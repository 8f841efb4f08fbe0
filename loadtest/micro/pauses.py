"""The longest pause of a gateway's event loop that one request can cause: the worst requests, each beside a small one.

The gateway is the one that `baton gateway` runs, over workers whose model costs nothing. While a process sends the
worst request, another one asks for /health again and again on one connection. What the slowest of these took is how
long the loop stood still. Other programs on the machine make a round slower, never faster, so of several rounds the
best one counts.
"""

import asyncio
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

from loadtest.micro import gateway_servers
from loadtest.micro.gateway_servers import Gateway
from loadtest.micro.worst_requests import NAMES, Outcome, send
from loadtest.tables import Record
from services.config import HandoffMode
from services.launcher import random_model

_STEP_MS = 1.0
_INTERVAL_S = 0.0005
_HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


class ProbeFailed(Exception):
    """The gateway did not answer /health."""


async def measure(rounds: int) -> list[Record]:
    """Sends each of the worst requests `rounds` times, one after the other, and returns its best round."""
    context = multiprocessing.get_context("spawn")
    async with gateway_servers.baton(random_model.made(), HandoffMode.NEVER, _STEP_MS) as gateway:
        with ProcessPoolExecutor(1, context) as client:
            await _watched(client, gateway, NAMES[0])  # starts the client's process
            return [_best([await _watched(client, gateway, name) for _ in range(rounds)]) for name in NAMES]


def _best(rounds: list[Record]) -> Record:
    return min(rounds, key=lambda record: float(record["pause_ms"]))


async def _watched(client: ProcessPoolExecutor, gateway: Gateway, name: str) -> Record:
    """Sends one request, and measures the longest pause and the CPU of the gateway meanwhile."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    cpu_s, longest_s = gateway.cpu_s(), 0.0
    sending = asyncio.get_running_loop().run_in_executor(client, send, name, gateway.port, gateway.grpc_port)
    while not sending.done():
        longest_s = max(longest_s, await _probe(reader, writer))
        await asyncio.sleep(_INTERVAL_S)
    longest_s = max(longest_s, await _probe(reader, writer))
    outcome: Outcome = await sending
    writer.close()
    return {
        "request": name,
        "answer": outcome.answer,
        "pause_ms": longest_s * 1e3,
        "cpu_ms": (gateway.cpu_s() - cpu_s) * 1e3,
        "seconds": outcome.seconds,
    }


async def _probe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
    start = time.perf_counter()
    writer.write(_HEALTH)
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise ProbeFailed(head.decode())
    await reader.readexactly(len(b'{"status":"ok"}'))
    return time.perf_counter() - start
