"""The registry over a real Redis."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import orjson
import pytest
import structlog

from kvtransfer.ids import WorkerId
from services.gateway.dispatch import discovery
from services.gateway.dispatch.discovery import follow_registry
from services.prefix_index.publication import pack_id
from services.prefix_index.publisher import IndexPublisher
from services.prefix_index.reachability import Reachability
from services.prefix_index.redis_client import DEAD, LEASES, RECORDS, SWEEPER, UNREACHABLE, Client, connect
from services.prefix_index.registry import Registry, WorkerRecord
from tests.prefix_index.test_redis_index import chain_of, index_on
from tests.redis_server import RedisServer

ALICE, BOB = WorkerId(0xA11CE), WorkerId(0xB0B)


def record_of(worker_id: WorkerId) -> WorkerRecord:
    return WorkerRecord(f"10.0.0.1:{worker_id % 9000}", "decode", worker_id, "model", "print", 16, 1000)


async def begin(registry: Registry, id: bytes, worker_id: WorkerId) -> None:
    assert await registry.renew(id, record_of(worker_id), confirmed=False)


async def test_who_renews_is_listed_and_readable(server: RedisServer, client: Client):
    registry = Registry(client)
    assert await registry.workers() == []
    await begin(registry, pack_id(ALICE, 0), ALICE)
    assert await registry.renew(pack_id(ALICE, 0), record_of(ALICE), confirmed=True)
    await begin(registry, pack_id(BOB, 0), BOB)
    assert {record.worker_id for record in await registry.workers()} == {ALICE, BOB}
    shown = server.admin.hget(RECORDS, pack_id(ALICE, 0).hex())
    assert isinstance(shown, bytes)
    assert b'"role":"decode"' in shown


async def test_workers_of_other_models_are_refused_with_the_reason_and_logged_once(client: Client):
    registry, other = Registry(client), replace(record_of(BOB), model="another")
    await begin(registry, pack_id(ALICE, 0), ALICE)
    assert await registry.renew(pack_id(BOB, 0), other, confirmed=False)
    told = asyncio.Queue[tuple[set[str], Mapping[str, str]]]()

    def note(addresses: set[str], refused: Mapping[str, str]) -> None:
        told.put_nowait((addresses, refused))

    with structlog.testing.capture_logs() as logs:
        following = asyncio.create_task(follow_registry(registry, "model", note))
        try:
            for _ in range(2):
                addresses, refused = await asyncio.wait_for(told.get(), 60)
        finally:
            following.cancel()
    assert addresses == {record_of(ALICE).address}
    why = "it serves model another, this gateway model: their configuration or tokenizer differs"
    assert refused == {other.address: why}
    assert [(log["event"], log["address"], log["reason"]) for log in logs] == [("worker refused", other.address, why)]


async def test_who_follows_it_knows_whether_redis_answers(
    server: RedisServer, client: Client, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(discovery, "POLL_EVERY_S", 0.02)
    state = Reachability()
    following = asyncio.create_task(follow_registry(Registry(client), "model", lambda *_: None, state))
    try:
        async with asyncio.timeout(60):
            while state.since is None:
                await asyncio.sleep(0.01)
            assert state.why is None
            server.kill()
            while state.why is None:
                await asyncio.sleep(0.01)
            down = state.since
            server.start()
            while state.why is not None:
                await asyncio.sleep(0.01)
            assert down < state.since
    finally:
        following.cancel()


async def test_that_an_id_was_forgotten_is_said_until_the_worker_takes_another(server: RedisServer, client: Client):
    """An answer may get lost: a renewal that waited in a frozen server's socket is answered to nobody."""
    registry, id = Registry(client), pack_id(ALICE, 0)
    await begin(registry, id, ALICE)
    server.admin.flushall()
    for _ in range(2):
        assert not await registry.renew(id, record_of(ALICE), confirmed=True)
        assert await registry.workers() == []
    assert server.admin.smembers(DEAD) == {id.hex().encode()}
    assert await registry.renew(pack_id(ALICE, 1), record_of(ALICE), confirmed=False, retired=[id])
    assert await registry.workers() == [record_of(ALICE)]


async def test_who_leaves_is_dead_at_once(server: RedisServer, client: Client):
    registry, id = Registry(client), pack_id(ALICE, 0)
    await begin(registry, id, ALICE)
    await registry.leave([id])
    assert await registry.workers() == []
    assert server.admin.smembers(DEAD) == {id.hex().encode()}


async def test_a_lease_that_runs_out_ends_with_a_sweep(server: RedisServer, client: Client):
    registry, chain = Registry(client), chain_of(700)
    alice, bob = IndexPublisher(client, ALICE), IndexPublisher(client, BOB)
    await begin(registry, alice.id, ALICE)
    await begin(registry, bob.id, BOB)
    for publisher, length in ((alice, 700), (bob, 300)):
        publisher.change(chain[0], chain[:length], [])
        await publisher.flush()
    server.admin.zadd(LEASES, {alice.id.hex(): 0})
    assert await registry.workers() == [record_of(BOB)]
    assert await registry.sweep() == 0  # nobody noticed so far
    assert await registry.renew(bob.id, record_of(BOB), confirmed=True)
    assert await registry.sweep() == 1
    assert await index_on(client).depths(chain) == {BOB: 300}
    # a worker that was frozen learns that it has to begin anew
    assert not await registry.renew(alice.id, record_of(ALICE), confirmed=True)


async def test_a_new_id_makes_the_one_before_dead(server: RedisServer, client: Client):
    registry = Registry(client)
    await begin(registry, pack_id(ALICE, 0), ALICE)
    await registry.renew(pack_id(ALICE, 1), record_of(ALICE), confirmed=False, retired=[pack_id(ALICE, 0)])
    assert len(await registry.workers()) == 1
    assert server.admin.smembers(DEAD) == {pack_id(ALICE, 0).hex().encode()}
    assert server.admin.zcard(LEASES) == 1


async def test_one_sweeps_at_a_time(server: RedisServer, client: Client):
    registry = Registry(client)
    await client.redis.sadd(DEAD, pack_id(ALICE, 0).hex())
    await client.redis.set(SWEEPER, "")
    assert await registry.sweep() == 0
    await client.redis.delete(SWEEPER)
    assert await registry.sweep() == 1
    assert server.admin.dbsize() == 0


async def test_a_record_that_nobody_can_read_hides_no_other(server: RedisServer, client: Client):
    registry = Registry(client)
    await begin(registry, pack_id(ALICE, 0), ALICE)
    await begin(registry, pack_id(BOB, 0), BOB)
    newer = orjson.dumps({**orjson.loads(record_of(BOB).to_json()), "of a newer version": 1})
    server.admin.hset(RECORDS, mapping={pack_id(ALICE, 0).hex(): "{}", pack_id(BOB, 0).hex(): newer})
    assert await registry.workers() == [record_of(BOB)]


async def test_of_records_that_nobody_can_read_those_of_the_last_answer_are_remembered(
    server: RedisServer, client: Client
):
    registry = Registry(client)
    await begin(registry, id := pack_id(ALICE, 0), ALICE)
    with structlog.testing.capture_logs() as logs:
        for number in range(10):
            server.admin.hset(RECORDS, id.hex(), b"rubbish %d" % number)
            for _ in range(2):
                assert await registry.workers() == []
    assert len([line for line in logs if "not readable" in line["event"]]) == 10  # each once
    assert registry._unreadable == {b"rubbish 9"}


async def test_no_server_is_an_error_after_a_bounded_wait(server: RedisServer):
    hasty = connect(server.url, timeout_s=0.2)
    server.freeze()
    with pytest.raises(UNREACHABLE):
        await Registry(hasty).workers()
    await hasty.aclose()


async def test_a_dead_publication_s_name_that_is_none_is_skipped_and_counted(server: RedisServer, client: Client):
    """It ends no sweep, is said once, and is not there for the next sweep."""
    registry, chain = Registry(client), chain_of(10)
    alice = IndexPublisher(client, ALICE)
    alice.change(chain[0], chain, [])
    await alice.flush()
    await begin(registry, alice.id, ALICE)
    await registry.leave([alice.id])
    server.admin.sadd(DEAD, b"no hex", b"\xff\xfe", b"abcd", alice.id.hex() + "00")
    server.admin.set("baton:index:{0123456789abcdef}", "no tree")
    with structlog.testing.capture_logs() as logs:
        assert await registry.sweep() == 5
    assert await index_on(client).depths(chain) == {}
    assert server.admin.smembers(DEAD) == set()
    assert registry.malformed.count == 5
    assert len([line for line in logs if line["log_level"] == "warning"]) == 1


@pytest.mark.parametrize("wrong", [{"num_blocks": "1000"}, {"address": None}, {"role": 7}, {"block_size": 1.5}])
async def test_a_record_with_a_field_of_another_type_is_left_out(
    server: RedisServer, client: Client, wrong: dict[str, object]
):
    registry = Registry(client)
    await begin(registry, pack_id(ALICE, 0), ALICE)
    await begin(registry, pack_id(BOB, 0), BOB)
    damaged = orjson.loads(record_of(BOB).to_json()) | wrong
    server.admin.hset(RECORDS, pack_id(BOB, 0).hex(), orjson.dumps(damaged))
    assert await registry.workers() == [record_of(ALICE)]


@pytest.mark.parametrize("key", [RECORDS, LEASES, DEAD])
async def test_what_is_of_another_type_hides_no_worker(server: RedisServer, client: Client, key: str):
    """It is not Baton's, and is replaced."""
    registry, id = Registry(client), pack_id(ALICE, 0)
    await begin(registry, id, ALICE)
    server.admin.delete(key)
    server.admin.set(key, "text")
    await begin(registry, pack_id(ALICE, 1), ALICE)
    await registry.leave([id])
    assert await registry.workers() == [record_of(ALICE)]
    assert server.admin.smembers(DEAD) == {id.hex().encode()}
