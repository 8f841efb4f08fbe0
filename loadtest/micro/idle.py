"""CPU and wake-ups of Baton's processes while nobody asks them for anything.

`baton up` runs with one pair; before the measurement, one request goes through both workers, and a pause follows.
"""

import asyncio
import time
from pathlib import Path

import orjson
import psutil

from loadtest import http_stream
from loadtest.compare.baton import Baton
from loadtest.compare.servers import MODEL_NAME, running
from loadtest.tables import Record
from services.launcher import random_model

_KINDS = ("gateway", "prefill", "decode", "up")
_REST_S = 3.0
_REQUEST = {"model": MODEL_NAME, "prompt": [7] * 100, "max_tokens": 20, "ignore_eos": True}


async def measure(seconds: int, model: Path | None) -> list[Record]:
    """Returns a record for each process: percent of one core, and how often it woke up."""
    async with running(Baton(model or random_model.made(), "always")) as launch:
        (await http_stream.ask(launch.address, "/v1/completions", orjson.dumps(_REQUEST))).body()
        await asyncio.sleep(_REST_S)
        processes = psutil.Process().children(recursive=True)
        before, start = {process: _used(process) for process in processes}, time.monotonic()
        await asyncio.sleep(seconds)
        after, took = {process: _used(process) for process in processes}, time.monotonic() - start
        return [
            {
                "process": _kind(process),
                "core_percent": (after[process][0] - before[process][0]) / took * 100,
                "wakeups_per_s": (after[process][1] - before[process][1]) / took,
            }
            for process in processes
        ]


def _used(process: psutil.Process) -> tuple[float, int]:
    """Returns the process's CPU seconds, and how often one of its threads went to sleep."""
    times = process.cpu_times()
    return times.user + times.system, _num_sleeps(process)


def _num_sleeps(process: psutil.Process) -> int:
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    lines = (line for thread in threads for line in (thread / "status").read_text().splitlines())
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def _kind(process: psutil.Process) -> str:
    words = process.cmdline()
    return next((kind for kind in _KINDS if kind in words), process.name())
