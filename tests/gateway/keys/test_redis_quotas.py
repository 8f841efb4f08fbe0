"""Limits of keys in Redis: beside one process, of several gateways, and while the server is gone or frozen."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.api.generation import Refusal
from services.gateway.keys.key_entry import RateLimits
from services.gateway.keys.local_quotas import LocalQuotas
from services.gateway.keys.quota import Ask, QuotaStore, Taken
from services.gateway.keys.rates import remaining
from services.gateway.keys.redis_quotas import GATEWAY_LEASE_S, LEASE_S, RedisQuotas
from services.prefix_index.breaker import CircuitBreaker
from services.prefix_index.redis_client import connect
from tests.gateway.keys.asks import ask, num_taken
from tests.redis_server import RedisServer, age_packed, running_redis


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@asynccontextmanager
async def gateways(server: RedisServer, number: int, timeout_s: float = 60) -> AsyncIterator[list[RedisQuotas]]:
    """What several gateways have, over an empty Redis, once all of them know of each other."""
    server.admin.flushall()
    clients = [connect(server.url, timeout_s) for _ in range(number)]
    found = [RedisQuotas(client, CircuitBreaker(asyncio.get_running_loop().time)) for client in clients]
    for gateway in [*found, *found]:
        await gateway.beat()
    yield found
    for client in clients:
        await client.aclose()


async def until_it_answers(gateway: RedisQuotas) -> None:
    """Waits until the gateway has asked Redis again."""
    async with asyncio.timeout(60):
        while gateway.alone:
            await asyncio.sleep(0.05)
            await gateway.beat()


async def until(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


ASKED = st.lists(st.one_of(st.integers(1, 6), st.none()), min_size=1, max_size=12)  # tokens; None: the oldest ends


@settings(max_examples=40, deadline=None)
@given(ASKED, st.integers(0, 9), st.integers(0, 9), st.integers(0, 4))
async def test_redis_and_one_process_count_alike(
    server: RedisServer, steps: list[int | None], requests: int, tokens: int, running: int
):
    limits = {"requests_per_minute": requests, "tokens_per_minute": tokens, "max_concurrent": running}
    limits = {name: limit for name, limit in limits.items() if limit}
    async with gateways(server, 1) as (together,):
        await assert_alike(together, LocalQuotas(), steps, limits)


async def assert_alike(one: QuotaStore, other: QuotaStore, steps: list[int | None], limits: dict[str, int]) -> None:
    stores = (one, other)
    live: list[tuple[Ask, list[Taken]]] = []
    for number, step in enumerate(steps):
        if step is None and live:
            ended, taken = live.pop(0)
            for store, each in zip(stores, taken, strict=True):
                await (store.undo if number % 2 else store.settle)(ended, each, 1)
        elif step is not None:
            wanted = ask(number, step, **limits)
            in_redis, here = [await store.take(wanted) for store in stores]
            assert in_redis.refusal == here.refusal
            assert in_redis.requests_s == pytest.approx(here.requests_s, abs=2)
            assert in_redis.tokens_s == pytest.approx(here.tokens_s, abs=2)
            assert in_redis.wait_s == pytest.approx(here.wait_s, abs=2)
            if here.refusal is None:
                live.append((wanted, [in_redis, here]))


async def test_gateways_share_a_limit_to_the_request(server: RedisServer):
    async with gateways(server, 3) as three:
        answers = await asyncio.gather(*(three[n % 3].take(ask(n, requests_per_minute=10)) for n in range(30)))
    assert [each.refusal for each in answers].count(None) == 10


async def test_while_redis_is_gone_each_gateway_has_its_part_also_of_keys_that_it_never_saw(server: RedisServer):
    async with gateways(server, 3) as three:
        server.kill()
        try:
            assert [await num_taken(gateway, 0, requests_per_minute=10) for gateway in three] == [3, 3, 3]
            assert all(gateway.alone for gateway in three)
        finally:
            server.start()


async def test_a_gateway_that_counts_alone_goes_on_from_where_redis_was(server: RedisServer):
    async with gateways(server, 2) as (one, other):
        assert await num_taken(one, 0, requests_per_minute=10) == 10
        running = [ask(n, key=1, max_concurrent=4) for n in (100, 101)]
        for each in running:
            assert (await one.take(each)).refusal is None
        server.kill()
        try:
            assert await num_taken(one, 20, requests_per_minute=10) == 0
            assert await num_taken(one, 200, 1, max_concurrent=4) == 0  # two run, which are its part
            await one.settle(running[0], Taken(), 0)
            assert await num_taken(one, 201, 1, max_concurrent=4) == 1
            assert await num_taken(other, 30, requests_per_minute=10) == 5
        finally:
            server.start()


async def test_gateways_share_again_once_redis_is_back(server: RedisServer):
    """Though no request comes."""
    async with gateways(server, 2) as two:
        server.kill()
        try:
            assert [await num_taken(gateway, 9 * n, requests_per_minute=10) for n, gateway in enumerate(two)] == [5, 5]
        finally:
            server.start()
        for gateway in two:
            await until_it_answers(gateway)
        assert [await num_taken(gateway, 50 * n, requests_per_minute=10) for n, gateway in enumerate(two, 1)] == [10, 0]


async def test_two_short_times_without_redis_grant_no_more_than_one(server: RedisServer):
    """No time passes on the gateway's clock."""
    server.admin.flushall()
    client = connect(server.url, 0.5)
    gateway = RedisQuotas(client, CircuitBreaker(asyncio.get_running_loop().time), lambda: 0.0)
    await gateway.beat()
    granted = []
    for number in range(2):
        server.freeze()
        try:
            granted.append(await num_taken(gateway, 100 * number, requests_per_minute=10))
        finally:
            server.thaw()
        await until_it_answers(gateway)
    await client.aclose()
    assert granted == [10, 0]


async def test_rubbish_at_a_key_of_redis_closes_no_limit_and_is_replaced(server: RedisServer):
    async with gateways(server, 1) as (one,):
        for rubbish in (b"\x93\x01", b"\xc0", b"text"):
            server.admin.flushall()
            server.admin.set("baton:limits:{key-0}:running", rubbish)
            server.admin.set("baton:limits:{key-0}:requests", rubbish)
            server.admin.lpush("baton:limits:{key-0}:tokens", rubbish)
            server.admin.set("baton:limits:gateways", rubbish)
            limits = {"requests_per_minute": 10, "tokens_per_minute": 3, "max_concurrent": 9}
            assert await num_taken(one, 0, **limits) == 3
            await one.beat()
            assert (one.alone, one.num_gateways) == (False, 1)


async def test_a_call_that_a_client_of_a_cluster_repeats_counts_once(server: RedisServer):
    limits = {"requests_per_minute": 10, "tokens_per_minute": 100, "max_concurrent": 9}
    async with gateways(server, 1) as (one,):
        wanted = ask(1, 20, **limits)
        for _ in range(3):
            taken = await one.take(wanted)
            assert (taken.refusal, taken.requests_s, taken.tokens_s) == (None, approx(6), approx(12))
        for _ in range(3):
            await one.settle(wanted, taken, 50)
        assert (await one.take(ask(2, 10, **limits))).tokens_s == approx(48)


async def test_nothing_of_requests_that_ended_stays_for_long(server: RedisServer):
    async with gateways(server, 1) as (one,):
        wanted = ask(1, max_concurrent=2)
        await one.settle(wanted, await one.take(wanted), 1)
        left = {key: server.admin.pttl(key) for key in server.admin.keys("baton:limits:{*")}
    assert set(left) <= {b"baton:limits:{key-0}:counted:lease-1"}
    assert all(0 < lifetime <= 5000 for lifetime in left.values())


def approx(seconds: float) -> Any:
    """So many seconds, less what flowed back on a slow machine."""
    return pytest.approx(seconds, abs=2)


async def test_a_gateway_that_is_gone_has_no_part(server: RedisServer):
    async with gateways(server, 2) as (one, other):
        assert (one.num_gateways, other.num_gateways) == (2, 2)
        for _ in range(2):  # one of them beats on
            age_packed(server, "baton:limits:gateways", 0.6 * GATEWAY_LEASE_S)
            await one.beat()
        assert one.num_gateways == 1
        await other.beat()
        await one.beat()
        assert one.num_gateways == 2


async def test_what_redis_granted_too_late_is_undone(server: RedisServer):
    """The gateway had no answer and counted alone; Redis still finds the question when it goes on."""
    limits = {"requests_per_minute": 2, "tokens_per_minute": 100, "max_concurrent": 1}
    async with gateways(server, 2, timeout_s=1) as (one, other):
        await one.take(ask(0, 101, tokens_per_minute=100))  # the script is loaded: refused, and not counted
        server.freeze()
        try:
            late = ask(1, 50, **limits)
            taken = await one.take(late)
        finally:
            server.thaw()
        assert (taken.alone, taken.refusal) == (True, None)
        await until(lambda: server.admin.keys("*:counted:lease-1") != [])
        await one.settle(late, taken, 0)
        await until_it_answers(one)
        first = await other.take(ask(2, 90, **limits))
        assert first.refusal is None
        assert first.requests_s == 30
        assert first.tokens_s == 54
        assert server.admin.keys("*:counted:lease-1") == []


async def test_what_redis_never_granted_is_not_undone(server: RedisServer):
    """The gateway had no answer since Redis was gone: another one starts empty."""
    async with gateways(server, 2, timeout_s=1) as (one, other):
        server.freeze()
        try:
            assert (await one.take(ask(1, requests_per_minute=2))).alone
        finally:
            server.thaw()
        server.admin.flushall()
        await until(lambda: server.admin.keys("*:counted:lease-1") == [])
        assert await num_taken(other, 10, requests_per_minute=2) == 2
        await until_it_answers(one)
        assert await num_taken(other, 20, requests_per_minute=2) == 0


async def test_a_request_whose_client_leaves_while_redis_is_asked_is_undone(server: RedisServer):
    async with gateways(server, 2) as (one, other):
        await one.take(ask(0, 2, tokens_per_minute=1))  # the script is loaded
        server.freeze()
        asking = asyncio.create_task(one.take(ask(1, max_concurrent=1)))
        await asyncio.sleep(0.1)
        asking.cancel()
        server.thaw()
        await until(lambda: server.admin.keys("*:counted:lease-1") != [])
        assert (await other.take(ask(2, max_concurrent=1))).refusal is Refusal.KEY_CONCURRENT
        await one.beat()
        assert (await other.take(ask(2, max_concurrent=1))).refusal is None


async def test_requests_of_a_gateway_that_died_run_for_half_a_minute(server: RedisServer):
    now = [0.0]
    async with gateways(server, 1) as (other,):
        client = connect(server.url, 60)
        dying = RedisQuotas(client, CircuitBreaker(lambda: now[0]), lambda: now[0])
        await dying.take(ask(1, max_concurrent=1))
        for _ in range(3):  # the request goes on, and is renewed
            now[0] += 10
            age_packed(server, "baton:limits:{key-0}:running", 15)
            await dying.beat()
        await client.aclose()
        age_packed(server, "baton:limits:{key-0}:running", LEASE_S - 20)
        assert (await other.take(ask(2, max_concurrent=1))).refusal is Refusal.KEY_CONCURRENT
        age_packed(server, "baton:limits:{key-0}:running", 20)
        assert (await other.take(ask(2, max_concurrent=1))).refusal is None


async def test_a_request_that_was_settled_is_not_renewed(server: RedisServer):
    now = [0.0]
    async with gateways(server, 1) as (other,):
        client = connect(server.url, 60)
        one = RedisQuotas(client, CircuitBreaker(lambda: now[0]), lambda: now[0])
        first, second = ask(1, max_concurrent=2), ask(2, max_concurrent=2)
        for each in (first, second):
            await one.take(each)
        await one.settle(first, Taken(), 0)
        now[0] = 10
        await one.beat()
        assert (await other.take(ask(3, max_concurrent=2))).refusal is None
        assert (await other.take(ask(4, max_concurrent=2))).refusal is Refusal.KEY_CONCURRENT
        await client.aclose()


async def test_a_key_that_is_closed_is_known_to_be_without_a_round_trip(server: RedisServer):
    async with gateways(server, 1) as (one,):
        for limits, expected in (
            ({"requests_per_minute": 2}, Refusal.KEY_REQUESTS),
            ({"tokens_per_minute": 2}, Refusal.KEY_TOKENS),
            ({"max_concurrent": 2}, Refusal.KEY_CONCURRENT),
        ):
            wanted = Ask(str(expected), RateLimits(**limits), "", 1)
            assert (await one.look(wanted)).refusal is None
            for lease in ("a", "b"):
                await one.take(replace(wanted, lease=lease))
            calls = server.num_calls("evalsha")
            assert (await one.look(wanted)).refusal is expected
            assert server.num_calls("evalsha") == calls


async def test_whether_requests_of_other_gateways_still_run_is_asked_again(server: RedisServer):
    """Redis alone knows: a gateway that remembered would refuse what may be let in."""
    async with gateways(server, 2) as (one, other):
        running = ask(1, max_concurrent=1)
        taken = await other.take(running)
        assert (await one.look(ask(0, max_concurrent=1))).refusal is None, "not known yet"
        assert (await one.take(ask(2, max_concurrent=1))).refusal is Refusal.KEY_CONCURRENT
        assert (await one.look(ask(0, max_concurrent=1))).refusal is Refusal.KEY_CONCURRENT
        await other.settle(running, taken, 0)
        assert (await one.look(ask(0, max_concurrent=1))).refusal is None
        assert server.admin.keys("*:counted:") == []  # of a look
        assert (await one.take(ask(3, max_concurrent=1))).refusal is None


async def test_a_request_that_is_undone_no_longer_counts_at_any_gateway(server: RedisServer):
    limits = {"requests_per_minute": 3, "tokens_per_minute": 30, "max_concurrent": 3}
    async with gateways(server, 2) as (one, other):
        asks = [ask(n, 10, **limits) for n in range(3)]
        taken = [await one.take(each) for each in asks]
        assert (await other.take(ask(7, 10, **limits))).refusal is not None
        for each, answer in zip(asks[:2], taken, strict=False):
            await one.undo(each, answer, 0)
            await one.undo(each, answer, 0)  # a repeated call changes nothing
        again = [
            (await gateway.take(ask(8 + n, 10, **limits))).refusal for n, gateway in enumerate((other, one, other))
        ]
        assert again[:2] == [None, None]
        assert again[2] is not None


async def test_the_tokens_of_an_answer_count_once_it_has_ended(server: RedisServer):
    async with gateways(server, 1) as (together,):
        for store in (together, LocalQuotas()):
            first = ask(1, 10, tokens_per_minute=100)
            taken = await store.take(first)
            assert remaining(taken.tokens_s, 100) == 90
            await store.settle(first, taken, 85)
            assert (await store.take(ask(2, 10, tokens_per_minute=100))).refusal is Refusal.KEY_TOKENS
            assert (await store.take(ask(3, 4, tokens_per_minute=100))).refusal is None


async def test_a_request_that_waited_for_longer_than_its_mark_is_undone(server: RedisServer):
    """It runs no more, at once; what it counted has left the buckets by then."""
    limits = {"requests_per_minute": 100, "max_concurrent": 1}
    async with gateways(server, 2) as (one, other):
        taken = await one.take(old := ask(1, **limits))
        server.admin.delete(*server.admin.keys("*:counted:lease-1"))  # a minute later
        await one.undo(old, taken, 0)
        again = await other.take(ask(2, **limits))
        assert again.refusal is None
        assert again.requests_s > taken.requests_s  # it was not lowered
