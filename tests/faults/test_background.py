"""Background responses of two gateways whose Redis is killed, frozen, full, read-only or emptied while they run.

The gateways are in this process, with short leases; test_responses.py has processes, with the real ones.

No gateway may take the other for dead, throw an answer away, or change an end that it told.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from services.gateway.openai.responses.redis_store import RedisResponseStore
from services.prefix_index.breaker import CircuitBreaker
from services.prefix_index.redis_client import connect
from tests.faults.rows import long
from tests.gateway.openai.responses.test_official_client import say
from tests.gateway.running_api import Api, running_api
from tests.redis_server import RedisServer, running_redis

TEXT = "Hello, world"
LEASE_S, AWAY_S, PATIENCE_S = 2.5, 3.5, 120.0
GOING_ON = {"queued", "in_progress"}
DELETED = {200, 404}  # 404: by an earlier request, whose answer was 503


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path) as running:
        yield running


@asynccontextmanager
async def gateway(server: RedisServer) -> AsyncIterator[Api]:
    """A gateway with a store in Redis, which it watches."""
    client = connect(server.url, timeout_s=0.3)
    store = RedisResponseStore(client, CircuitBreaker(time.monotonic), 600, lease_s=LEASE_S)
    following = asyncio.create_task(store.follow())
    try:
        async with running_api(response_store=store) as api:
            yield api
    finally:
        following.cancel()
        await client.aclose()


async def answered(api: Api, method: str, path: str, body: object = None) -> httpx2.Response:
    """An answer. A machine that stands still has Redis answer too late, and its 503 asks to try again."""
    async with asyncio.timeout(PATIENCE_S):
        while (answer := await api.http.request(method, path, json=body)).status_code == 503:
            await asyncio.sleep(0.05)
    return answer


async def begun(api: Api) -> tuple[str, asyncio.Event]:
    """Begins a background response. Returns its id, and what lets it go on after its first token."""
    say(api, TEXT)
    script, before = api.generator.script, len(api.generator.requests)
    script.gate, script.before_gate = asyncio.Event(), 1
    answer = await answered(api, "POST", "/v1/responses", {"input": "Hi", "background": True})
    assert answer.status_code == 200
    async with asyncio.timeout(PATIENCE_S):
        while len(api.generator.requests) == before:
            await asyncio.sleep(0.01)
    return str(answer.json()["id"]), script.gate


async def status(api: Api, response_id: str) -> str:
    """The status of a response, or that of the answer where it is none."""
    return _said(await answered(api, "GET", f"/v1/responses/{response_id}"))


def _said(answer: httpx2.Response) -> str:
    return str(answer.json()["status"] if answer.status_code == 200 else answer.status_code)


class Watch:
    """What clients that ask all the time hear of one response at one gateway."""

    def __init__(self, api: Api, response_id: str) -> None:
        self.heard: list[str] = []
        self._api, self._id = api, response_id

    async def run(self) -> None:
        while True:
            self.heard.append(await self._ask())
            await asyncio.sleep(0.03)

    async def _ask(self) -> str:
        try:
            return _said(await self._api.http.get(f"/v1/responses/{self._id}"))
        except httpx2.TransportError as error:
            return repr(error)

    def check(self) -> None:
        """An end is final, and nobody was told that there is no such response, or that it failed."""
        assert set(self.heard) <= GOING_ON | {"completed", "503"}, self.heard
        told = [each for each in self.heard if each != "503"]
        assert told == sorted(told, key=["queued", "in_progress", "completed"].index), told


def full(server: RedisServer) -> None:
    server.admin.config_set("maxmemory-policy", "noeviction")
    server.admin.config_set("maxmemory", 1)


FAULTS: dict[str, tuple[Callable[[RedisServer], object], Callable[[RedisServer], object]]] = {
    "killed": (RedisServer.kill, RedisServer.start),
    "full": (full, lambda server: server.admin.config_set("maxmemory", 0)),
    "frozen": (RedisServer.freeze, RedisServer.thaw),
    "read-only": (
        lambda server: server.admin.config_set("min-replicas-to-write", 1),
        lambda server: server.admin.config_set("min-replicas-to-write", 0),
    ),
    "emptied": (lambda server: server.admin.flushall(), lambda server: None),
}


async def run_through(server: RedisServer, fault: str) -> None:
    """One response runs through the fault, one ends within it. Both are as if there had been none."""
    break_it, mend_it = FAULTS[fault]
    async with AsyncExitStack() as stack:
        own, other = [await stack.enter_async_context(gateway(server)) for _ in range(2)]
        (through, through_ends), (within, within_ends) = [await begun(own) for _ in range(2)]
        ids = [through, within]
        watches = [Watch(api, each) for api in (own, other) for each in ids]
        watching = [asyncio.create_task(watch.run()) for watch in watches]

        async def until_heard(what: str, *by: Watch) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while {watch.heard[-1] for watch in by if watch.heard} != {what} or not all(w.heard for w in by):
                    assert not any(task.done() for task in watching), await asyncio.gather(*watching)
                    await asyncio.sleep(0.02)

        await until_heard("in_progress", *watches)
        break_it(server)
        within_ends.set()
        await asyncio.sleep(AWAY_S)
        if fault != "emptied":
            await until_heard("completed", watches[1])  # its gateway has the answer
        assert (await other.http.delete(f"/v1/responses/{through}")).status_code in (400, 503)
        mend_it(server)
        through_ends.set()
        await until_heard("completed", *watches)
        await asyncio.sleep(LEASE_S)
        for task in watching:
            task.cancel()
        for watch in watches:
            watch.check()
        for each in ids:
            path = f"/v1/responses/{each}"
            found = (await answered(other, "GET", path)).json()
            assert found["output"][0]["content"][0]["text"] == TEXT
            assert found == (await answered(own, "GET", path)).json()
            assert (await answered(other, "DELETE", path)).status_code in DELETED
        await asyncio.sleep(0.5 * LEASE_S)
        for api in (own, other):
            assert [await status(api, each) for each in ids] == ["404", "404"]


@pytest.mark.long
async def test_a_background_response_is_not_lost_with_redis_that_is_full(server: RedisServer):
    await run_through(server, "full")


@long
@pytest.mark.parametrize("fault", sorted({*FAULTS} - {"full"}))
async def test_a_background_response_is_not_lost_with_a_redis_that_is_gone_hangs_or_loses_all(
    server: RedisServer, fault: str
):
    await run_through(server, fault)


async def ended_here(own: Api, other: Api, server: RedisServer) -> str:
    """A response that ended while Redis took nothing: its gateway alone has it. Returns its id."""
    response_id, may_end = await begun(own)
    full(server)
    may_end.set()
    async with asyncio.timeout(PATIENCE_S):
        while await status(own, response_id) != "completed":
            await asyncio.sleep(0.02)
    assert await status(other, response_id) in GOING_ON
    return response_id


async def test_an_answer_that_its_gateway_holds_is_read_and_continued_there_and_cannot_be_deleted(server: RedisServer):
    async with gateway(server) as own, gateway(server) as other:
        response_id = await ended_here(own, other, server)
        turn = {"input": "Go on", "previous_response_id": response_id}
        path = f"/v1/responses/{response_id}"
        assert (await answered(own, "POST", "/v1/responses", turn)).status_code == 200
        assert (await answered(own, "GET", f"{path}/input_items")).status_code == 200
        events = await answered(own, "GET", f"{path}?stream=true")
        assert "response.completed" in events.text
        assert (await own.http.delete(path)).status_code == 503
        assert (await answered(own, "POST", f"{path}/cancel")).status_code == 400
        server.admin.config_set("maxmemory", 0)
        async with asyncio.timeout(PATIENCE_S):
            while await status(other, response_id) != "completed":
                await asyncio.sleep(0.05)
        assert (await answered(own, "DELETE", path)).status_code in DELETED
        await asyncio.sleep(0.5 * LEASE_S)
        assert [await status(api, response_id) for api in (own, other)] == ["404", "404"]


async def test_what_was_taken_for_lost_stays_so_and_its_gateway_ends_it(server: RedisServer):
    """The gateway alone lost its Redis for longer than its lease; the response is deleted meanwhile, or not."""
    async with gateway(server) as own, gateway(server) as other:
        (kept, _), (deleted, _) = [await begun(own) for _ in range(2)]
        while [await status(other, each) for each in (kept, deleted)] != ["in_progress"] * 2:
            await asyncio.sleep(0.05)
        for each in (kept, deleted):  # as if they had run out, and this gateway had claimed them
            server.admin.set(f"baton:response-lease:default:{each}", "over")
        assert [await status(other, each) for each in (kept, deleted)] == ["failed", "failed"]
        assert (await answered(other, "DELETE", f"/v1/responses/{deleted}")).status_code in DELETED
        async with asyncio.timeout(PATIENCE_S):
            while own.generator.running:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.5 * LEASE_S)
        for api in (own, other):
            assert await status(api, kept) == "failed"
            assert await status(api, deleted) == "404"
