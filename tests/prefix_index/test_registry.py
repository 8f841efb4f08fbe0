"""The registry over a real Redis."""

import asyncio

import pytest

from services.prefix_index import registry as registry_module
from services.prefix_index.publication import pack_id
from services.prefix_index.publisher import IndexPublisher
from services.prefix_index.redis_client import DEAD, LEASES, RECORDS, SWEEPER, UNREACHABLE, Client, connect
from services.prefix_index.registry import Registry, WorkerRecord
from tests.prefix_index.test_redis_index import chain_of, index_on
from tests.redis_server import RedisServer

ALICE, BOB = 0xA11CE, 0xB0B


def record_of(incarnation: int) -> WorkerRecord:
    return WorkerRecord(f"10.0.0.1:{incarnation % 9000}", "decode", f"{incarnation:016x}", "fingerprint", 16, 1000)


async def test_who_renews_is_listed_and_readable(server: RedisServer, client: Client):
    registry = Registry(client)
    assert await registry.workers() == []
    assert not await registry.renew(pack_id(ALICE, 0), record_of(ALICE))
    assert await registry.renew(pack_id(ALICE, 0), record_of(ALICE))
    assert not await registry.renew(pack_id(BOB, 0), record_of(BOB))
    assert {record.incarnation for record in await registry.workers()} == {f"{ALICE:016x}", f"{BOB:016x}"}
    shown = server.admin.hget(RECORDS, pack_id(ALICE, 0).hex())
    assert isinstance(shown, bytes)
    assert b'"role":"decode"' in shown


async def test_a_lease_that_runs_out_ends_with_a_sweep(
    server: RedisServer, client: Client, monkeypatch: pytest.MonkeyPatch
):
    registry, chain = Registry(client), chain_of(700)
    alice, bob = IndexPublisher(client, ALICE), IndexPublisher(client, BOB)
    monkeypatch.setattr(registry_module, "LEASE_S", 0.2)
    await registry.renew(alice.id, record_of(ALICE))
    monkeypatch.setattr(registry_module, "LEASE_S", 60.0)
    for publisher, length in ((alice, 700), (bob, 300)):
        publisher.change(chain[0], chain[:length], [])
        await publisher.flush()
    await asyncio.sleep(0.3)
    assert await registry.workers() == []
    assert await registry.sweep() == 0  # nobody noticed so far
    await registry.renew(bob.id, record_of(BOB))
    assert await registry.sweep() == 1
    assert await index_on(client).depths(chain) == {BOB: 300}
    assert not await registry.renew(
        alice.id, record_of(ALICE)
    )  # a worker that was frozen learns that it has to begin anew


async def test_a_new_id_makes_the_one_before_dead(server: RedisServer, client: Client):
    registry = Registry(client)
    await registry.renew(pack_id(ALICE, 0), record_of(ALICE))
    await registry.renew(pack_id(ALICE, 1), record_of(ALICE), retired=[pack_id(ALICE, 0)])
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
    await registry.renew(pack_id(ALICE, 0), record_of(ALICE))
    await registry.renew(pack_id(BOB, 0), record_of(BOB))
    server.admin.hset(RECORDS, pack_id(ALICE, 0).hex(), "{}")
    assert await registry.workers() == [record_of(BOB)]


async def test_no_server_is_an_error_after_a_bounded_wait(server: RedisServer):
    hasty = connect(server.url, timeout_s=0.2)
    server.freeze()
    with pytest.raises(UNREACHABLE):
        await Registry(hasty).workers()
    await hasty.aclose()
