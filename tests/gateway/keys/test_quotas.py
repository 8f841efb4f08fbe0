"""Limits of keys: the arithmetic beside a model of it, Redis beside one process, and what clients get."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import grpc
import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import inference_pb2, inference_pb2_grpc
from services.config import Right
from services.gateway.api.generation import Refusal
from services.gateway.api.limits_left import duration
from services.gateway.keys.authentication import Keys
from services.gateway.keys.changes import add_key
from services.gateway.keys.entry import RateLimits
from services.gateway.keys.file import read_keys
from services.gateway.keys.local_quotas import LocalQuotas
from services.gateway.keys.quota import Ask, KeyQuota, QuotaStore, Taken
from services.gateway.keys.rates import WINDOW_S, fill, remaining
from services.gateway.keys.redis_quotas import GATEWAY_LEASE_S, LEASE_S, RedisQuotas
from services.prefix_index.breaker import CircuitBreaker
from services.prefix_index.redis_client import connect
from tests.gateway.keys.key_files import bearer
from tests.gateway.running_api import MODEL, Api, running_api
from tests.gateway.scripted_generator import Script
from tests.redis_server import RedisServer, age_packed, running_redis

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
MESSAGE = {**CHAT, "max_tokens": 5}


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
    """Until the gateway has asked Redis again."""
    while gateway.alone:
        await asyncio.sleep(0.05)
        await gateway.beat()


async def until(condition: Callable[[], bool]) -> None:
    """Until it holds."""
    while not condition():
        await asyncio.sleep(0.01)


async def num_taken(store: QuotaStore, first_lease: int, key: str = "k", **limits: int) -> int:
    """Takes requests until one is refused. Returns how many there were."""
    number = 0
    while (await store.take(ask(first_lease + number, key=key, **limits))).refusal is None:
        number += 1
    return number


def ask(lease: int, tokens: int = 1, key: str = "k", **limits: int) -> Ask:
    return Ask(key, RateLimits(**limits), f"lease-{lease}", tokens)


@given(st.integers(1, 50), st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=60))
def test_a_bucket_lets_in_what_exact_arithmetic_does(limit: int, steps: list[tuple[int, int]]):
    """Pauses in seconds and costs. The model keeps the bucket in fractions, and never has more than a minute in it."""
    level_s, exact = 0.0, Fraction(0)
    for pause_s, cost in steps:
        level_s, exact = level_s - pause_s, max(Fraction(0), exact - pause_s)
        wanted = exact + Fraction(cost * 60, limit)
        found = fill(level_s, cost, limit)
        assert (found.wait_s == 0) == (wanted <= 60)
        if wanted <= 60:
            exact = wanted
        else:
            assert found.wait_s == pytest.approx(float(wanted - 60))
        level_s = found.level_s
        assert level_s == pytest.approx(float(exact), abs=1e-6)
        assert remaining(level_s, limit) == (60 - exact) * limit // 60


def test_as_much_as_the_limit_comes_at_once_and_then_as_it_drains():
    level_s = 0.0
    for _ in range(3):
        level_s = fill(level_s, 1, 3).level_s
    assert fill(level_s, 1, 3).wait_s == pytest.approx(20)
    assert fill(level_s - 20, 1, 3).wait_s == 0


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0, "0ms"), (0.02, "20ms"), (1.0, "1s"), (59.2, "1m0s"), (360, "6m0s"), (3600, "1h0m0s")]
)
def test_times_are_written_as_openai_writes_them(seconds: float, shown: str):
    assert duration(seconds) == shown


ASKED = st.lists(st.one_of(st.integers(1, 6), st.none()), min_size=1, max_size=12)  # tokens; None: the oldest ends


@settings(max_examples=40)
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
                await store.settle(ended, each, 1)
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
        running = [ask(n, key="other", max_concurrent=4) for n in (100, 101)]
        for each in running:
            assert (await one.take(each)).refusal is None
        server.kill()
        try:
            assert await num_taken(one, 20, requests_per_minute=10) == 0
            assert await num_taken(one, 200, "other", max_concurrent=4) == 0  # two run, which are its part
            await one.settle(running[0], Taken(), 0)
            assert await num_taken(one, 201, "other", max_concurrent=4) == 1
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
        assert [await num_taken(gateway, 50, requests_per_minute=10) for gateway in two] == [10, 0]


async def test_a_gateway_that_is_gone_has_no_part(server: RedisServer):
    async with gateways(server, 2) as (one, other):
        assert (one.num_gateways, other.num_gateways) == (2, 2)
        age_packed(server, "baton:limits:gateways", GATEWAY_LEASE_S)
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
            age_packed(server, "baton:limits:{k}:running", 25)
            await dying.beat()
        await client.aclose()
        age_packed(server, "baton:limits:{k}:running", LEASE_S - 1)
        assert (await other.take(ask(2, max_concurrent=1))).refusal is Refusal.KEY_CONCURRENT
        age_packed(server, "baton:limits:{k}:running", 1)
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
        assert server.admin.keys("*:counted:*") == []
        assert (await one.take(ask(3, max_concurrent=1))).refusal is None


LOOKED = st.lists(st.one_of(st.integers(1, 30), st.none()), min_size=1, max_size=30)  # tokens; None: a pause of 7 s


@given(LOOKED, st.integers(0, 9), st.integers(0, 60), st.integers(0, 4))
def test_what_a_look_refuses_is_never_let_in(steps: list[int | None], requests: int, tokens: int, running: int):
    limits = {"requests_per_minute": requests, "tokens_per_minute": tokens, "max_concurrent": running}
    limits = {name: limit for name, limit in limits.items() if limit}
    now = [0.0]
    store = LocalQuotas(lambda: now[0])
    for number, step in enumerate(steps):
        if step is None:
            now[0] += 7
            continue
        seen, taken = store.look_at_share(ask(0, **limits), 1), store.take_share(ask(number, step, **limits), 1)
        assert seen.refusal is None or taken.refusal is not None
        assert seen.refusal is taken.refusal or step > 1


@given(st.integers(1, 40), st.integers(1, 40))
def test_the_parts_of_all_gateways_are_together_no_more_than_the_limit(limit: int, share: int):
    """Except that each gateway has one request at least."""
    stores = [LocalQuotas(lambda: 0.0) for _ in range(share)]
    taken = 0
    for store in stores:
        while store.take_share(ask(taken, requests_per_minute=limit), share).refusal is None:
            taken += 1
    assert taken == max(limit // share, 1) * share
    assert taken <= max(limit, share)


async def test_the_tokens_of_an_answer_count_once_it_has_ended(server: RedisServer):
    async with gateways(server, 1) as (together,):
        for store in (together, LocalQuotas()):
            first = ask(1, 10, tokens_per_minute=100)
            taken = await store.take(first)
            assert remaining(taken.tokens_s, 100) == 90
            await store.settle(first, taken, 85)
            assert (await store.take(ask(2, 10, tokens_per_minute=100))).refusal is Refusal.KEY_TOKENS
            assert (await store.take(ask(3, 4, tokens_per_minute=100))).refusal is None


class Limited:
    """A gateway with keys of one limit each, and the causes of refusals that it counted."""

    def __init__(self, path: Path) -> None:
        def key(**limits: int) -> str:
            return add_key(path, "acme", [Right.API], 0, RateLimits(**limits))[1]

        self.by_requests = key(requests_per_minute=2)
        self.by_messages = key(requests_per_minute=1)
        self.by_calls = key(requests_per_minute=1)
        self.by_tokens = key(tokens_per_minute=60)
        self.by_number = key(max_concurrent=1)
        self.free = key()
        self.refused: list[Refusal] = []
        store = LocalQuotas()
        self.keys = Keys((), read_keys(path), lambda id, limits: KeyQuota(id, limits, store, self.refused.append))


@pytest.fixture
async def limited(tmp_path: Path) -> AsyncIterator[tuple[Api, Limited]]:
    found = Limited(tmp_path / "keys.json")
    async with running_api(keys=found.keys) as api:
        yield api, found


async def post(api: Api, key: str, path: str = "/v1/chat/completions", **fields: object) -> httpx2.Response:
    body = {**(MESSAGE if "messages" in path else CHAT), **fields}
    return await api.http.post(path, json=body, headers=bearer(key))


async def test_answers_say_what_is_left_and_the_next_request_is_refused(limited: tuple[Api, Limited]):
    api, keys = limited
    first, second, third = [await post(api, keys.by_requests, stream=stream) for stream in (False, True, False)]
    assert [each.status_code for each in (first, second, third)] == [200, 200, 429]
    shown = [each.headers["x-ratelimit-remaining-requests"] for each in (first, second, third)]
    assert shown == ["1", "0", "0"]
    assert {each.headers["x-ratelimit-limit-requests"] for each in (first, second, third)} == {"2"}
    assert first.headers["x-ratelimit-reset-requests"] in ("30s", "29s")
    assert "x-ratelimit-limit-tokens" not in first.headers
    assert third.json()["error"]["code"] == "rate_limit_exceeded"
    assert 0 < int(third.headers["retry-after"]) <= 30
    assert 0 < int(third.headers["retry-after-ms"]) <= 30_000
    assert keys.refused == [Refusal.KEY_REQUESTS]
    assert len(api.generator.requests) == 2, "refused before any work"
    free = await post(api, keys.free)
    assert free.status_code == 200
    assert not [name for name in free.headers if name.startswith("x-ratelimit")]


async def test_messages_and_calls_are_refused_in_their_own_forms(limited: tuple[Api, Limited]):
    api, keys = limited
    answers = [await post(api, keys.by_messages, "/v1/messages") for _ in range(2)]
    assert [each.status_code for each in answers] == [200, 429]
    assert answers[1].json()["error"]["type"] == "rate_limit_error"
    port = await api.start_grpc()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        metadata = (("authorization", f"Bearer {keys.by_calls}"),)

        async def call() -> dict[str, str]:
            running = stub.Generate(inference_pb2.GenerateRequest(text="Hi"), metadata=metadata)
            async for _ in running:
                pass
            return dict(await running.trailing_metadata())

        assert (await call())["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 0 < int(dict(caught.value.trailing_metadata())["retry-after"]) <= WINDOW_S


async def test_tokens_of_prompts_and_answers_count(limited: tuple[Api, Limited]):
    api, keys = limited
    statuses = []
    for _ in range(8):
        statuses.append((answer := await post(api, keys.by_tokens)).status_code)
        await asyncio.sleep(0)  # until the answer is settled
    usage = (await post(api, keys.free)).json()["usage"]
    assert answer.json()["error"]["type"] == "tokens"
    expected = next(n for n in range(9) if (n + 1) * usage["prompt_tokens"] + n * usage["completion_tokens"] > 60)
    assert statuses == [200] * expected + [429] * (8 - expected)


async def test_a_prompt_above_the_limit_is_told_so(limited: tuple[Api, Limited]):
    api, keys = limited
    answer = await post(api, keys.by_tokens, messages=[{"role": "user", "content": "much " * 30}])
    assert answer.status_code == 429
    assert "can never be let in" in answer.json()["error"]["message"]


async def test_a_client_that_leaves_makes_room(limited: tuple[Api, Limited]):
    api, keys = limited
    api.generator.script = Script([], hangs=True)
    with pytest.raises(httpx2.TimeoutException):
        await api.http.post("/v1/chat/completions", json=CHAT, headers=bearer(keys.by_number), timeout=0.3)
    running = asyncio.create_task(post(api, keys.by_number))
    while len(api.generator.requests) < 2:
        await asyncio.sleep(0.01)
        assert not running.done(), running.result().text
    assert (await post(api, keys.by_number)).json()["error"]["message"].endswith("1 requests at once.")
    running.cancel()
