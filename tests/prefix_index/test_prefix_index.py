"""One suite over every implementation of PrefixIndex."""

import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.ids import WorkerId
from services.prefix_index.breaker import CircuitBreaker
from services.prefix_index.memory import MemoryPrefixIndex
from services.prefix_index.publisher import IndexPublisher
from services.prefix_index.redis_client import DEAD, connect
from services.prefix_index.redis_index import RedisPrefixIndex
from services.prefix_index.registry import Registry
from services.protocol.block_hash import BlockHash, block_hashes, root_hash
from services.protocol.messages import BlockEvents
from tests.redis_server import running_cluster, running_redis

ALICE, BOB = WorkerId(11), WorkerId(22)
TREE: dict[BlockHash, BlockHash] = {}  # the first block above each


class MemoryHarness:
    """The index of one gateway, fed by the streams of the workers."""

    def __init__(self) -> None:
        self._index = MemoryPrefixIndex()

    async def apply(self, worker: WorkerId, events: BlockEvents) -> None:
        self._index.apply(worker, events)

    async def remove_worker(self, worker: WorkerId) -> None:
        self._index.remove_worker(worker)

    async def depths(self, chain: list[BlockHash]) -> dict[WorkerId, int]:
        return await self._index.depths(chain)

    async def close(self) -> None: ...


class RedisHarness:
    """Workers that publish to Redis, and a gateway that looks up there."""

    def __init__(self, url: str) -> None:
        self._client = connect(url, timeout_s=30)
        self._index = RedisPrefixIndex(self._client, CircuitBreaker(time.monotonic))
        self._registry = Registry(self._client)
        self._publishers: dict[WorkerId, IndexPublisher] = {}

    async def apply(self, worker: WorkerId, events: BlockEvents) -> None:
        if events.snapshot:
            await self.remove_worker(worker)
        publisher = self._publishers.setdefault(worker, IndexPublisher(self._client, worker))
        for hash in events.evicted:
            publisher.change(TREE[hash], [], [hash])
        for hash in events.added:
            publisher.change(TREE[hash], [hash], [])
        await publisher.flush()

    async def remove_worker(self, worker: WorkerId) -> None:
        publisher = self._publishers.pop(worker, None)
        if publisher is not None:
            await self._client.redis.sadd(DEAD, publisher.id.hex())
            assert await self._registry.sweep() == 1

    async def depths(self, chain: list[BlockHash]) -> dict[WorkerId, int]:
        return await self._index.depths(chain)

    async def close(self) -> None:
        await self._client.aclose()


Harness = MemoryHarness | RedisHarness


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(scope="module")
def cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as server:
        yield server.url.replace("redis://", "redis+cluster://")


@pytest.fixture(params=["memory", "redis", "cluster"])
async def index(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    """An empty index."""
    if request.param == "memory":
        yield MemoryHarness()
        return
    made = RedisHarness(request.getfixturevalue(f"{request.param}_url"))
    await made._client.redis.flushall()
    yield made
    await made.close()


def chain_of(length: int, first_token: int = 0) -> list[BlockHash]:
    chain = block_hashes(root_hash("model"), np.arange(first_token, first_token + 4 * length, dtype=np.int32), 4)
    TREE.update(dict.fromkeys(chain, chain[0]) if chain else {})
    return chain


def snapshot(hashes: list[BlockHash]) -> BlockEvents:
    return BlockEvents(0, True, hashes, [])


def change(added: list[BlockHash], evicted: list[BlockHash]) -> BlockEvents:
    return BlockEvents(1, False, added, evicted)


async def test_an_empty_index_knows_nobody(index: Harness):
    assert await index.depths(chain_of(3)) == {}
    assert await index.depths([]) == {}


@pytest.mark.parametrize("held", range(1, 20))
async def test_depth_is_the_length_of_the_held_prefix(index: Harness, held: int):
    chain = chain_of(19)
    await index.apply(ALICE, snapshot(chain[:held]))
    assert await index.depths(chain) == {ALICE: held}


async def test_a_longer_cached_chain_than_the_prompt_counts_only_as_far_as_the_prompt(index: Harness):
    await index.apply(ALICE, snapshot(chain_of(9)))
    assert await index.depths(chain_of(4)) == {ALICE: 4}


async def test_another_prompt_is_no_hit(index: Harness):
    await index.apply(ALICE, snapshot(chain_of(9)))
    assert await index.depths(chain_of(9, first_token=1)) == {}


async def test_each_worker_has_its_own_depth(index: Harness):
    chain = chain_of(8)
    await index.apply(ALICE, snapshot(chain[:2]))
    await index.apply(BOB, snapshot(chain[:7]))
    assert await index.depths(chain) == {ALICE: 2, BOB: 7}


async def test_added_and_evicted_blocks_change_the_depth(index: Harness):
    chain = chain_of(8)
    await index.apply(ALICE, snapshot(chain[:4]))
    await index.apply(ALICE, change(chain[4:], []))
    assert await index.depths(chain) == {ALICE: 8}
    await index.apply(ALICE, change([], chain[5:]))
    assert await index.depths(chain) == {ALICE: 5}


async def test_a_block_evicted_and_computed_again_within_one_message_is_held(index: Harness):
    chain = chain_of(2)
    await index.apply(ALICE, snapshot(chain))
    await index.apply(ALICE, change([chain[1]], [chain[1]]))
    assert await index.depths(chain) == {ALICE: 2}


async def test_a_snapshot_replaces_what_was_known(index: Harness):
    chain = chain_of(8)
    await index.apply(ALICE, snapshot(chain))
    await index.apply(ALICE, snapshot(chain[:1]))
    assert await index.depths(chain) == {ALICE: 1}


async def test_a_dropped_worker_is_gone_and_the_others_stay(index: Harness):
    chain = chain_of(3)
    await index.apply(ALICE, snapshot(chain))
    await index.apply(BOB, snapshot(chain))
    await index.remove_worker(ALICE)
    await index.remove_worker(ALICE)
    assert await index.depths(chain) == {BOB: 3}


@settings(deadline=None)
@given(st.integers(0, 70), st.integers(0, 70))
async def test_depth_is_exact_for_any_lengths(length: int, held: int):
    chain = chain_of(70)
    index = MemoryPrefixIndex()
    index.apply(ALICE, snapshot(chain[:held]))
    expected = min(length, held)
    assert await index.depths(chain[:length]) == ({ALICE: expected} if expected else {})


def test_a_block_of_a_worker_costs_at_most_200_bytes():
    """Measured with the hashes' own memory, where the table is fullest and where it has just grown."""
    index = MemoryPrefixIndex()
    raw = np.random.default_rng(0).bytes(16 * 50_000)
    tracemalloc.start()
    try:
        for start in range(0, 50_000, 1_000):
            added = [BlockHash(raw[16 * at : 16 * at + 16]) for at in range(start, start + 1_000)]
            index.apply(ALICE, change(added, []))
            if start >= 10_000:
                del added
                assert tracemalloc.get_traced_memory()[0] / (start + 1_000) < 200
    finally:
        tracemalloc.stop()
