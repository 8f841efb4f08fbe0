"""Redis is away, full, hangs or loses everything while real processes generate responses in the background.

Redis' clock steps while keys have limits.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from services.config import Right
from services.gateway.keys.changes import add_key
from services.gateway.keys.key_entry import RateLimits
from services.gateway.openai.responses.store import LEASE_S
from services.prefix_index.redis_client import DEAD, LEASES
from services.prefix_index.registry import RENEW_EVERY_S
from tests.e2e.stack import Endpoint, Stack, wait_until, worker_ports
from tests.faults.case import Case, case_of
from tests.faults.proxied import ProxiedStack, proxied_stack
from tests.faults.rows import long, row
from tests.faults.table import VERDICT
from tests.machine import FAKETIME, needs
from tests.redis_server import FakeClock, RedisServer, running_redis, step_leases, step_limits

AWAY_S = LEASE_S + 2
HOUR_S = 3600.0
SHORT: dict[str, Any] = {
    "model": "tiny",
    "input": "Hello",
    "temperature": 0,
    "max_output_tokens": 12,
    "extra_body": {"ignore_eos": True},
}
LONG: dict[str, Any] = {**SHORT, "max_output_tokens": 400}
GOING_ON, AWAY = ("queued", "in_progress"), "503"
STOPPED_S, RUNNING_S = 0.4, 0.02  # in turns: a worker that is so slow still answers pings


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def running(model: Path, redis: RedisServer) -> Iterator[ProxiedStack]:
    with proxied_stack(model, workers=1, redis_url=redis.url) as stack:
        yield stack


@pytest.fixture
def stack(running: ProxiedStack) -> ProxiedStack:
    """Healed after each case."""
    return running


@contextlib.contextmanager
def slow(stack: Stack) -> Iterator[None]:
    """Makes the workers stand still most of the time."""
    over = threading.Event()

    def stand_still() -> None:
        while not over.is_set():
            for worker in stack.workers.values():
                worker.freeze()
            over.wait(STOPPED_S)
            for worker in stack.workers.values():
                worker.thaw()
            time.sleep(RUNNING_S)

    thread = threading.Thread(target=stand_still)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def status(gateway: Endpoint, response_id: str) -> str:
    """The status of a response, or the answer's where it is no response."""
    try:
        return str(gateway.client.responses.retrieve(response_id).status)
    except openai.APIStatusError as error:
        return str(error.status_code)


def fill(server: RedisServer) -> None:
    server.admin.config_set("maxmemory-policy", "noeviction")
    server.admin.config_set("maxmemory", 1)


FAULTS: dict[str, tuple[Callable[[RedisServer], object], Callable[[RedisServer], object]]] = {
    "killed": (RedisServer.kill, RedisServer.start),
    "full": (fill, lambda server: server.admin.config_set("maxmemory", 0)),
    "hanging": (RedisServer.freeze, RedisServer.thaw),
    "read-only": (
        lambda server: server.admin.replicaof("127.0.0.1", "1"),
        lambda server: server.admin.replicaof("NO", "ONE"),
    ),
    "emptied": (lambda server: server.admin.flushall(), lambda server: None),
}


@row(68)
@long
@pytest.mark.parametrize("how", FAULTS)
def test_background_responses_are_not_lost_with_redis(stack: ProxiedStack, case: Case, redis: RedisServer, how: str):
    """One runs through the fault, one ends within it; two gateways are asked all the time."""
    break_it, mend_it = FAULTS[how]
    other = stack.gateway
    wanted = {name: other.client.responses.create(**body).output_text for name, body in (("s", SHORT), ("l", LONG))}
    with stack.serving("--redis-url", redis.url) as own:
        with slow(stack):
            through, within = (own.client.responses.create(**body, background=True).id for body in (LONG, SHORT))
            case.fault()
            break_it(redis)
            heard: dict[tuple[str, str], list[str]] = {}
            until = time.monotonic() + AWAY_S
            while time.monotonic() < until:
                for gateway, name in ((own, "own"), (other, "other")):
                    for each in (through, within):
                        heard.setdefault((name, each), []).append(status(gateway, each))
                with pytest.raises(openai.APIStatusError):
                    other.client.responses.delete(through)
            mend_it(redis)
        began = time.monotonic()
        for gateway, name in ((other, "other"), (own, "own")):
            for each in (through, within):
                words = heard[name, each]
                wait_until(partial(_has_ended, gateway, each, words), 60, f"{each} at {name}")
        print(f"Redis {how} for {AWAY_S:g} s: every gateway has both responses {time.monotonic() - began:.2f} s later")
        for words in heard.values():  # no gateway said that they failed or were not there, and an end is final
            told = [each for each in words if each != AWAY]
            assert told == sorted(told, key=[*GOING_ON, "incomplete"].index), heard
        for each, name in ((within, "s"), (through, "l")):
            assert [g.client.responses.retrieve(each).output_text for g in (own, other)] == [wanted[name]] * 2
            other.client.responses.delete(each)
        _stay_away(own, other, (within, through))
    case.settle()


def _stay_away(own: Endpoint, other: Endpoint, ids: tuple[str, ...]) -> None:
    """Responses that were deleted are not there, once Redis lost nothing for a while, and do not come back."""
    until = time.monotonic() + LEASE_S + 2
    while time.monotonic() < until:
        found = {status(gateway, each) for gateway in (own, other) for each in ids}
        assert found <= {"404", AWAY}
        time.sleep(0.2)
    assert found == {"404"}


def _has_ended(gateway: Endpoint, response_id: str, words: list[str]) -> bool:
    words.append(status(gateway, response_id))
    return words[-1] == "incomplete"


@row(68)
@long
def test_the_response_of_a_gateway_that_dies_while_redis_is_away_has_failed(
    stack: ProxiedStack, case: Case, redis: RedisServer
):
    """Though not before it is certain: a whole lease's time after Redis is back."""
    other = stack.gateway
    with stack.serving("--redis-url", redis.url) as own, slow(stack):
        left = own.client.responses.create(**LONG, background=True).id
        case.fault()
        redis.freeze()
        own.kill()
        time.sleep(AWAY_S)
        redis.thaw()
        assert status(other, left) in (*GOING_ON, AWAY)
        took_s = wait_until(lambda: status(other, left) == "failed", 2 * LEASE_S, "the end of the lease")
        assert took_s > LEASE_S / 2
    case.settle()


@row(68)
@long
def test_a_gateway_that_drains_has_the_answer_written_that_it_holds(
    stack: ProxiedStack, case: Case, redis: RedisServer
):
    other = stack.gateway
    with stack.serving("--redis-url", redis.url, "--drain-timeout", "30") as own:
        with slow(stack):
            held = own.client.responses.create(**SHORT, background=True).id
            case.fault()
            fill(redis)
            wait_until(lambda: status(own, held) == "incomplete", 30, "the end of the response")
        own.client.close()
        own.process.terminate()
        time.sleep(1)
        assert status(other, held) in GOING_ON
        redis.admin.config_set("maxmemory", 0)
        assert own.process.wait(30) == 0
        assert status(other, held) == "incomplete"
    case.settle()


@contextlib.contextmanager
def stepped_times(directory: Path) -> Iterator[tuple[RedisServer, Callable[[float], None]]]:
    """A Redis, and what steps its clock: by the times that it keeps, which go the other way."""
    with running_redis(directory) as server:

        def step(seconds: float) -> None:
            step_limits(server, -seconds)
            step_leases(server, LEASES, -seconds)

        yield server, step


@contextlib.contextmanager
def stepped_clock(directory: Path) -> Iterator[tuple[RedisServer, Callable[[float], None]]]:
    """A Redis, and what steps its clock."""
    clock = FakeClock(directory / "clock")
    with running_redis(directory, clock=clock) as server:
        yield server, clock.step


def asked(gateway: Endpoint, key: str, number: int) -> list[openai.RateLimitError]:
    """Asks so many times with a key; returns the refusals."""
    refused = []
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
        for _ in range(number):
            try:
                client.completions.create(model="tiny", prompt="Hello", max_tokens=1, temperature=0)
            except openai.RateLimitError as error:
                refused.append(error)
    return refused


@row(69)
@long
@pytest.mark.parametrize("step_s", [-HOUR_S, HOUR_S])
@pytest.mark.parametrize("stepping", [stepped_times, pytest.param(stepped_clock, marks=needs(FAKETIME))])
def test_keys_and_workers_outlive_a_step_of_redis_clock(
    model: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    stepping: Callable[[Path], contextlib.AbstractContextManager[tuple[RedisServer, Callable[[float], None]]]],
    step_s: float,
):
    """A key has room for as much as it had, workers stay, and a refusal says a minute at most."""
    keys = tmp_path / "keys.json"
    _, key = add_key(keys, "acme", [Right.API], 0, RateLimits(requests_per_minute=60))
    with stepping(tmp_path) as (server, step):
        stack = Stack(model, worker_ports(1, 1), [], server.url, key="plain")
        with (
            stack.running("--keys", str(keys), "--api-key", "plain"),
            case_of(stack, lambda verdict: record_property(VERDICT, astuple(verdict))) as case,
        ):
            assert asked(stack.gateway, key, 30) == []
            ids = {*server.admin.zrange(LEASES, 0, -1)}
            case.fault()
            step(step_s)
            assert asked(stack.gateway, key, 30) == []
            refused = asked(stack.gateway, key, 60)
            assert all(0 < int(each.response.headers["retry-after"]) <= 60 for each in refused)
            time.sleep(RENEW_EVERY_S + 1)
            assert {*server.admin.zrange(LEASES, 0, -1)} == ids
            assert server.admin.smembers(DEAD) == set()
            assert asked(stack.gateway, key, 1) == []
            case.settle()
