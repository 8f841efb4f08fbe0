"""CPU that the console's feed costs a gateway with 1,000 requests in flight: with no, one or three listeners.

The gateway is the one that `baton gateway` runs, behind it workers whose model costs nothing, before it a client with
1,000 streams, of which some 30 end and begin each second. Shares are of one core, which is all that a gateway's event
loop has. On a machine that has other work the parts alone, of `console_parts.py`, say more.
"""

import asyncio
import multiprocessing
import socket
import statistics
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack, suppress
from time import monotonic

import orjson

from loadtest.cannot_run import CannotRun
from loadtest.compare.servers import MODEL_NAME
from loadtest.micro import gateway_servers
from loadtest.micro.console_parts import parts_alone
from loadtest.micro.flood import flood
from loadtest.micro.gateway_servers import Gateway
from loadtest.tables import Record
from services.config import HandoffMode
from services.launcher import random_model

LISTENERS = (0, 1, 3)
IN_FLIGHT = 1000
_STEP_MS, _OUTPUT_TOKENS = 250.0, 128  # on average: a request takes half a minute
_RAMP_S = 40.0  # until all requests are in flight and those of the first moment have spread
_OPENED_S = 2.0  # a listener has what there was before
_LONGEST_SHOWN = 80  # bytes of an answer that is none


async def measure(rounds: int, seconds: int) -> list[Record]:
    """Measures rounds of all numbers of listeners in turn, and returns medians; then the parts alone."""
    model = random_model.made()
    spent: dict[int, list[Record]] = {number: [] for number in LISTENERS}
    total_s = _RAMP_S + rounds * len(LISTENERS) * (seconds + _OPENED_S)
    waves = 1 + round(total_s / (_OUTPUT_TOKENS * _STEP_MS / 1e3))
    starting = gateway_servers.baton(model, HandoffMode.NEVER, _STEP_MS, max_num_seqs=IN_FLIGHT + 1)
    context = multiprocessing.get_context("spawn")
    async with starting as server:
        with ProcessPoolExecutor(1, context) as client, ProcessPoolExecutor(1, context) as consoles:
            loop = asyncio.get_running_loop()
            bodies = [_body(number) for number in range(waves * IN_FLIGHT)]
            flooding = loop.run_in_executor(client, flood, server.port, "/v1/completions", bodies, IN_FLIGHT)
            await asyncio.sleep(_RAMP_S)
            for _ in range(rounds):
                for number in LISTENERS:
                    spent[number].append(await _window(server, consoles, number, seconds))
            tally = await flooding
    assert not tally.errors, tally.errors[0]
    return [*_medians(spent), *parts_alone(IN_FLIGHT, LISTENERS)]


def _body(number: int) -> bytes:
    prompt = [300 + (number * 7919 + index * 104_729) % 3000 for index in range(48)]
    max_tokens = _OUTPUT_TOKENS // 2 + number * 37 % _OUTPUT_TOKENS  # so that they do not end together
    fields = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    return orjson.dumps(fields | {"ignore_eos": True, "stream_options": {"include_usage": True}})


async def _window(server: Gateway, consoles: Executor, number: int, seconds: int) -> Record:
    """Measures one number of listeners."""
    loop = asyncio.get_running_loop()
    listening = loop.run_in_executor(consoles, listen, server.admin_port, number, seconds)
    await asyncio.sleep(_OPENED_S)
    cpu_s, began = server.cpu_s(), monotonic()
    await asyncio.sleep(seconds)
    share = (server.cpu_s() - cpu_s) / (monotonic() - began)
    return {"cpu_share": share, "bytes_per_s": await listening / seconds / max(1, number)}


def listen(port: int, number: int, seconds: float) -> int:
    """Reads the feed so many times at once, for so long, once it has begun. Returns how many bytes came meanwhile.

    Raises CannotRun where one of them gets another answer, or nothing in that time.
    """
    begun = monotonic() + _OPENED_S
    with ExitStack() as closing:
        listeners = [Listener(port, closing) for _ in range(number)]
        while (now := monotonic()) < begun + seconds:
            time.sleep(0.05)
            for listener in listeners:
                listener.read(counts=now >= begun)
    for listener in listeners:
        listener.check()
    return sum(listener.received for listener in listeners)


class Listener:
    """One reader of the feed. received: bytes of those that count."""

    def __init__(self, port: int, closing: ExitStack) -> None:
        self._connection = closing.enter_context(socket.create_connection(("127.0.0.1", port), _OPENED_S))
        self._connection.sendall(b"GET /console/feed HTTP/1.1\r\nHost: x\r\n\r\n")
        self._connection.setblocking(False)
        self._begin = b""
        self.received = 0

    def read(self, *, counts: bool) -> None:
        """Takes what has come."""
        with suppress(BlockingIOError):
            while part := self._connection.recv(1 << 18):
                self._begin += part[: max(0, _LONGEST_SHOWN - len(self._begin))]
                self.received += len(part) if counts else 0

    def check(self) -> None:
        """Raises CannotRun where it is no feed that came."""
        if not self._begin.startswith(b"HTTP/1.1 200 "):
            raise CannotRun(f"no feed: the gateway answers {self._begin!r}")
        if not self.received:
            raise CannotRun("a console's feed says nothing")


def _medians(spent: dict[int, list[Record]]) -> list[Record]:
    figures = {
        number: {name: statistics.median(float(each[name]) for each in rounds) for name in rounds[0]}
        for number, rounds in spent.items()
    }
    return [
        {
            "what": f"{number} consoles",
            "in_flight": IN_FLIGHT,
            **of_number,
            "more_than_none": of_number["cpu_share"] - figures[0]["cpu_share"],
        }
        for number, of_number in figures.items()
    ]
