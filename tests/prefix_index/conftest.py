"""One real Redis for each test file, empty for each test."""

from collections.abc import AsyncIterator, Iterator

import pytest

from services.prefix_index.redis_client import Client, connect
from tests.redis_server import RedisServer, running_redis

PATIENCE_S = 120  # for a server that answers, on a machine that may stand still for half a minute


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(running: RedisServer) -> RedisServer:
    """Whatever the test before did to it: it serves, and is empty."""
    running.thaw()
    if running.process.poll() is not None:
        running.start()
    running.admin.config_set("maxmemory", 0)
    running.admin.flushall()
    return running


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[Client]:
    made = connect(server.url, timeout_s=PATIENCE_S)
    yield made
    await made.aclose()
