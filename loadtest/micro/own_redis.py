"""A Redis server for one measurement."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.launcher.ports import free_ports
from services.prefix_index.embedded import server_command
from services.prefix_index.redis_client import UNREACHABLE, connect


@asynccontextmanager
async def own_redis() -> AsyncIterator[str]:
    """URL of a server that answers; it ends with the block."""
    (port,) = free_ports("127.0.0.1", 1)
    url = f"redis://127.0.0.1:{port}"
    process = subprocess.Popen(server_command(port))
    try:
        while not await _answers(url):
            await asyncio.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait()


async def _answers(url: str) -> bool:
    client = connect(url, timeout_s=1)
    try:
        return bool(await client.redis.ping())
    except UNREACHABLE:
        return False
    finally:
        await client.aclose()
