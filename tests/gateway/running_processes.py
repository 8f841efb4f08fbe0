"""The processes beside a gateway, without the gateway."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.gateway.side.processes import SideProcesses
from services.gateway.text.tokenizer import Tokenizer


@asynccontextmanager
async def running_processes(tokenizer: Tokenizer) -> AsyncIterator[SideProcesses]:
    """Ends them with the context. A forker is started with the first job."""
    processes = SideProcesses(tokenizer.backend.to_str)
    running = asyncio.create_task(processes.run())
    try:
        yield processes
    finally:
        running.cancel()
        await asyncio.wait([running])
