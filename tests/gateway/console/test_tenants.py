"""Who sees what: a key's own requests, and nothing of others or of the fleet; the ports with and without keys."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from kvtransfer.moved import Moved
from services.config import WorkerRole
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.records.attempt_record import AttemptRecord, AttemptRecords, AtWorker
from services.gateway.console import feed as feeds
from services.gateway.keys.authentication import Keys
from services.gateway.keys.changes import revoke_key
from services.gateway.keys.file import read_keys
from tests.gateway.console.feed_reader import feed
from tests.gateway.keys.key_files import KeySet, bearer
from tests.gateway.running_api import MODEL, Api, running_api
from tests.gateway.scripted_generator import Script, delta_per_token

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
HIDDEN = ("workers", "links", "unhealthy", "gateway", "redis")  # parts of a tick
ADDRESSES = ("prefill.internal:9100", "decode.internal:9200")
LISTENING = ["/console/about", "/console/feed", "/console/requests/some-id"]


@pytest_asyncio.fixture
async def api(key_set: KeySet) -> AsyncIterator[Api]:
    async with running_api(keys=key_set.keys()) as running:
        yield running


async def ask(api: Api, key: str, **headers: str) -> str:
    answer = await api.http.post("/v1/chat/completions", json=CHAT, headers=bearer(key) | headers)
    assert answer.status_code == 200
    return answer.headers["x-request-id"]


async def test_two_keys_see_their_own_requests_alone(api: Api, key_set: KeySet):
    mine, others = await ask(api, key_set.acme), await ask(api, key_set.other)
    async with feed(api.http, bearer(key_set.acme)) as acme, feed(api.http, bearer(key_set.other)) as other:
        for listener, seen in ((acme, mine), (other, others)):
            _, hello = await listener.any()
            assert (hello["sees"], hello["history"]["samples"], hello["events"]) == ("own", [], [])
            assert [row["id"] for row in hello["requests"]] == [seen]
        gate = asyncio.Event()
        api.generator.script = Script(delta_per_token([*b"Hello"]), gate=gate, before_gate=1)
        asking = [asyncio.create_task(ask(api, key)) for key in (key_set.acme, key_set.other, "plain-key")]
        for listener in (acme, other):
            await listener.row(lambda row: row["state"] == "in flight" and row["ttft_ms"] is not None)
        gate.set()
        later = await asyncio.gather(*asking)
        for listener in (acme, other):
            await listener.row(lambda row: row["state"] == "done" and row["n"] > 1)
            await listener.next("tick")
    assert {row["id"] for row in acme.rows.values()} == {mine, later[0]}
    assert {row["id"] for row in other.rows.values()} == {others, later[1]}
    for listener in (acme, other):
        assert {name for name, _ in listener.seen} == {"hello", "requests", "tick"}
        assert all(data.keys() == {"now"} for name, data in listener.seen if name == "tick")


async def test_one_request_is_shown_to_its_own_key_and_to_who_runs_the_gateway(api: Api, key_set: KeySet):
    mine = await ask(api, key_set.acme)
    path = f"/console/requests/{mine}"
    assert (await api.http.get(path, headers=bearer(key_set.acme))).json()["request_id"] == mine
    assert (await api.http.get(path, headers=bearer(key_set.other))).status_code == 404
    for key in (key_set.operator, "plain-key"):
        assert (await api.http.get(path, headers=bearer(key))).status_code == 200
        assert (await api.admin.get(path, headers=bearer(key))).status_code == 200


class TwoWorkers:
    """See Decision."""

    def describe(self) -> dict[str, object]:
        candidates = [{"worker": address} for address in ADDRESSES]
        return {"why": "sooner", "expected_s": {"pair": 0.1, "alone": 0.2}, "candidates": candidates}


def note_attempt(request: GenerationRequest) -> Script:
    """Has an attempt at two workers noted, which failed and then brought an answer."""
    workers = dict(zip((WorkerRole.PREFILL, WorkerRole.DECODE), ADDRESSES, strict=True))
    attempt = AttemptRecord(1, [0], 2, workers, WorkerRole.PREFILL, {}, 1.0, decision=TwoWorkers(), first_token=2.0)
    moved = Moved("nixl", f"{ADDRESSES[1]} is another host", 64, 0.1)
    attempt.at = {WorkerRole.DECODE: AtWorker(1.0, None, 1.1, 1.2, 1.3, 0.1, moved)}
    attempt.failure = f"HANDOFF: {ADDRESSES[0]} does not answer"
    assert isinstance(request.attempts, AttemptRecords)
    request.attempts.add(attempt)
    return Script(delta_per_token([*b"Hello"]))


async def test_a_tenant_is_told_of_no_worker(api: Api, key_set: KeySet):
    api.generator.answer = note_attempt
    for key in ("plain-key", key_set.other, key_set.acme):
        request_id = await ask(api, key)
    async with feed(api.http, bearer(key_set.acme)) as listener:
        await listener.next("tick")
        await ask(api, key_set.acme)
        await listener.row(lambda row: row["n"] == 2 and row["state"] == "done")
    assert sorted(listener.rows) == [1, 2], "numbers say nothing of how many requests others have"
    page = await api.http.get(f"/console/requests/{request_id}?n=1", headers=bearer(key_set.acme))
    about = (await api.http.get("/console/about", headers=bearer(key_set.acme))).json()
    told = f"{listener.seen} {page.text} {about}"
    assert not [word for word in (*ADDRESSES, "nixl", "sooner", api.fleet.gateway_id()) if word in told]
    assert not {"pid", "gateway"} & about.keys()
    (attempt,) = page.json()["attempts"]
    assert attempt["failure"] == "the handoff between two workers ended early"
    assert [(worker["role"], worker["kv_bytes"]) for worker in attempt["workers"]] == [("prefill", 0), ("decode", 64)]
    whole = (await api.admin.get(f"/console/requests/{request_id}", headers=bearer("plain-key"))).json()
    assert [*whole["workers"].values()] == [*ADDRESSES]
    assert (whole["number"], whole["attempts"][0]["candidates"][0]["worker"]) == (3, ADDRESSES[0])


async def test_an_id_that_two_tenants_chose_shows_each_its_own(api: Api, key_set: KeySet):
    for key in (key_set.acme, key_set.other):
        await ask(api, key, **{"x-request-id": "the-same"})
    found = []
    for key in (key_set.acme, key_set.other):
        answer = (await api.http.get("/console/requests/the-same?n=1", headers=bearer(key))).json()
        assert answer["number"] == 1, "it counts the requests of its own key"
        found.append(answer["key_id"])
        assert (await api.http.get("/console/requests/the-same?n=2", headers=bearer(key))).status_code == 404
    assert len({*found}) == 2
    for number, key_id in enumerate(found, 1):
        answer = await api.admin.get(f"/console/requests/the-same?n={number}", headers=bearer(key_set.operator))
        assert (answer.json()["key_id"], answer.json()["number"]) == (key_id, number)
    assert (await api.admin.get("/console/requests/x?n=y", headers=bearer("plain-key"))).status_code == 400
    many = "1" * 5000
    assert (await api.admin.get(f"/console/requests/x?n={many}", headers=bearer("plain-key"))).status_code == 400


async def test_an_admin_key_sees_everything_at_either_port(api: Api, key_set: KeySet):
    ids = {await ask(api, key) for key in (key_set.acme, key_set.other)}
    for client in (api.http, api.admin):
        for key in (key_set.operator, "plain-key"):
            async with feed(client, bearer(key)) as listener:
                hello = await listener.next("hello")
                tick = await listener.next("tick")
            assert hello["sees"] == "all"
            assert ids == {row["id"] for row in hello["requests"]}
            assert all(name in tick for name in HIDDEN)
            assert hello["api"] == ("../v1" if client is api.http else "api/v1")


@pytest.mark.parametrize("path", LISTENING)
async def test_a_stranger_hears_nothing(api: Api, path: str):
    for client in (api.http, api.admin):
        for headers in ({}, bearer("wrong"), {"x-api-key": "wrong"}):
            assert (await client.get(path, headers=headers)).status_code == 401
        assert (await client.get(f"{path}?key=plain-key&api_key=plain-key")).status_code == 401, "no key is in a URL"


@pytest.mark.parametrize("path", LISTENING)
async def test_a_tenant_s_key_does_not_open_the_admin_port(api: Api, key_set: KeySet, path: str):
    assert (await api.admin.get(path, headers=bearer(key_set.acme))).status_code == 403
    posted = await api.admin.post("/console/api/v1/chat/completions", json=CHAT, headers=bearer(key_set.acme))
    assert posted.status_code == 403


async def test_the_pages_themselves_ask_for_no_key(api: Api):
    for client in (api.http, api.admin):
        for path in ("/console/", "/console/index.html", "/console/plotly.min.js"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/console")).headers["location"] == "console/"
        assert (await client.get("/console/no-such-file.js")).status_code == 401


async def test_without_keys_the_console_is_at_the_admin_port_alone():
    async with running_api() as api:
        for path in ("/console", "/console/", *LISTENING):
            refused = await api.http.get(path)
            assert refused.status_code == 404
            said = f"Paths like it are at the admin port, {api.admin.base_url.port}: see --admin-port."
            assert said in refused.json()["error"]["message"]
        about = (await api.admin.get("/console/about")).json()
        assert (about["sees"], about["key_id"], about["models"]) == ("all", None, [MODEL])


async def test_a_key_that_is_revoked_hears_no_more(key_set: KeySet):
    keys = Keys(("plain-key",), read_keys(key_set.path))
    async with running_api(keys=keys) as api, feed(api.http, bearer(key_set.acme)) as listener:
        key_id = (await listener.next("hello"))["key_id"]
        async with feed(api.http, bearer(key_set.other)) as other:
            revoke_key(key_set.path, key_id)
            keys.use(read_keys(key_set.path))
            *_, last = await listener.rest()
            assert last == ("end", {"why": "the key is not valid any more"})
            await other.next("tick")
            assert (await api.http.get("/console/feed", headers=bearer(key_set.acme))).status_code == 401


async def test_a_console_is_no_request_that_is_being_answered(api: Api, key_set: KeySet):
    async with feed(api.http, bearer(key_set.acme)) as listener:
        await listener.next("tick")
        assert (await api.http.get("/load", headers=bearer(key_set.acme))).json() == {"server_load": 0}
        assert "baton_requests_in_flight 0.0" in (await api.admin.get("/metrics")).text.splitlines()


async def test_tenants_leave_room_for_who_runs_the_gateway(api: Api, key_set: KeySet):
    async with AsyncExitStack() as stack:
        acme = [await stack.enter_async_context(feed(api.http, bearer(key_set.acme))) for _ in range(feeds.MAX_OF_KEY)]
        await acme[-1].next("tick")
        refused = await api.http.get("/console/feed", headers=bearer(key_set.acme))
        assert (refused.status_code, feeds.MAX_OF_KEY) == (503, 4)
        assert refused.json()["error"]["message"].startswith("4 consoles with this key listen already.")
        for key in (key_set.other, "plain-key"):
            listener = await stack.enter_async_context(feed(api.http, bearer(key)))
            await listener.next("tick")


async def test_the_playground_asks_the_api_at_the_admin_port(api: Api, key_set: KeySet):
    plain = bearer("plain-key")
    answer = await api.admin.post("/console/api/v1/chat/completions", json=CHAT, headers=plain)
    assert answer.json()["choices"][0]["message"]["content"] == "Hello"
    assert (await api.admin.get("/console/api/v1/models", headers=plain)).json()["data"][0]["id"] == MODEL
    without = await api.admin.post("/console/api/v1/chat/completions", json=CHAT, headers=bearer(key_set.operator))
    assert without.status_code == 403, "who runs the gateway may still not generate"
    assert (await api.admin.get("/console/api/v1/models", headers=bearer(key_set.operator))).status_code == 403
    (row,) = (await api.admin.get("/debug/requests", headers=plain)).json()["requests"]
    assert (row["endpoint"], row["status"]) == ("chat.completions", 200)
    assert (await api.http.post("/console/api/v1/chat/completions", json=CHAT, headers=plain)).status_code == 405
