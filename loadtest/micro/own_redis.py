"""A Redis server for one measurement."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from loadtest.processes import Process, free_ports, started, until_ready
from services.launcher.readiness import redis_answers
from services.prefix_index.embedded import server_command

_START_S = 30.0


@asynccontextmanager
async def own_redis() -> AsyncIterator[str]:
    """The URL of a server that answers; it ends with the block. Raises ProcessError."""
    (port,) = free_ports(1)
    url = f"redis://127.0.0.1:{port}"
    async with started(Process("redis", tuple(server_command(port)))) as server:
        await until_ready([partial(redis_answers(url), server.process.pid)], [server], _START_S)
        yield url
