"""Redis fails under load (rows 26 to 30 of the fault list): no request does, and the index recovers by itself.

Everything but the model is real: workers with their threads and streams, a gateway's dispatcher, a Redis server.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from kvtransfer.transports.memory import MemoryFabric
from services.config import HandoffMode, WorkerRole
from services.gateway.api.generation import GenerationRequest
from services.gateway.dispatch.discovery import follow_registry
from services.gateway.dispatch.dispatcher import Dispatcher
from services.gateway.dispatch.router import Policy
from services.prefix_index import registry
from services.prefix_index.breaker import CircuitBreaker
from services.prefix_index.redis_client import DEAD, LEASES, Client, connect, tree_key
from services.prefix_index.redis_index import RedisPrefixIndex
from services.prefix_index.registry import Registry
from services.protocol.block_hash import BlockHash, block_hashes, root_hash
from services.protocol.capsule import Capsule
from services.protocol.sampling import SamplingParams
from services.worker import index_link
from tests.engine.harness import reference
from tests.gateway.dispatch_stack import Counts, eventually, read_all
from tests.redis_server import RedisServer, running_redis
from tests.worker.conftest import BLOCK_SIZE, make_worker, serving, worker_baseline

ROLES = [WorkerRole.PREFILL, WorkerRole.PREFILL, WorkerRole.DECODE]
PREFIXES = [list(range(at, at + 8 * BLOCK_SIZE)) for at in (100, 200, 300)]
DURING_THE_FAULT = list(range(400, 400 + 8 * BLOCK_SIZE))
NUM_CLIENTS = 4
NUM_TOKENS = 4


class Stack:
    """Workers, a gateway without HTTP, and the Redis between them."""

    def __init__(self, server: RedisServer, dispatcher: Dispatcher, counts: Counts, redis: Client) -> None:
        self.server = server
        self.dispatcher = dispatcher
        self.counts = counts
        self.completed = 0
        self.registry = Registry(redis)
        self._index = RedisPrefixIndex(redis, CircuitBreaker(time.monotonic))
        self._numbers = count()
        self._clients: list[asyncio.Task[None]] = []

    async def ask(self, prefix: list[int]) -> None:
        """One request over a prefix, with its own end; its tokens must be right."""
        prompt = [*prefix, *divmod(next(self._numbers), 900)]
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
        capsule = Capsule(np.array(prompt, np.int32), len(prompt), sampling)
        async with self.dispatcher.generate(GenerationRequest("r", (capsule,), 300.0)) as generation:
            tokens, _ = await read_all(generation)
        assert tokens == reference(prompt, NUM_TOKENS)
        self.completed += 1

    @asynccontextmanager
    async def loaded(self) -> AsyncIterator[None]:
        """Clients that ask all the time; none of them may meet an error."""
        self._clients = [asyncio.create_task(self._client()) for _ in range(NUM_CLIENTS)]
        try:
            yield
        finally:
            for client in self._clients:
                client.cancel()
            ends = await asyncio.gather(*self._clients, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends

    async def _client(self) -> None:
        for number in count():
            await self.ask(PREFIXES[number % len(PREFIXES)])

    async def more_completed(self, number: int) -> None:
        """Returns when so many further requests are complete, or a client has met an error."""
        wanted = self.completed + number
        await eventually(lambda: self.completed >= wanted or any(client.done() for client in self._clients))

    async def recovery_s(self, prefixes: list[list[int]] = PREFIXES) -> float:
        """Waits until Redis knows each prefix whole at some worker; returns how long that took."""
        began = time.monotonic()
        async with asyncio.timeout(120):
            for chain in map(chain_of, prefixes):
                while len(chain) not in (await self._index.depths(chain)).values():
                    await asyncio.sleep(0.02)
        return time.monotonic() - began


def chain_of(tokens: list[int]) -> list[BlockHash]:
    return block_hashes(root_hash("simulated"), np.array(tokens, np.int32), BLOCK_SIZE)


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[Stack]:
    with running_redis(directory) as server:
        fabric = MemoryFabric()
        workers = [make_worker(role, fabric, redis_url=server.url) for role in ROLES]
        counts, redis = Counts(), connect(server.url, timeout_s=0.25)
        index = RedisPrefixIndex(redis, CircuitBreaker(time.monotonic))
        dispatcher = Dispatcher((), Policy(HandoffMode.ALWAYS, 0), 1000, index, counts)
        async with serving(*workers):
            tasks = [
                asyncio.create_task(dispatcher.run()),
                asyncio.create_task(follow_registry(Registry(redis), "", dispatcher.set_addresses)),
            ]
            try:
                await eventually(lambda: dispatcher.ready() and len(counts.loads) == len(ROLES))
                yield Stack(server, dispatcher, counts, redis)
                for worker in workers:
                    await worker_baseline(worker)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
        await redis.aclose()


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with running(tmp_path) as made:
        yield made


def _fill(server: RedisServer) -> None:
    server.admin.config_set("maxmemory-policy", "noeviction")
    server.admin.config_set("maxmemory", 1)


FAULTS: dict[str, tuple[Callable[[RedisServer], object], Callable[[RedisServer], object]]] = {
    "killed": (RedisServer.kill, RedisServer.start),
    "frozen": (RedisServer.freeze, RedisServer.thaw),
    "emptied": (lambda server: server.admin.flushall(), lambda server: None),
    "full": (_fill, lambda server: server.admin.config_set("maxmemory", 0)),
    "read-only": (
        lambda server: server.admin.replicaof("127.0.0.1", "1"),
        lambda server: server.admin.replicaof("NO", "ONE"),
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("fault", FAULTS)
async def test_no_request_fails_and_the_index_comes_back(stack: Stack, fault: str):
    break_it, mend_it = FAULTS[fault]
    async with stack.loaded():
        await stack.recovery_s()
        break_it(stack.server)
        began = time.monotonic()
        await stack.ask(DURING_THE_FAULT)
        await stack.more_completed(4 * NUM_CLIENTS)
        meanwhile = time.monotonic() - began
        mend_it(stack.server)
        recovery = await stack.recovery_s([*PREFIXES, DURING_THE_FAULT])
        await stack.more_completed(NUM_CLIENTS)
    print(f"redis {fault}: 16 requests in {meanwhile:.2f} s, the index was whole again after {recovery:.2f} s")
    assert stack.dispatcher.describe()["rows"] == []


async def test_workers_that_rest_publish_again_when_the_server_lost_everything(stack: Stack):
    await stack.ask(PREFIXES[0])
    await stack.recovery_s(PREFIXES[:1])
    stack.server.admin.flushall()
    print(f"redis emptied, nothing to do: whole again after {await stack.recovery_s(PREFIXES[:1]):.2f} s")


async def test_workers_outlive_a_freeze_that_outlasts_their_leases(stack: Stack, monkeypatch: pytest.MonkeyPatch):
    """Renewals that were sent meanwhile are carried out late, and their answers go to nobody."""
    for prefix in PREFIXES:
        await stack.ask(prefix)
    await stack.recovery_s()
    monkeypatch.setattr(registry, "LEASE_S", 0.5)
    monkeypatch.setattr(index_link, "RENEW_EVERY_S", 0.2)
    async with asyncio.timeout(120):
        while longest_lease_s(stack) > 0.5:  # until all renewals are short ones
            await asyncio.sleep(0.02)
    stack.server.freeze()
    await asyncio.sleep(1.0)
    monkeypatch.setattr(registry, "LEASE_S", 60.0)
    stack.server.thaw()
    async with asyncio.timeout(120):
        while stack.server.admin.zcard(LEASES) != len(ROLES) or stack.server.admin.smembers(DEAD) & _leased(stack):
            await asyncio.sleep(0.05)
    await stack.registry.sweep()  # takes nothing that is held
    await stack.recovery_s()


def longest_lease_s(stack: Stack) -> float:
    """How long the lease of the registry lasts that lasts longest."""
    seconds, micros = stack.server.admin.time()
    leases = cast("list[tuple[bytes, float]]", stack.server.admin.zrange(LEASES, 0, -1, withscores=True))
    return max(ends for _, ends in leases) / 1e3 - (seconds + micros / 1e6)


def _leased(stack: Stack) -> set[bytes]:
    return {id for id in stack.server.admin.zrange(LEASES, 0, -1) if isinstance(id, bytes)}


async def test_workers_that_stop_leave_the_registry(tmp_path: Path):
    with running_redis(tmp_path) as server:
        worker = make_worker(WorkerRole.DECODE, MemoryFabric(), redis_url=server.url)
        async with serving(worker):
            assert server.admin.zcard(LEASES) == 1
        assert server.admin.zcard(LEASES) == 0
        assert len(server.admin.smembers(DEAD)) == 1


async def test_a_worker_starts_and_stops_without_redis(tmp_path: Path):
    with running_redis(tmp_path) as server:
        server.kill()
        worker = make_worker(WorkerRole.DECODE, MemoryFabric(), redis_url=server.url)
        async with serving(worker):
            server.start()
            await eventually(lambda: server.admin.zcard(LEASES) == 1)
            server.freeze()


async def test_a_wrong_entry_costs_a_miss_and_no_token(stack: Stack):
    await stack.ask(PREFIXES[0])
    await stack.recovery_s(PREFIXES[:1])
    truth, lie = chain_of(PREFIXES[0]), chain_of(PREFIXES[1])
    holders = stack.server.admin.hget(tree_key(truth[0]), truth[0])
    for hash in lie:
        stack.server.admin.hset(tree_key(lie[0]), hash, holders)
    await stack.ask(PREFIXES[1])
    assert stack.counts.cached[-1] == (8 * BLOCK_SIZE, 0)
    await stack.ask(PREFIXES[1])
    assert stack.counts.cached[-1] == (8 * BLOCK_SIZE, 8 * BLOCK_SIZE)


async def test_requests_over_one_prefix_go_where_it_is_cached(stack: Stack):
    await stack.ask(PREFIXES[0])
    await stack.recovery_s(PREFIXES[:1])
    for _ in range(4):
        await stack.ask(PREFIXES[0])
    assert stack.counts.cached[1:] == [(8 * BLOCK_SIZE, 8 * BLOCK_SIZE)] * 4
