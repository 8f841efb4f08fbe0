"""CPU that the console's feed costs a gateway with 1,000 requests in flight: with no, one or three listeners.

The gateway is the one that `baton gateway` runs, behind it workers whose model costs nothing, before it a client with
1,000 streams, of which some 30 end and begin each second. Shares are of one core, which is all that a gateway's event
loop has. Two parts are measured alone: the row of a request that ends, and the note of a prefix that was found cached.
"""

import asyncio
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from time import monotonic

import numpy as np
import orjson

from loadtest.compare.servers import MODEL_NAME
from loadtest.micro import gateway_servers
from loadtest.micro.flood import flood
from loadtest.micro.gateway_servers import Gateway
from loadtest.tables import Record
from services.config import HandoffMode, WorkerRole
from services.gateway.api.records.attempt_record import AttemptRecord, Ended
from services.gateway.api.records.request_record import RequestRecord
from services.gateway.api.records.request_rows import RequestRows
from services.gateway.dispatch.prefix_hits import PrefixHits
from services.launcher import random_model
from services.protocol.block_hash import block_hashes, root_hash

LISTENERS = (0, 1, 3)
_IN_FLIGHT = 1000
_STEP_MS, _OUTPUT_TOKENS = 250.0, 128  # so a request takes half a minute
_RAMP_S = 12.0  # until all requests are in flight and those of the first moment have spread
_OPENED_S = 2.0  # a listener has what there was before
_ALONE = 2000  # of work that is measured without a gateway, in one run
_RUNS = 20


async def measure(rounds: int, seconds: int) -> list[Record]:
    """Measures rounds of all numbers of listeners in turn, and returns medians; then the parts alone."""
    model = random_model.made()
    spent: dict[int, list[Record]] = {number: [] for number in LISTENERS}
    total_s = _RAMP_S + rounds * len(LISTENERS) * (seconds + _OPENED_S)
    waves = 1 + round(total_s / (_OUTPUT_TOKENS * _STEP_MS / 1e3))
    starting = gateway_servers.baton(model, HandoffMode.NEVER, _STEP_MS, max_num_seqs=_IN_FLIGHT + 1)
    context = multiprocessing.get_context("spawn")
    async with starting as server:
        with ProcessPoolExecutor(1, context) as client, ProcessPoolExecutor(1, context) as consoles:
            loop = asyncio.get_running_loop()
            bodies = [_body(number) for number in range(waves * _IN_FLIGHT)]
            flooding = loop.run_in_executor(client, flood, server.port, "/v1/completions", bodies, _IN_FLIGHT)
            await asyncio.sleep(_RAMP_S)
            for _ in range(rounds):
                for number in LISTENERS:
                    spent[number].append(await _window(server, consoles, number, seconds))
            tally = await flooding
    assert not tally.errors, tally.errors[0]
    return [*_medians(spent), *_alone()]


def _body(number: int) -> bytes:
    prompt = [300 + (number * 7919 + index * 104_729) % 3000 for index in range(48)]
    fields = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": _OUTPUT_TOKENS, "temperature": 0, "stream": True}
    return orjson.dumps(fields | {"ignore_eos": True, "stream_options": {"include_usage": True}})


async def _window(server: Gateway, consoles: Executor, number: int, seconds: int) -> Record:
    """Measures one number of listeners."""
    loop = asyncio.get_running_loop()
    listening = loop.run_in_executor(consoles, listen, server.admin_port, number, seconds + _OPENED_S)
    await asyncio.sleep(_OPENED_S)
    cpu_s, began = server.cpu_s(), monotonic()
    await asyncio.sleep(seconds)
    share = (server.cpu_s() - cpu_s) / (monotonic() - began)
    return {"cpu_share": share, "bytes_per_s": await listening / (seconds + _OPENED_S) / max(1, number)}


def listen(port: int, number: int, seconds: float) -> int:
    """Reads the feed so many times at once, for so long. Returns how many bytes came."""
    until, received = monotonic() + seconds, 0
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(number)]
    for connection in connections:
        connection.sendall(b"GET /console/feed HTTP/1.1\r\nHost: x\r\n\r\n")
        connection.setblocking(False)
    while monotonic() < until:
        time.sleep(0.05)
        for connection in connections:
            received += _read(connection)
    for connection in connections:
        connection.close()
    return received


def _read(connection: socket.socket) -> int:
    received = 0
    try:
        while part := connection.recv(1 << 18):
            received += len(part)
    except BlockingIOError:
        pass
    return received


def _medians(spent: dict[int, list[Record]]) -> list[Record]:
    figures = {
        number: {name: statistics.median(float(each[name]) for each in rounds) for name in rounds[0]}
        for number, rounds in spent.items()
    }
    return [
        {
            "what": f"{number} consoles",
            "in_flight": _IN_FLIGHT,
            **of_number,
            "more_than_none": of_number["cpu_share"] - figures[0]["cpu_share"],
        }
        for number, of_number in figures.items()
    ]


def _alone() -> list[Record]:
    records = [_ended_record() for _ in range(_ALONE)]
    chain = block_hashes(root_hash("micro"), np.arange(1024, dtype=np.int32), 16)

    def rows() -> None:
        kept = RequestRows()
        for record in records:
            kept.begin(record)
            kept.end(record, record.attempts.last, 2.0)

    def hits() -> None:
        noted = PrefixHits()
        for number in range(_ALONE):
            noted.note(chain[number % len(chain)], 1024, "127.0.0.1:9200")

    parts = {"a row of a request that ends": rows, "the note of a prefix": hits}
    return [{"what": name, "cpu_us": _fastest_us(part) / _ALONE} for name, part in parts.items()]


def _fastest_us(call: Callable[[], None]) -> float:
    took = []
    for _ in range(_RUNS):
        start = time.process_time()
        call()
        took.append(time.process_time() - start)
    return min(took) * 1e6


def _ended_record() -> RequestRecord:
    """Returns the record of a request that a pair has answered."""
    record = RequestRecord("f87981579573ce97a57d1844b0ded709", "chat.completions", generates=True, status=200)
    record.model, record.prompt_tokens, record.cached_tokens, record.generated_tokens = MODEL_NAME, 1200, 1024, 128
    record.finish_reason, record.first_token, record.ended = "length", record.arrived + 0.25, record.arrived + 1.5
    workers = {WorkerRole.PREFILL: "127.0.0.1:9100", WorkerRole.DECODE: "127.0.0.1:9200"}
    attempt = AttemptRecord(1, [0], 1200, workers, WorkerRole.PREFILL, {}, record.arrived)
    attempt.first_token = record.first_token
    attempt.ends.append(Ended(0, "finished", 128, record.arrived + 1.5))
    record.attempts.add(attempt)
    return record
