"""Publisher and index over a real Redis: every fault costs hits, and none of them for long."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.ids import WorkerId
from services.prefix_index import publisher as publisher_module
from services.prefix_index.breaker import CircuitBreaker
from services.prefix_index.memory import MemoryPrefixIndex
from services.prefix_index.publisher import IndexPublisher
from services.prefix_index.redis_client import DEAD, UNREACHABLE, Client, connect, tree_key
from services.prefix_index.redis_index import RedisPrefixIndex
from services.prefix_index.registry import Registry
from services.protocol.block_hash import BlockHash, block_hashes, root_hash
from services.protocol.messages import BlockEvents
from tests.prefix_index.conftest import PATIENCE_S
from tests.redis_server import RedisServer, running_cluster

ALICE = WorkerId(0xA11CE)


def chain_of(length: int, seed: int = 0) -> list[BlockHash]:
    return block_hashes(root_hash("model"), np.arange(seed, seed + length, dtype=np.int32), 1)


def index_on(client: Client) -> RedisPrefixIndex:
    return RedisPrefixIndex(client, CircuitBreaker(time.monotonic))


async def test_a_lookup_is_one_round_trip_and_few_reads(server: RedisServer, client: Client):
    chain, index = chain_of(1000), index_on(client)
    publishers = [IndexPublisher(client, WorkerId(worker)) for worker in range(1, 65)]
    for worker, publisher in enumerate(publishers, 1):
        publisher.change(chain[0], chain[: 15 * worker], [])
        await publisher.flush()
    await index.depths(chain)  # loads the script
    calls, reads = server.num_calls("evalsha"), server.num_calls("hget")
    assert await index.depths(chain) == {worker: 15 * worker for worker in range(1, 65)}
    assert server.num_calls("evalsha") == calls + 1
    assert server.num_calls("hget") - reads < 64 * 10


async def test_lookups_of_one_moment_are_one_message(server: RedisServer, client: Client):
    chains = [chain_of(5, seed=seed) for seed in (0, 100, 200, 300)]
    index, publisher = index_on(client), IndexPublisher(client, ALICE)
    for length, chain in enumerate(chains[:3], 1):
        publisher.change(chain[0], chain[:length], [])
    await publisher.flush()
    await index.depths(chains[0])  # connects, loads the script
    reads = int(server.admin.info("stats")["total_reads_processed"])
    found = await asyncio.gather(*(index.depths(chain) for chain in chains))
    assert found == [{ALICE: 1}, {ALICE: 2}, {ALICE: 3}, {}]
    assert int(server.admin.info("stats")["total_reads_processed"]) - reads == 2  # with the question itself


async def test_a_lookup_that_is_given_up_leaves_the_others_their_answers(server: RedisServer, client: Client):
    chain, index, publisher = chain_of(5), index_on(client), IndexPublisher(client, ALICE)
    publisher.change(chain[0], chain, [])
    await publisher.flush()
    failed, kept = (asyncio.create_task(index.depths(chain)) for _ in range(2))
    await asyncio.sleep(0)
    failed.cancel()
    assert await kept == {ALICE: 5}


def hash_of(prefix: tuple[int, ...]) -> BlockHash:
    return block_hashes(root_hash("random"), np.array(prefix, np.int32), 1)[-1]


# Prompts over a tiny alphabet share prefixes of all lengths.
prefixes = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
# Who caches a prompt, or loses all that begins with it; and whether that is published at once.
histories = st.lists(st.tuples(st.integers(1, 3), st.booleans(), prefixes, st.booleans()), max_size=20)


@settings(max_examples=50, deadline=None)
@given(history=histories, prompts=st.lists(prefixes, min_size=1, max_size=5))
def test_random_trees_are_found_as_the_memory_index_finds_them(
    running: RedisServer,
    history: list[tuple[int, bool, tuple[int, ...], bool]],
    prompts: list[tuple[int, ...]],
):
    async def run() -> None:
        running.admin.flushall()
        client = connect(running.url, timeout_s=PATIENCE_S)
        index, memory = index_on(client), MemoryPrefixIndex()
        publishers = {worker: IndexPublisher(client, WorkerId(worker)) for worker in (1, 2, 3)}
        held: dict[int, set[tuple[int, ...]]] = {worker: set() for worker in publishers}
        for worker, caches, prefix, flush in history:
            if caches:
                changed = {prefix[:length] for length in range(1, len(prefix) + 1)} - held[worker]
                held[worker] |= changed
            else:
                changed = {each for each in held[worker] if each[: len(prefix)] == prefix}
                held[worker] -= changed
            hashes = [hash_of(each) for each in changed]
            added, evicted = (hashes, []) if caches else ([], hashes)
            publishers[worker].change(hash_of(prefix[:1]), added, evicted)
            memory.apply(WorkerId(worker), BlockEvents(1, False, added, evicted))
            if flush:
                await publishers[worker].flush()
        for publisher in publishers.values():
            await publisher.flush()
        for prompt in prompts:
            chain = [hash_of(prompt[:length]) for length in range(1, len(prompt) + 1)]
            assert await index.depths(chain) == await memory.depths(chain)
        await client.aclose()

    asyncio.run(run())


async def test_a_server_that_was_emptied_is_filled_again_tree_by_tree(server: RedisServer, client: Client):
    first, second = chain_of(20), chain_of(20, seed=100)
    publisher, index = IndexPublisher(client, ALICE), index_on(client)
    publisher.change(first[0], first[:10], [])
    publisher.change(second[0], second[:10], [])
    await publisher.flush()
    server.admin.flushall()
    publisher.change(first[0], first[10:], [])
    await publisher.flush()
    assert await index.depths(first) == {ALICE: 20}
    assert await index.depths(second) == {}  # until its next change, or the next heartbeat


async def test_a_server_that_lost_a_part_gets_everything_anew_and_the_rest_is_swept(
    server: RedisServer, client: Client
):
    chain = chain_of(20)
    publisher, index = IndexPublisher(client, ALICE), index_on(client)
    publisher.change(chain[0], chain, [])
    await publisher.flush()
    old = publisher.id
    dump = server.admin.dump(tree_key(chain[0]))
    assert dump is not None
    publisher.change(chain[0], [], chain[15:])
    await publisher.flush()
    publisher.change(chain[0], [], chain[10:15])
    await publisher.flush()
    server.admin.restore(tree_key(chain[0]), 0, dump, replace=True)  # as a replica that lagged
    publisher.change(chain[0], [], chain[5:10])
    await publisher.flush()
    assert publisher.id != old
    assert await index.depths(chain) == {ALICE: 5}
    await client.redis.sadd(DEAD, old.hex())  # the registry does that at the next renewal
    assert await Registry(client).sweep() == 1
    assert server.admin.hlen(tree_key(chain[0])) == 5 + 1


async def test_nothing_is_left_of_a_tree_that_was_evicted(server: RedisServer, client: Client):
    chain = chain_of(600)
    publisher = IndexPublisher(client, ALICE)
    publisher.change(chain[0], chain, [])
    await publisher.flush()
    publisher.change(chain[0], [], reversed(chain))
    await publisher.flush()
    assert server.admin.dbsize() == 0
    publisher.change(chain[0], chain[:3], [])
    await publisher.flush()
    assert await index_on(client).depths(chain) == {ALICE: 3}


async def test_changes_while_the_server_is_gone_reach_it_when_it_is_back(server: RedisServer, client: Client):
    chain = chain_of(300)
    publisher, index = IndexPublisher(client, ALICE), index_on(client)
    running = asyncio.create_task(publisher.run())
    publisher.confirm(publisher.id)
    publisher.change(chain[0], chain[:100], [])
    while not publisher.idle:
        await asyncio.sleep(0.01)
    server.kill()
    publisher.change(chain[0], chain[100:], [])
    await asyncio.sleep(0.3)
    assert not publisher.idle
    publisher.change(chain[0], [], chain[200:])
    server.start()
    async with asyncio.timeout(PATIENCE_S):
        while await index.depths(chain) != {ALICE: 200}:
            await asyncio.sleep(0.05)
    running.cancel()


async def test_a_tree_that_fails_holds_up_no_other(server: RedisServer, client: Client):
    chains = [chain_of(5, seed=100 * number) for number in range(40)]
    publisher, index = IndexPublisher(client, ALICE), index_on(client)
    server.admin.set(tree_key(chains[3][0]), "not a tree")
    for chain in chains:
        publisher.change(chain[0], chain, [])
    for _ in range(40):  # the tree that fails comes with each of the others' batches
        with pytest.raises(UNREACHABLE):
            await publisher.flush()
    found = [await index.depths(chain) for chain in chains if chain is not chains[3]]
    assert found == [{ALICE: 5}] * 39
    server.admin.delete(tree_key(chains[3][0]))
    await publisher.flush()
    assert await index.depths(chains[3]) == {ALICE: 5}
    assert publisher.idle


async def test_a_server_without_the_scripts_is_given_them(server: RedisServer, client: Client):
    chain, other = chain_of(5), chain_of(5, seed=100)
    publisher, index = IndexPublisher(client, ALICE), index_on(client)
    publisher.change(chain[0], chain, [])
    await publisher.flush()
    server.admin.script_flush()
    publisher.change(chain[0], [], chain[4:])
    publisher.change(other[0], other, [])
    await publisher.flush()
    assert [await index.depths(each) for each in (chain, other)] == [{ALICE: 4}, {ALICE: 5}]


async def test_a_batch_may_come_twice(server: RedisServer, client: Client):
    """Its answer may get lost, and then nobody knows."""
    chain = chain_of(9)
    publisher, index = IndexPublisher(client, ALICE), index_on(client)
    publisher.change(chain[0], chain[:5], [])
    await publisher.flush()
    again = IndexPublisher(client, ALICE)
    again.change(chain[0], chain[:7], [])
    await again.flush()
    assert again.id == publisher.id
    assert await index.depths(chain) == {ALICE: 7}
    assert server.admin.hlen(tree_key(chain[0])) == 7 + 1


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_lookups_without_a_server_find_nobody_and_soon_cost_nothing(
    server: RedisServer, client: Client, fault: str
):
    chain = chain_of(9)
    publisher = IndexPublisher(client, ALICE)
    publisher.change(chain[0], chain, [])
    await publisher.flush()
    now = [0.0]
    breaker = CircuitBreaker(lambda: now[0])
    hasty = connect(server.url, timeout_s=0.2)
    index = RedisPrefixIndex(hasty, breaker)
    if fault == "killed":
        server.kill()
    else:
        server.freeze()
    assert await index.depths(chain) == {}
    assert breaker.broken
    for _ in range(1000):
        assert await index.depths(chain) == {}
    now[0] = 100.0
    if fault == "killed":
        server.start()
    else:
        server.thaw()
    expected = {} if fault == "killed" else {ALICE: 9}
    async with asyncio.timeout(PATIENCE_S):
        while await index.depths(chain) != expected or breaker.broken:
            now[0] += 100
    await hasty.aclose()


async def test_a_cancelled_lookup_ends(server: RedisServer):
    """The client library's own time limits lose a cancellation now and then."""
    chain, client = chain_of(9), connect(server.url, timeout_s=PATIENCE_S)
    index = index_on(client)

    async def look_up_for_ever() -> None:
        while True:
            await index.depths(chain)

    for _ in range(20):
        tasks = [asyncio.create_task(look_up_for_ever()) for _ in range(4)]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        _, running = await asyncio.wait(tasks, timeout=PATIENCE_S)
        assert not running
    await client.aclose()


async def test_a_full_server_is_an_error_that_publishing_outlives(server: RedisServer, client: Client):
    chain = chain_of(400)
    publisher, index = IndexPublisher(client, ALICE), index_on(client)
    publisher.change(chain[0], chain[:200], [])
    await publisher.flush()
    server.admin.config_set("maxmemory-policy", "noeviction")
    server.admin.config_set("maxmemory", 1)
    publisher.change(chain[0], chain[200:], [])
    with pytest.raises(UNREACHABLE):
        await publisher.flush()
    assert await index.depths(chain) == {ALICE: 200}
    server.admin.config_set("maxmemory", 0)
    await publisher.flush()
    assert await index.depths(chain) == {ALICE: 400}


async def test_a_block_of_a_worker_costs_at_most_200_bytes(server: RedisServer, client: Client):
    before = server.admin.info("memory")["used_memory"]
    publisher = IndexPublisher(client, ALICE)
    for tree in range(40):
        chain = chain_of(500, seed=1000 * tree)
        publisher.change(chain[0], chain, [])
    await publisher.flush()
    bytes_each = (server.admin.info("memory")["used_memory"] - before) / (40 * 500)
    print(f"{bytes_each:.0f} bytes for a block of a worker")
    assert bytes_each < 200


def test_the_breaker_lets_one_try_after_each_pause_and_pauses_longer():
    now = 0.0
    breaker = CircuitBreaker(lambda: now)
    began = breaker.let_through()
    pauses = []
    for _ in range(6):
        assert began is not None
        breaker.failed(began)
        paused_at = now
        while (began := breaker.let_through()) is None:
            now += 0.25
        pauses.append(now - paused_at)
        assert breaker.let_through() is None  # another caller, while the first waits
    assert pauses == [0.5, 1, 2, 4, 8, 8]
    breaker.succeeded()
    assert breaker.let_through() is not None


def test_calls_that_were_under_way_together_fail_as_one():
    now = 0.0
    breaker = CircuitBreaker(lambda: now)
    together = [breaker.let_through() for _ in range(5)]
    now = 0.2
    for began in together:
        assert began is not None
        breaker.failed(began)
    now = 0.75
    assert breaker.let_through() is not None


async def test_more_lookups_at_once_than_connections_are_no_failure(server: RedisServer):
    client = connect(server.url, timeout_s=PATIENCE_S)
    chain, index = chain_of(9), index_on(client)
    publisher = IndexPublisher(client, ALICE)
    publisher.change(chain[0], chain, [])
    await publisher.flush()
    found = await asyncio.gather(*(index.depths(chain) for _ in range(200)))
    assert found == [{ALICE: 9}] * 200
    assert len(server.admin.client_list()) < 30
    await client.aclose()


async def test_a_cluster_that_is_gone_costs_hits_only(tmp_path: Path):
    with running_cluster(tmp_path) as cluster:
        client = connect(cluster.url.replace("redis://", "redis+cluster://"), timeout_s=5)
        index, chain = index_on(client), chain_of(3)
        assert await index.depths(chain) == {}
        cluster.kill()
        assert await index.depths(chain) == {}
        with pytest.raises(UNREACHABLE):
            await Registry(client).workers()
        await client.aclose()
        fresh = connect(cluster.url.replace("redis://", "redis+cluster://"), timeout_s=5)
        with pytest.raises(UNREACHABLE):
            await Registry(fresh).workers()
        await fresh.aclose()


async def test_nothing_is_published_under_an_id_that_the_registry_does_not_know(server: RedisServer, client: Client):
    chain, publisher = chain_of(3), IndexPublisher(client, ALICE)
    running = asyncio.create_task(publisher.run())
    publisher.change(chain[0], chain, [])
    await asyncio.sleep(0.2)
    assert server.admin.dbsize() == 0
    publisher.confirm(publisher.id)
    async with asyncio.timeout(PATIENCE_S):
        while not publisher.idle:
            await asyncio.sleep(0.01)
    assert server.admin.dbsize() == 1
    old = publisher.id
    publisher.begin_anew()
    publisher.confirm(old)
    await asyncio.sleep(0.2)
    assert not publisher.idle
    running.cancel()
    await asyncio.wait([running])


async def test_beginning_anew_with_nothing_left_to_publish_rests(client: Client):
    chain, publisher = chain_of(3), IndexPublisher(client, ALICE)
    publisher.change(chain[0], [], chain)
    publisher.begin_anew()
    publisher.confirm(publisher.id)
    running = asyncio.create_task(publisher.run())
    async with asyncio.timeout(PATIENCE_S):
        while not publisher.idle:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)  # a loop that does not rest would not let this end
    assert not running.done(), "what interrupts a loop that does not rest ends its task"
    running.cancel()
    await asyncio.wait([running])


async def test_evictions_that_were_published_do_not_count_as_waiting(client: Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(publisher_module, "_MAX_WAITING_EVICTIONS", 10)
    publisher, kept = IndexPublisher(client, ALICE), chain_of(2, seed=10_000)
    for seed in range(0, 60, 6):
        chain = chain_of(6, seed=seed)
        publisher.change(chain[0], chain, [])
        publisher.change(chain[0], [], chain)
        publisher.change(kept[0], kept, [])  # never idle
        for _ in range(2):
            await publisher._publish_next()
    assert publisher.retired == ()


async def test_a_holder_of_a_wrong_length_is_skipped_and_counted(server: RedisServer, client: Client):
    """Whoever else holds the block is still found; that is said once."""
    chain, index, publisher = chain_of(3), index_on(client), IndexPublisher(client, ALICE)
    publisher.change(chain[0], chain, [])
    await publisher.flush()
    server.admin.hset(tree_key(chain[0]), chain[0], publisher.id + b"short")
    with structlog.testing.capture_logs() as logs:
        assert await index.depths(chain) == {ALICE: 3}
        assert await index.depths(chain) == {ALICE: 3}
    assert index.malformed.count == 2
    assert len(logs) == 1


async def test_a_tree_of_another_type_costs_its_own_hits_alone(server: RedisServer, client: Client):
    """Redis answers: it is asked on for all other prompts, alone and together."""
    chain, other, publisher = chain_of(3), chain_of(3, seed=50), IndexPublisher(client, ALICE)
    index = index_on(client)
    publisher.change(other[0], other, [])
    await publisher.flush()
    server.admin.set(tree_key(chain[0]), "no tree")
    assert await index.depths(chain) == {}
    assert await index.depths(other) == {ALICE: 3}
    both = await asyncio.gather(index.depths(chain), index.depths(other))
    assert list(both) == [{}, {ALICE: 3}]
    assert index.malformed.count == 2
