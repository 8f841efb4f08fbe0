"""The prefix index in Redis, over loopback, with the clients that gateways and workers use."""

import time
from collections.abc import Callable

import numpy as np

from kvtransfer.ids import WorkerId
from loadtest.micro.own_redis import own_redis
from loadtest.tables import Record, spread
from services.prefix_index.breaker import CircuitBreaker
from services.prefix_index.publisher import IndexPublisher
from services.prefix_index.redis_client import Client, connect
from services.prefix_index.redis_index import RedisPrefixIndex
from services.protocol.block_hash import BlockHash, block_hashes, root_hash

_CHAIN, _WORKERS = 1024, 64
_LOOKUPS = 300
_SEQUENCES, _FILLED = 256, 12


async def measure(blocks: int) -> list[Record]:
    """Measures lookups and publishing on a Redis server of its own."""
    async with own_redis() as url:
        client = connect(url, timeout_s=30)
        try:
            lookups = [
                *await _lookups(client, "every worker as deep", lambda worker: _CHAIN),
                *await _lookups(client, "every worker another depth", lambda worker: 16 * worker),
                *await _lookups(client, "one worker", lambda worker: _CHAIN if worker == 1 else 0),
            ]
            return [*lookups, *await _publishing(client, blocks), *await _publishing_side_by_side(client)]
        finally:
            await client.aclose()


def _chain(length: int, seed: int) -> list[BlockHash]:
    return block_hashes(root_hash("micro"), np.arange(seed, seed + length, dtype=np.int32), 1)


async def _lookups(client: Client, name: str, depth: Callable[[int], int]) -> list[Record]:
    await client.redis.flushall()
    chain = _chain(_CHAIN, 0)
    for worker in range(1, _WORKERS + 1):
        publisher = IndexPublisher(client, WorkerId(worker))
        publisher.change(chain[0], chain[: depth(worker)], [])
        await publisher.flush()
    index = RedisPrefixIndex(client, CircuitBreaker(time.monotonic))
    times = []
    for _ in range(_LOOKUPS):
        start = time.perf_counter()
        await index.depths(chain)
        times.append((time.perf_counter() - start) * 1e3)
    what = f"lookup of {_CHAIN} hashes, {_WORKERS} workers, {name}"
    return [{"what": what, "unit": "ms", **spread(times, (0, 50, 99))}]


async def _publishing(client: Client, num_blocks: int) -> list[Record]:
    """Publishes conversations of 100 blocks of one worker: the case that shares least memory."""
    await client.redis.flushall()
    before = (await client.redis.info("memory"))["used_memory"]
    publisher = IndexPublisher(client, WorkerId(1))
    spent = 0.0
    for number in range(num_blocks // 100):
        chain = _chain(100, 1000 * number)
        publisher.change(chain[0], chain, [])
        start = time.perf_counter()
        await publisher.flush()
        spent += time.perf_counter() - start
    used = (await client.redis.info("memory"))["used_memory"] - before
    return [
        {"what": f"memory of {num_blocks} blocks in trees of 100", "unit": "bytes each", "p50": used / num_blocks},
        {"what": "publishing, 100 blocks a call", "unit": "us each", "p50": spent / num_blocks * 1e6},
    ]


async def _publishing_side_by_side(client: Client) -> list[Record]:
    """Publishes as decoding does: each sequence fills a block now and then, in a tree of its own."""
    await client.redis.flushall()
    publisher = IndexPublisher(client, WorkerId(1))
    chains = [_chain(_FILLED, 1000 * number) for number in range(_SEQUENCES)]
    times = []
    for block in range(_FILLED):
        for chain in chains:
            publisher.change(chain[0], [chain[block]], [])
        start = time.process_time()
        await publisher.flush()
        times.append((time.process_time() - start) / _SEQUENCES * 1e6)
    return [
        {
            "what": f"publishing, a block of each of {_SEQUENCES} trees",
            "unit": "us of CPU each",
            **spread(times, (0, 50)),
        }
    ]
