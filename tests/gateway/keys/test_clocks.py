"""Limits in Redis whose clock is set back and forth: no bucket is fuller for it, and nobody lives longer or is dead.

A clock that steps is, for a server that compares, the same as all times that it keeps stepping the other way. So the
tests step those times; and where `faketime` is installed, they step the clock of a real server.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from services.gateway.api.generation import Refusal
from services.gateway.keys.rates import WINDOW_S
from services.gateway.keys.redis_quotas import GATEWAY_LEASE_S, LEASE_S, RedisQuotas
from services.prefix_index.breaker import CircuitBreaker
from services.prefix_index.redis_client import connect
from tests.gateway.keys.asks import ask, num_taken
from tests.machine import FAKETIME, needs
from tests.redis_server import FakeClock, RedisServer, running_redis, step_limits

HOUR_S = 3600.0
STEPS = [-HOUR_S, -WINDOW_S / 2, WINDOW_S / 2, HOUR_S]
Step = Callable[[float], None]  # seconds by which the server's clock goes on, or back below 0


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def stepped_times(plain: RedisServer) -> tuple[RedisServer, Step]:
    return plain, lambda seconds: step_limits(plain, -seconds)


@pytest.fixture(scope="module")
def stepped_clock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisServer, Step]]:
    directory = tmp_path_factory.mktemp("clocked")
    clock = FakeClock(directory / "clock")
    with running_redis(directory, clock=clock) as running:
        yield running, clock.step


@pytest.fixture(params=["stepped_times", pytest.param("stepped_clock", marks=needs(FAKETIME))])
def stepping(request: pytest.FixtureRequest) -> tuple[RedisServer, Step]:
    """A server without keys, and what steps its clock."""
    server, step = request.getfixturevalue(request.param)
    server.admin.flushall()
    return server, step


class Gateway(RedisQuotas):
    """What a gateway has, with a clock that stands until it is told."""

    now = 0.0


@asynccontextmanager
async def gateway_of(server: RedisServer, timeout_s: float = 60) -> AsyncIterator[Gateway]:
    client = connect(server.url, timeout_s)
    made = Gateway(client, CircuitBreaker(asyncio.get_running_loop().time), lambda: made.now)
    await made.beat()
    try:
        yield made
    finally:
        await client.aclose()


@pytest.mark.parametrize("step_s", STEPS)
@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute"])
async def test_a_bucket_is_never_fuller_and_never_larger_for_a_step(
    stepping: tuple[RedisServer, Step], limit: str, step_s: float
):
    server, step = stepping
    async with gateway_of(server) as one:
        for number in range(6):
            assert (await one.take(ask(number, **{limit: 10}))).refusal is None
        step(step_s)
        expected = 4 if step_s < 0 else min(10, 4 + int(10 * step_s / WINDOW_S))
        assert expected <= await num_taken(one, 100, **{limit: 10}) <= expected + 1
        refused = await one.take(ask(200, **{limit: 10}))
        assert 0 < refused.wait_s <= WINDOW_S / 10
        step(refused.wait_s + 0.001)
        assert (await one.take(ask(201, **{limit: 10}))).refusal is None


async def test_a_full_bucket_that_is_only_looked_at_flows_off_after_the_clock_was_set_back(
    stepping: tuple[RedisServer, Step],
):
    """Nothing is counted meanwhile: refusals leave the bucket as it is."""
    server, step = stepping
    async with gateway_of(server) as one:
        assert await num_taken(one, 0, requests_per_minute=10) == 10
        step(-HOUR_S)
        for number in range(10):
            wanted = ask(20 + number, requests_per_minute=10)
            assert (await one.take(wanted)).wait_s <= WINDOW_S / 10
        step(WINDOW_S / 2)
        assert await num_taken(one, 40, requests_per_minute=10) in (5, 6)


async def test_what_an_answer_took_beyond_the_limit_is_waited_for_also_when_the_clock_was_set_back(
    stepping: tuple[RedisServer, Step],
):
    server, step = stepping
    async with gateway_of(server) as one:
        first = ask(1, 1, tokens_per_minute=10)
        await one.settle(first, await one.take(first), 30)
        for step_s in (0.0, -HOUR_S, -WINDOW_S):
            step(step_s)
            refused = await one.take(ask(2, 1, tokens_per_minute=10))
            assert refused.tokens_s == pytest.approx(31 * WINDOW_S / 10, abs=2)


async def test_a_moment_that_an_older_version_wrote_is_at_most_a_window_away(plain: RedisServer):
    plain.admin.flushall()
    seconds, micros = plain.admin.time()
    async with gateway_of(plain) as one:
        for ahead_s, room in ((HOUR_S, 0), (WINDOW_S / 2, 5)):
            plain.admin.set("baton:limits:{key-0}:requests", int((seconds + ahead_s) * 1e6) + micros)
            found = await one.take(ask(int(ahead_s), requests_per_minute=10))
            assert found.requests_s <= WINDOW_S
            assert (found.refusal is None) == bool(room)


@pytest.mark.parametrize("step_s", [-HOUR_S, -LEASE_S / 2])
async def test_a_request_of_a_gateway_that_died_counts_no_longer_when_the_clock_was_set_back(
    stepping: tuple[RedisServer, Step], step_s: float
):
    server, step = stepping
    async with gateway_of(server) as dead, gateway_of(server) as one:
        await dead.take(ask(1, max_concurrent=1))
        step(step_s)
        assert (await one.take(ask(2, max_concurrent=1))).refusal is Refusal.KEY_CONCURRENT
        step(LEASE_S - 5)
        assert (await one.take(ask(3, max_concurrent=1))).refusal is Refusal.KEY_CONCURRENT
        step(5.1)
        assert (await one.take(ask(4, max_concurrent=1))).refusal is None


def lose(server: RedisServer, step: Step) -> None:
    server.admin.flushall()


def an_hour_forth(server: RedisServer, step: Step) -> None:
    step(HOUR_S)


@pytest.mark.parametrize("event", [lose, an_hour_forth])
async def test_a_request_that_runs_counts_again_when_redis_lost_it(
    stepping: tuple[RedisServer, Step], event: Callable[[RedisServer, Step], None]
):
    server, step = stepping
    async with gateway_of(server) as one, gateway_of(server) as other:
        running = ask(1, max_concurrent=1)
        taken = await one.take(running)
        event(server, step)
        one.now += 10.0
        await one.beat()
        assert (await other.take(ask(2, max_concurrent=1))).refusal is Refusal.KEY_CONCURRENT
        await one.settle(running, taken, 0)
        one.now += 10.0
        await one.beat()
        assert (await other.take(ask(3, max_concurrent=1))).refusal is None


async def test_a_request_that_ended_is_not_made_to_run_again_by_a_renewal_that_was_late(plain: RedisServer):
    plain.admin.flushall()
    async with gateway_of(plain) as one, gateway_of(plain) as other:
        running = ask(1, max_concurrent=1)
        taken = await one.take(running)
        await one.settle(running, taken, 0)
        one._renewed[running.lease] = running, -100.0  # as if the renewal had been sent before
        await one.beat()
        assert (await other.take(ask(2, max_concurrent=1))).refusal is None


async def test_a_gateway_that_died_has_no_part_for_longer_when_the_clock_was_set_back(
    stepping: tuple[RedisServer, Step],
):
    server, step = stepping
    async with gateway_of(server), gateway_of(server) as one:
        step(-HOUR_S)
        await one.beat()
        assert one.num_gateways == 2
        for _ in range(2):  # one of them beats on
            step(0.6 * GATEWAY_LEASE_S)
            await one.beat()
        assert one.num_gateways == 1


@pytest.mark.parametrize("event", [lose, an_hour_forth])
async def test_gateways_that_redis_lost_have_their_part_until_their_leases_would_have_ended(
    stepping: tuple[RedisServer, Step], event: Callable[[RedisServer, Step], None]
):
    """Else the one that beats first would grant whole limits alone if Redis went away now."""
    server, step = stepping
    async with gateway_of(server) as one, gateway_of(server):
        await one.beat()
        event(server, step)
        await one.beat()
        assert one.num_gateways == 2
        one.now += GATEWAY_LEASE_S - 0.1
        await one.beat()
        assert one.num_gateways == 2
        one.now += 0.2
        await one.beat()
        assert one.num_gateways == 1


@pytest.mark.parametrize("step_s", [-HOUR_S, HOUR_S])
async def test_what_redis_granted_too_late_is_undone_whatever_its_clock_says(
    stepped_times: tuple[RedisServer, Step], step_s: float
):
    server, step = stepped_times
    server.admin.flushall()
    async with gateway_of(server, timeout_s=0.3) as one, gateway_of(server) as other:
        await one.take(ask(0, 101, tokens_per_minute=100))  # the script is loaded
        server.freeze()
        try:
            assert (await one.take(ask(1, requests_per_minute=2))).alone
        finally:
            server.thaw()
        async with asyncio.timeout(60):
            while not server.admin.keys("*:counted:lease-1"):
                await asyncio.sleep(0.01)
            step(step_s)
            while one.alone:
                await asyncio.sleep(0.05)
                await one.beat()
        assert (await other.take(ask(2, requests_per_minute=2))).requests_s == pytest.approx(30, abs=1)
