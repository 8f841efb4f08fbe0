"""Redis' clock is set back and forth by an hour: what its scripts keep is as if no time, or all of it, had passed.

A clock that steps by an hour is, for a server that compares, the same as all times that it keeps stepping the other
way. So the tests step those times; and where `faketime` is installed, they step the clock of a real server.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from kvtransfer.ids import WorkerId
from services.prefix_index.publication import pack_id
from services.prefix_index.redis_client import DEAD, LEASES, SWEEPER, Client, connect
from services.prefix_index.registry import LEASE_S, Registry
from tests.machine import FAKETIME, needs
from tests.prefix_index.conftest import PATIENCE_S
from tests.prefix_index.test_registry import begin, record_of
from tests.redis_server import FakeClock, RedisServer, running_redis, step_leases

HOUR_S = 3600.0
ALICE, BOB, CARL = WorkerId(0xA11CE), WorkerId(0xB0B), WorkerId(0xCA51)
STEPS = [-HOUR_S, -LEASE_S / 2, LEASE_S, HOUR_S]


def lives_s(server: RedisServer) -> dict[str, float]:
    """How long each lease of the registry still lasts."""
    seconds, micros = server.admin.time()
    now = seconds + micros / 1e6
    leases = cast("list[tuple[bytes, float]]", server.admin.zrange(LEASES, 0, -1, withscores=True))
    return {id.decode(): score / 1e3 - now for id, score in leases}


async def assert_outlives(server: RedisServer, client: Client, step: Callable[[], None]) -> None:
    """Three workers live, the clock steps, and one of them is the first to renew: nobody is dead for it."""
    registry = Registry(client)
    for each in (ALICE, BOB, CARL):
        await begin(registry, pack_id(each, 0), each)
    step()
    assert await registry.renew(pack_id(ALICE, 0), record_of(ALICE), confirmed=True)
    assert {record.worker_id for record in await registry.workers()} == {ALICE, BOB, CARL}
    assert server.admin.smembers(DEAD) == set()
    assert await registry.renew(pack_id(BOB, 0), record_of(BOB), confirmed=True)
    assert max(lives_s(server).values()) <= LEASE_S
    assert min(lives_s(server).values()) > 0


@pytest.mark.parametrize("step_s", STEPS)
async def test_no_worker_is_dead_or_lives_longer_for_a_step_of_the_clock(
    server: RedisServer, client: Client, step_s: float
):
    await assert_outlives(server, client, lambda: step_leases(server, LEASES, -step_s))


@pytest.fixture(scope="module")
def clocked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisServer, FakeClock]]:
    """A server, and its clock."""
    directory: Path = tmp_path_factory.mktemp("clocked")
    clock = FakeClock(directory / "clock")
    with running_redis(directory, clock=clock) as server:
        yield server, clock


@needs(FAKETIME)
@pytest.mark.parametrize("step_s", STEPS)
async def test_no_worker_is_dead_or_lives_longer_for_a_step_of_a_real_clock(
    clocked: tuple[RedisServer, FakeClock], step_s: float
):
    server, clock = clocked
    server.admin.flushall()
    client = connect(server.url, timeout_s=PATIENCE_S)
    await assert_outlives(server, client, lambda: clock.step(step_s))
    await client.aclose()


async def test_a_worker_that_died_before_the_clock_was_set_back_is_gone_when_its_lease_would_have_ended(
    server: RedisServer, client: Client
):
    registry = Registry(client)
    await begin(registry, pack_id(ALICE, 0), ALICE)
    await begin(registry, pack_id(BOB, 0), BOB)
    step_leases(server, LEASES, HOUR_S)
    await registry.renew(pack_id(ALICE, 0), record_of(ALICE), confirmed=True)
    for _ in range(2):  # Alice goes on, and Bob says nothing
        step_leases(server, LEASES, -0.45 * LEASE_S)
        await registry.renew(pack_id(ALICE, 0), record_of(ALICE), confirmed=True)
    assert len(await registry.workers()) == 2
    step_leases(server, LEASES, -0.2 * LEASE_S)
    await registry.renew(pack_id(ALICE, 0), record_of(ALICE), confirmed=True)
    assert [record.worker_id for record in await registry.workers()] == [ALICE]
    assert server.admin.smembers(DEAD) == {pack_id(BOB, 0).hex().encode()}


async def test_the_sweep_goes_on_though_a_lock_lasts_longer_than_any_sweep(server: RedisServer, client: Client):
    """Who had it died before the clock was set back by an hour."""
    now = [0.0]
    registry = Registry(client, clock=lambda: now[0])
    server.admin.sadd(DEAD, pack_id(ALICE, 0).hex())
    server.admin.set(SWEEPER, "", ex=3660)
    for now[0] in (0.0, 30.0, 60.0, 119.0):
        assert await registry.sweep() == 0
    now[0] = 121.0
    assert await registry.sweep() == 1
    server.admin.sadd(DEAD, pack_id(ALICE, 0).hex())
    assert await registry.sweep() == 1
