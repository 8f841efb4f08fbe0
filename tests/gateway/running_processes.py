"""The processes beside a gateway, without the gateway."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil

from services.gateway.side.processes import SideProcesses
from services.gateway.text.tokenizer import Tokenizer
from services.process.supervised import supervised


@asynccontextmanager
async def running_processes(tokenizer: Tokenizer) -> AsyncIterator[SideProcesses]:
    """Ends them with the context. A forker is started with the first job."""
    processes = SideProcesses(tokenizer.backend.to_str)
    running = asyncio.create_task(supervised("jobs", processes.run))
    try:
        yield processes
    finally:
        running.cancel()
        await asyncio.wait([running])


def jobs_of(processes: SideProcesses) -> list[psutil.Process]:
    """The processes of jobs, and those that wait for one."""
    assert processes.forker_pid is not None
    return psutil.Process(processes.forker_pid).children()


def busy_ones(processes: SideProcesses) -> list[psutil.Process]:
    """The processes that have a job: those have their limits."""
    found = []
    for each in jobs_of(processes):
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.rlimit(psutil.RLIMIT_AS)[0] != psutil.RLIM_INFINITY:
                found.append(each)
    return found
