"""Whatever the Redis library raises, each user of Redis goes on, says so once, and works when Redis does again."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from structlog.testing import capture_logs

from kvtransfer.ids import WorkerId
from services.gateway.dispatch import discovery
from services.gateway.dispatch.discovery import follow_registry
from services.gateway.keys.redis_quotas import RedisQuotas
from services.prefix_index import breaker, publisher
from services.prefix_index.breaker import CircuitBreaker
from services.prefix_index.redis_client import connect
from services.prefix_index.redis_index import RedisPrefixIndex
from services.prefix_index.registry import Registry, WorkerRecord
from services.process import supervised
from services.worker import index_link
from services.worker.index_link import IndexLink
from tests.failures import FAILURES, NAMES, failing
from tests.gateway.keys.asks import ask
from tests.prefix_index.test_redis_index import chain_of
from tests.redis_server import RedisServer

ALICE = WorkerId(0xA11CE)
RECORD = WorkerRecord("127.0.0.1:1", "decode", ALICE, "model", "print", 16, 1000)
SEAMS = (
    "redis.asyncio.connection.BlockingConnectionPool.get_connection",
    "redis.asyncio.connection.AbstractConnection.send_packed_command",
    "redis.asyncio.connection.AbstractConnection.read_response",
)
OUTAGE = {
    "the registry does not take this worker's word; it will be told again",
    "prefix index takes nothing; publishing waits",
    "registry not reachable; no news of workers",
    "prefix index not reachable; routing by load and recent prompts",
    "limits of keys are counted by this gateway alone",
}


@dataclass
class Users:
    """All that speak to Redis: a worker's part, and a gateway's."""

    worker: IndexLink
    index: RedisPrefixIndex
    quotas: RedisQuotas
    addresses: set[str]
    running: list[asyncio.Task]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                assert not any(task.done() for task in self.running), self.running
                await asyncio.sleep(0.005)

    async def depth(self, length: int) -> int:
        found = await self.index.depths(chain_of(length))
        return found.get(ALICE, 0)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (index_link, "RENEW_EVERY_S"),
        (index_link, "_SWEEP_EVERY_S"),
        (discovery, "POLL_EVERY_S"),
        (publisher, "_FIRST_BACKOFF_S"),
        (publisher, "_LONGEST_BACKOFF_S"),
        (breaker, "_FIRST_PAUSE_S"),
        (breaker, "_LONGEST_PAUSE_S"),
        (supervised, "_FIRST_S"),
        (supervised, "_LONGEST_S"),
    ):
        monkeypatch.setattr(module, name, 0.01)


@asynccontextmanager
async def users(server: RedisServer) -> AsyncIterator[Users]:
    client, worker = connect(server.url, 5.0), IndexLink(server.url, ALICE, RECORD)
    index = RedisPrefixIndex(client, CircuitBreaker(time.monotonic))
    quotas, addresses = RedisQuotas(client, CircuitBreaker(time.monotonic)), set[str]()
    await worker.register()
    running = [
        asyncio.create_task(worker.run()),
        asyncio.create_task(follow_registry(Registry(client), "model", addresses.update)),
    ]
    try:
        made = Users(worker, index, quotas, addresses, running)
        await made.until(lambda: addresses == {RECORD.address})
        yield made
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await client.aclose()


@pytest.mark.parametrize("failure", FAILURES, ids=NAMES)
@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.rpartition(".")[2])
async def test_whatever_a_call_raises_redis_counts_as_away(server: RedisServer, seam: str, failure: Exception):
    async with users(server) as made:
        chain = chain_of(40)
        with capture_logs() as logs:
            with failing(seam, failure) as failed:
                made.worker.blocks_changed(dict.fromkeys(chain, chain[0]), {})
                while len(failed) < 20:
                    assert await made.depth(40) == 0
                    assert (await made.quotas.take(ask(1, requests_per_minute=100_000))).refusal is None
                    await made.quotas.beat()
                    await asyncio.sleep(0.002)
            made.addresses.clear()
            async with asyncio.timeout(60):
                while await made.depth(40) != len(chain):
                    await asyncio.sleep(0.01)
                while made.quotas.alone:
                    await made.quotas.beat()
                    await asyncio.sleep(0.01)
            await made.until(lambda: made.addresses == {RECORD.address})
        told = Counter(line["event"] for line in logs)
        assert {event: told[event] for event in OUTAGE if event in told} == dict.fromkeys(OUTAGE, 1), told
        assert told["a part failed; it is tried again"] == 0


@pytest.mark.parametrize("failure", FAILURES, ids=NAMES)
async def test_after_a_defect_of_the_publisher_all_is_published_anew(server: RedisServer, failure: Exception):
    """The worker's lease goes on, and so does the worker."""
    async with users(server) as made:
        chain = chain_of(40)
        with capture_logs() as logs:
            with failing("services.prefix_index.publisher.islice", failure) as failed:
                made.worker.blocks_changed(dict.fromkeys(chain, chain[0]), {})
                await made.until(lambda: len(failed) >= 3)
            async with asyncio.timeout(60):
                while await made.depth(40) != len(chain):
                    await asyncio.sleep(0.01)
        told = [line for line in logs if line["event"] == "a part failed; it is tried again"]
        is_foreseen = isinstance(failure, OSError)  # as of Redis
        assert [line["part"] for line in told] == ([] if is_foreseen else ["the publisher of cached blocks"])
