"""One suite over every implementation of ResponseStore; and what is each one's own."""

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.gateway.openai.responses import redis_store
from services.gateway.openai.responses import store as memory_store
from services.gateway.openai.responses.redis_store import RedisResponseStore
from services.gateway.openai.responses.store import MAX_KEPT_BYTES, MemoryResponseStore, ResponseStore, StoreUnavailable
from services.prefix_index.breaker import CircuitBreaker
from services.prefix_index.redis_client import connect
from tests.redis_server import RedisServer, running_redis

LIFETIME_S = 0.5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, server: RedisServer) -> AsyncIterator[ResponseStore]:
    """A store with a short lifetime."""
    if request.param == "memory":
        yield MemoryResponseStore(LIFETIME_S, time.monotonic)
        return
    server.admin.flushall()
    client = connect(server.url, timeout_s=60)
    yield RedisResponseStore(client, CircuitBreaker(time.monotonic), LIFETIME_S)
    await client.aclose()


async def test_what_is_put_is_there_for_its_tenant_alone(store: ResponseStore):
    assert await store.put("a", "resp_1", b"x\n\xff")
    assert await store.get("a", "resp_1") == b"x\n\xff"
    assert await store.get("b", "resp_1") is None
    assert await store.get("a", "resp_2") is None


async def test_the_newer_of_two_with_one_id_is_there(store: ResponseStore):
    await store.put("a", "resp_1", b"x")
    await store.put("a", "resp_1", b"y")
    assert await store.get("a", "resp_1") == b"y"


async def test_what_is_deleted_is_gone(store: ResponseStore):
    await store.put("a", "resp_1", b"x")
    assert not await store.delete("b", "resp_1")
    assert await store.delete("a", "resp_1")
    assert await store.get("a", "resp_1") is None
    assert not await store.delete("a", "resp_1")


async def test_a_response_lives_as_long_as_it_may(store: ResponseStore):
    began = time.monotonic()
    await store.put("a", "resp_1", b"x")
    while await store.get("a", "resp_1") is not None:
        assert time.monotonic() - began < 60
        time.sleep(0.02)
    assert time.monotonic() - began >= LIFETIME_S - 0.01


async def test_a_response_that_is_too_large_is_not_kept(store: ResponseStore):
    assert not await store.put("a", "resp_1", bytes(MAX_KEPT_BYTES + 1))
    assert await store.get("a", "resp_1") is None
    assert await store.put("a", "resp_1", bytes(MAX_KEPT_BYTES))


async def test_a_lease_is_its_response_s_alone_and_tells_its_gateway_of_the_end_once(store: ResponseStore):
    assert not await store.leased("a", "resp_1")
    assert not await store.renew("a", "resp_1")
    assert await store.leased("a", "resp_1")
    assert not await store.leased("a", "resp_2")
    assert not await store.leased("b", "resp_1")
    await store.ask_for_end("a", "resp_1")
    assert await store.leased("a", "resp_1")
    assert await store.renew("a", "resp_1")
    assert not await store.renew("a", "resp_1")


async def test_nobody_is_asked_for_the_end_of_what_nobody_generates(store: ResponseStore):
    await store.ask_for_end("a", "resp_1")
    assert not await store.leased("a", "resp_1")
    assert not await store.renew("a", "resp_1")


@pytest.mark.parametrize("store", ["memory", "redis"], indirect=True)
async def test_a_lease_that_is_not_renewed_runs_out(store: ResponseStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_store, "LEASE_S", 0.2)
    monkeypatch.setattr(redis_store, "_LEASE_MS", 200)
    began = time.monotonic()
    await store.renew("a", "resp_1")
    while await store.leased("a", "resp_1"):
        assert time.monotonic() - began < 60
        time.sleep(0.02)
    assert time.monotonic() - began >= 0.19
    await store.renew("a", "resp_2")
    assert await store.leased("a", "resp_2")


async def test_memory_that_is_full_loses_the_oldest():
    store = MemoryResponseStore(60, time.monotonic, max_bytes=10)
    for number in range(4):
        assert await store.put("a", str(number), b"1234")
    assert [await store.get("a", str(number)) for number in range(4)] == [None, None, b"1234", b"1234"]
    await store.put("a", "2", b"12")  # in place of the one before, which counts no more
    await store.put("a", "4", b"1234")
    assert [await store.get("a", str(number)) for number in range(2, 5)] == [b"12", b"1234", b"1234"]


async def test_redis_that_is_gone_keeps_nothing_and_says_so(tmp_path: Path):
    with running_redis(tmp_path) as server:
        client = connect(server.url, timeout_s=5)
        store = RedisResponseStore(client, CircuitBreaker(lambda: 0.0), 60)
        assert await store.put("a", "resp_1", b"x")
        server.kill()
        assert not await store.put("a", "resp_2", b"x")
        began = time.monotonic()
        for _ in range(10):  # left alone for a while, at no cost
            assert not await store.put("a", "resp_2", b"x")
            with pytest.raises(StoreUnavailable):
                await store.get("a", "resp_1")
            with pytest.raises(StoreUnavailable):
                await store.delete("a", "resp_1")
            with pytest.raises(StoreUnavailable):
                await store.renew("a", "resp_1")
        assert time.monotonic() - began < 1
        await client.aclose()
