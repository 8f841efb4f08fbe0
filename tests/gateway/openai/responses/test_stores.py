"""One suite over every implementation of ResponseStore; and what is each one's own."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from services.gateway.openai.responses.redis_store import RedisResponseStore
from services.gateway.openai.responses.store import (
    MAX_KEPT_BYTES,
    MemoryResponseStore,
    Renewal,
    ResponseStore,
    StoreUnavailable,
)
from services.prefix_index.breaker import CircuitBreaker
from services.prefix_index.redis_client import connect
from tests.machine import FAKETIME, needs
from tests.redis_server import FakeClock, RedisServer, running_redis

LIFETIME_S, LEASE_S = 0.5, 0.4
Happens = Callable[[RedisServer], Coroutine[Any, Any, float]]  # returns a moment before which all was not well
UNENDED, LATER, ENDED = b"{}\n[]\nunended", b"{ }\n[]\nunended", b"{}\n[]\n[]"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@asynccontextmanager
async def a_store(kind: str, server: RedisServer, lifetime_s: float, lease_s: float) -> AsyncIterator[ResponseStore]:
    if kind == "memory":
        yield MemoryResponseStore(lifetime_s, time.monotonic, lease_s=lease_s)
        return
    server.admin.flushall()
    client = connect(server.url, timeout_s=60)
    yield RedisResponseStore(client, CircuitBreaker(time.monotonic), lifetime_s, lease_s=lease_s)
    await client.aclose()


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, server: RedisServer) -> AsyncIterator[ResponseStore]:
    """A store in which nothing ends by itself within a test."""
    async with a_store(request.param, server, 600, 600) as made:
        yield made


@pytest.fixture(params=["memory", "redis"])
async def brief_store(request: pytest.FixtureRequest, server: RedisServer) -> AsyncIterator[ResponseStore]:
    """A store with a short lifetime, and short leases."""
    async with a_store(request.param, server, LIFETIME_S, LEASE_S) as made:
        yield made


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


async def test_a_response_lives_as_long_as_it_may(brief_store: ResponseStore):
    began = time.monotonic()
    await brief_store.put("a", "resp_1", b"x")
    while await brief_store.get("a", "resp_1") is not None:
        assert time.monotonic() - began < 60
        time.sleep(0.02)
    assert time.monotonic() - began >= LIFETIME_S - 0.01


async def test_a_response_that_is_too_large_is_not_kept(store: ResponseStore):
    assert not await store.put("a", "resp_1", bytes(MAX_KEPT_BYTES + 1))
    assert await store.get("a", "resp_1") is None
    assert await store.put("a", "resp_1", bytes(MAX_KEPT_BYTES))


async def test_a_lease_is_its_response_s_alone_and_tells_its_gateway_of_the_end_once(store: ResponseStore):
    assert not (await store.renew("a", "resp_1")).end_wanted
    await store.ask_for_end("a", "resp_2")
    await store.ask_for_end("b", "resp_1")
    assert not (await store.renew("a", "resp_1")).end_wanted
    for _ in range(2):
        await store.ask_for_end("a", "resp_1")
    assert not await store.claim("a", "resp_1")
    assert (await store.renew("a", "resp_1")).end_wanted
    assert not (await store.renew("a", "resp_1")).end_wanted


async def test_nobody_is_asked_for_the_end_of_what_nobody_generates(store: ResponseStore):
    await store.ask_for_end("a", "resp_1")
    assert not (await store.renew("a", "resp_1")).end_wanted


async def test_a_renewal_says_that_nothing_is_kept_under_the_id(store: ResponseStore):
    assert (await store.renew("a", "resp_1")).lost
    await store.put("a", "resp_1", UNENDED)
    assert not (await store.renew("a", "resp_1")).lost


async def test_a_lease_that_is_not_renewed_runs_out(brief_store: ResponseStore):
    began = time.monotonic()
    await brief_store.renew("a", "resp_1")
    await until_claimed(brief_store, "resp_1")
    assert time.monotonic() - began >= LEASE_S - 0.01
    began = time.monotonic()
    await brief_store.renew("a", "resp_2")
    assert not await brief_store.claim("a", "resp_2") or time.monotonic() - began >= LEASE_S


async def until_claimed(store: ResponseStore, response_id: str) -> None:
    async with asyncio.timeout(60):
        while not await store.claim("a", response_id):
            await asyncio.sleep(0.02)


async def test_an_end_is_final_and_what_is_not_there_is_kept_where_that_is_wanted(store: ResponseStore):
    assert await store.update("a", "resp_1", UNENDED, anew=False) is None
    assert await store.get("a", "resp_1") is None
    for packed in (UNENDED, LATER, ENDED):
        assert await store.update("a", "resp_1", packed, anew=True) == packed
        assert await store.get("a", "resp_1") == packed
    for packed in (UNENDED, b"{ }\n[]\n[]"):
        assert await store.update("a", "resp_1", packed, anew=True) == ENDED
        assert await store.get("a", "resp_1") == ENDED


@pytest.mark.parametrize("brief_store", ["redis"], indirect=True)
async def test_a_lease_that_is_over_is_nobody_s_any_more(brief_store: ResponseStore):
    await brief_store.renew("a", "resp_1")
    await until_claimed(brief_store, "resp_1")
    await brief_store.ask_for_end("a", "resp_1")
    assert await brief_store.renew("a", "resp_1") == Renewal(over=True, lost=True)
    assert await brief_store.claim("a", "resp_1")


async def empty(server: RedisServer) -> float:
    mended = time.monotonic()
    server.admin.flushall()
    return mended


async def fill(server: RedisServer) -> float:
    server.admin.config_set("maxmemory-policy", "noeviction")
    server.admin.config_set("maxmemory", 1)
    await asyncio.sleep(1.5 * LEASE_S)
    mended = time.monotonic()
    server.admin.config_set("maxmemory", 0)
    return mended


async def make_read_only(server: RedisServer) -> float:
    server.admin.config_set("min-replicas-to-write", 1)
    await asyncio.sleep(1.5 * LEASE_S)
    mended = time.monotonic()
    server.admin.config_set("min-replicas-to-write", 0)
    return mended


async def freeze(server: RedisServer) -> float:
    server.freeze()
    await asyncio.sleep(1.5 * LEASE_S)
    mended = time.monotonic()
    server.thaw()
    return mended


async def restart(server: RedisServer) -> float:
    server.kill()
    mended = time.monotonic()
    server.start()
    return mended


@pytest.mark.parametrize("happens", [empty, fill, make_read_only, freeze, restart])
async def test_no_owner_is_dead_that_could_not_renew_its_lease(server: RedisServer, happens: Happens):
    """Another gateway watches, and asks all the time, until a whole lease's time was good."""
    server.admin.flushall()
    client = connect(server.url, timeout_s=0.2)
    owner, judge = (RedisResponseStore(client, CircuitBreaker(time.monotonic), 60, lease_s=LEASE_S) for _ in range(2))
    following = asyncio.create_task(judge.follow())
    await owner.renew("a", "resp_1")
    fault = asyncio.create_task(happens(server))
    while not fault.done():
        assert await claimed(judge) is False
        await asyncio.sleep(0.02)
    good_since = await fault
    while not await claimed(judge):
        await asyncio.sleep(0.02)
    assert time.monotonic() - good_since >= LEASE_S
    following.cancel()
    await client.aclose()


async def claimed(store: ResponseStore) -> bool:
    try:
        return await store.claim("a", "resp_1")
    except StoreUnavailable:
        return False


async def test_what_is_not_there_is_not_said_to_be_gone_while_redis_may_have_lost_it(server: RedisServer):
    server.admin.flushall()
    client = connect(server.url, timeout_s=60)
    now = [0.0]
    store = RedisResponseStore(client, CircuitBreaker(time.monotonic), 60, lambda: now[0], lease_s=60)
    assert await store.get("a", "resp_1") is None
    server.admin.flushall()
    for now[0] in (0.0, 59.0):
        with pytest.raises(StoreUnavailable):
            await store.get("a", "resp_1")
    now[0] = 60.0
    assert await store.get("a", "resp_1") is None
    await client.aclose()


async def test_what_is_not_there_is_gone_where_redis_was_only_away(server: RedisServer):
    server.admin.flushall()
    client = connect(server.url, timeout_s=0.2)
    store = RedisResponseStore(client, CircuitBreaker(time.monotonic), 60, lease_s=LEASE_S)
    assert await store.get("a", "resp_1") is None
    await freeze(server)
    while True:
        with suppress(StoreUnavailable):
            assert await store.get("a", "resp_1") is None
            break
        await asyncio.sleep(0.01)
    assert await store.get("a", "resp_1") is None
    await client.aclose()


@pytest.mark.parametrize("full", [fill, make_read_only])
async def test_a_redis_that_takes_nothing_is_read(server: RedisServer, full: Happens):
    client = connect(server.url, timeout_s=5)
    store = RedisResponseStore(client, CircuitBreaker(time.monotonic), 60)
    assert await store.put("a", "resp_1", b"x")
    fault = asyncio.create_task(full(server))
    await asyncio.sleep(0)
    while not fault.done():
        put = await store.put("a", "resp_2", b"x")
        assert not put or fault.done()
        assert await store.get("a", "resp_1") == b"x"
    await fault
    assert await store.put("a", "resp_2", b"x")
    await client.aclose()


@needs(FAKETIME)
@pytest.mark.parametrize("step_s", [-3600, -5, 5, 3600])
async def test_a_step_of_redis_clock_makes_no_owner_dead_and_none_live_longer(tmp_path: Path, step_s: float):
    clock, lease_s = FakeClock(tmp_path / "clock"), 4.0
    now = [0.0]
    with running_redis(tmp_path, clock=clock) as server:
        client = connect(server.url, timeout_s=60)
        owner, judge = (
            RedisResponseStore(client, CircuitBreaker(time.monotonic), 60, lambda: now[0], lease_s) for _ in range(2)
        )
        assert await judge.get("a", "resp_1") is None  # it begins to watch
        now[0] = lease_s
        await owner.renew("a", "resp_1")
        clock.step(step_s)
        assert not await judge.claim("a", "resp_1")
        if step_s > 0:
            await owner.renew("a", "resp_1")
        assert server.admin.pttl("baton:response-lease:a:resp_1") <= lease_s * 1e3
        for _ in range(4):  # the judge watches on, and the owner is dead
            clock.step(0.3 * lease_s)
            now[0] += 0.3 * lease_s
            with suppress(StoreUnavailable):
                await judge.get("a", "resp_2")
            gone = await judge.claim("a", "resp_1")
        assert gone
        await client.aclose()


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
        with pytest.raises(StoreUnavailable):
            await store.renew("a", "resp_1")
        server.start()
        for _ in range(10):  # left alone for a while by requests, though it is back
            assert not await store.put("a", "resp_2", b"x")
            with pytest.raises(StoreUnavailable):
                await store.get("a", "resp_1")
            with pytest.raises(StoreUnavailable):
                await store.delete("a", "resp_1")
        await client.aclose()
