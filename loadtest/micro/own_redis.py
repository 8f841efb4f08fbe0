"""A Redis server for one measurement."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from tempfile import TemporaryDirectory

from loadtest.processes import Process, started, until_ready
from services.launcher.readiness import redis_answers
from services.prefix_index.embedded import server_command

_START_S = 30.0


@asynccontextmanager
async def own_redis() -> AsyncIterator[str]:
    """The URL of a server that answers; it ends with the block. Raises ProcessError."""
    with TemporaryDirectory(prefix="baton-") as directory:
        socket = f"{directory}/redis.sock"
        url = f"unix://{socket}"
        async with started(Process("redis", tuple(server_command(socket)))) as server:
            await until_ready([partial(redis_answers(url), server.process.pid)], [server], _START_S)
            yield url
