"""Keys over HTTP: asked for at every path but the open ones, and what becomes of the caller's tenant."""

import asyncio
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest
import pytest_asyncio
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from services.gateway.http.application import Application
from services.gateway.openai.docs_page import SCRIPT, STYLE
from services.gateway.openai.responses.store import MemoryResponseStore
from tests.gateway.keys.key_files import KeySet, bearer
from tests.gateway.running_api import MODEL, Api, running_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONSOLE = {"/console", "/console/"}
OPEN = {*CONSOLE, "/", "/health", "/ping", "/ready", "/openapi.json", "/docs", f"/docs/{STYLE}", f"/docs/{SCRIPT}"}
OPEN_AT_ADMIN = {*CONSOLE, "/health", "/ready", "/metrics"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
MESSAGE = {**CHAT, "max_tokens": 5}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(key_set: KeySet) -> AsyncIterator[Api]:
    store = MemoryResponseStore(60, time.monotonic)
    async with running_api(
        keys=key_set.keys(),
        response_store=store,
        tokenizer_info={"a": 1},
        allowed_origins=("https://page.example",),
    ) as running:
        yield running


def routes(app: ASGIApp) -> Iterator[tuple[str, str]]:
    """Path and method of everything that an application answers, found by asking the application."""
    while not isinstance(app, Application):
        app = app.app  # type: ignore[attr-defined]  # CORS around it
    every: list[BaseRoute] = app.router.routes
    assert all(isinstance(each, Route) for each in every)
    for each in every:
        assert isinstance(each, Route)
        for method in each.methods or ():
            yield re.sub(r"{\w+(:path)?}", "some-id", each.path), method


async def test_every_route_but_the_open_ones_refuses_who_has_no_key_or_a_wrong_one(api: Api):
    app, admin_app = api.applications
    for application, client, open_paths, least in ((app, api.http, OPEN, 20), (admin_app, api.admin, OPEN_AT_ADMIN, 6)):
        every = set(routes(application))
        assert len({path for path, _ in every}) >= least
        assert {path for path, _ in every} >= open_paths
        for path, method in every:
            for headers in ({}, bearer("wrong"), {"x-api-key": "wrong"}):
                answer = await client.request(method, path, headers=headers)
                if path in open_paths:
                    assert answer.status_code == (307 if path == "/console" else 200), path
                else:
                    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), path


@pytest.mark.parametrize("path", ["/nothing", "/v1/nothing", "/x//health", "/health/", "/docs/"])
async def test_a_path_that_there_is_not_tells_a_stranger_nothing(api: Api, path: str):
    assert (await api.http.get(path)).status_code == 401
    assert (await api.http.post("/v1/models", json={})).status_code == 401
    assert (await api.http.get(path, headers=bearer("plain-key"))).status_code == 404


async def test_the_error_is_in_the_form_of_the_api_that_was_asked(api: Api):
    answer = await api.http.post("/v1/chat/completions", json=CHAT)
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
    assert error["message"].startswith("No API key was provided.")
    answer = await api.http.post("/v1/messages", json=MESSAGE, headers={"x-api-key": "wrong"})
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "authentication_error"
    assert answer.json()["error"]["message"].startswith("Incorrect API key provided.")
    assert answer.headers["request-id"] == answer.json()["request_id"]


async def test_official_clients_send_their_keys_and_know_the_errors(api: Api, key_set: KeySet):
    async with (
        openai.AsyncOpenAI(base_url=f"{api.base_url}/v1", api_key=key_set.acme, max_retries=0) as good,
        openai.AsyncOpenAI(base_url=f"{api.base_url}/v1", api_key="wrong", max_retries=0) as bad,
        anthropic.AsyncAnthropic(base_url=api.base_url, api_key=key_set.acme, max_retries=0) as good_too,
        anthropic.AsyncAnthropic(base_url=api.base_url, api_key="wrong", max_retries=0) as bad_too,
        anthropic.AsyncAnthropic(base_url=api.base_url, api_key=key_set.operator, max_retries=0) as operator,
    ):
        assert (await good.chat.completions.create(**CHAT)).choices[0].message.content == "Hello"
        assert (await good_too.messages.create(**MESSAGE)).content
        with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
            await bad.chat.completions.create(**CHAT)
        with pytest.raises(anthropic.AuthenticationError, match="Incorrect API key"):
            await bad_too.messages.create(**MESSAGE)
        with pytest.raises(anthropic.PermissionDeniedError, match="lacks the right 'api'"):
            await operator.messages.create(**MESSAGE)


async def test_a_stranger_s_body_is_not_read(api: Api):
    """The answer comes while the body is still on its way, and the connection ends."""

    def ask() -> tuple[bytes, bytes]:
        with socket.create_connection(("127.0.0.1", api.port), timeout=30) as connection:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(head + b"Content-Length: 1000000\r\n\r\n{")
            with connection.makefile("rb") as answer:
                status, rest = answer.readline(), answer.read()
            return status, rest

    status, rest = await asyncio.to_thread(ask)
    assert status == b"HTTP/1.1 401 Unauthorized\r\n"
    assert b"connection: close" in rest


async def test_a_page_of_an_allowed_origin_may_ask_what_it_may_send(api: Api, key_set: KeySet):
    """A browser sends no key with that question."""
    origin = {"origin": "https://page.example"}
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    asked = await api.http.options("/v1/chat/completions", headers={**origin, **ask})
    assert asked.status_code == 200
    assert "authorization" in asked.headers["access-control-allow-headers"]
    answer = await api.http.post("/v1/chat/completions", json=CHAT, headers={**origin, **bearer(key_set.acme)})
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    refused = await api.http.options("/v1/chat/completions")
    assert refused.status_code == 401


async def test_debug_pages_are_for_keys_with_the_right(api: Api, key_set: KeySet):
    assert (await api.admin.get("/debug/ledger", headers=bearer(key_set.acme))).status_code == 403
    for key in (key_set.operator, "plain-key"):
        assert (await api.admin.get("/debug/ledger", headers=bearer(key))).status_code == 200
    assert (await api.http.get("/v1/models", headers=bearer(key_set.operator))).status_code == 403


async def test_requests_go_to_workers_under_their_tenant_with_its_salt(api: Api, key_set: KeySet):
    async def capsule(key: str, **fields: Any) -> Any:
        answer = await api.http.post("/v1/chat/completions", json=CHAT | fields, headers=bearer(key))
        assert answer.status_code == 200
        return api.generator.requests[-1]

    acme, again, salted, other = (
        await capsule(key_set.acme),
        await capsule(key_set.acme, session_id="s"),
        await capsule(key_set.acme, cache_salt="mine"),
        await capsule(key_set.other, session_id="s"),
    )
    assert [each.tenant for each in (acme, again, salted, other)] == ["acme", "acme", "acme", "other"]
    salts = [each.capsules[0].cache_salt for each in (acme, again, salted, other)]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 3
    assert salts[2] == salts[0] + "mine"
    assert again.session != other.session


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
async def test_every_endpoint_that_generates_salts(api: Api, key_set: KeySet, path: str):
    bodies = {
        "/v1/chat/completions": CHAT,
        "/v1/completions": {"model": MODEL, "prompt": "Hi"},
        "/v1/messages": MESSAGE,
        "/v1/responses": {"model": MODEL, "input": "Hi"},
    }
    salts = set()
    for key in (key_set.acme, key_set.acme, key_set.other):
        assert (await api.http.post(path, json=bodies[path], headers=bearer(key))).status_code == 200
        salts.add(api.generator.requests[-1].capsules[0].cache_salt)
    assert len(salts) == 2
    assert "" not in salts


async def test_so_do_embeddings(api: Api, key_set: KeySet):
    api.generator.script.as_asked = True
    salts = set()
    for key in (key_set.acme, key_set.other):
        body = {"model": MODEL, "input": "Hi"}
        assert (await api.http.post("/v1/embeddings", json=body, headers=bearer(key))).status_code == 200
        salts.add(api.generator.requests[-1].capsules[0].cache_salt)
    api.generator.script.as_asked = False
    assert len(salts) == 2


async def test_a_key_s_priority_is_a_bound(api: Api, key_set: KeySet):
    async def ask(key: str, **fields: Any) -> httpx2.Response:
        return await api.http.post("/v1/chat/completions", json=CHAT | fields, headers=bearer(key))

    assert (await ask(key_set.patient)).status_code == 200
    assert api.generator.requests[-1].capsules[0].priority == 5
    refused = await ask(key_set.patient, priority=4)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    assert (await ask(key_set.acme, priority=-1)).status_code == 400
    assert (await ask("plain-key", priority=-1)).status_code == 200


async def test_a_tenant_s_responses_are_there_for_it_alone(api: Api, key_set: KeySet):
    body = {"model": MODEL, "input": "Hi", "store": True}
    response = (await api.http.post("/v1/responses", json=body, headers=bearer(key_set.acme))).json()
    created, reference = response["id"], {"type": "item_reference", "id": response["output"][0]["id"]}
    mine, others = bearer(key_set.acme), bearer(key_set.other)
    for path in (f"/v1/responses/{created}", f"/v1/responses/{created}/input_items"):
        assert (await api.http.get(path, headers=others)).status_code == 404
        assert (await api.http.get(path, headers=mine)).status_code == 200
    for follow in ({**body, "previous_response_id": created}, {**body, "input": [reference]}):
        assert (await api.http.post("/v1/responses", json=follow, headers=others)).status_code == 404
        assert (await api.http.post("/v1/responses", json=follow, headers=mine)).status_code == 200
    assert (await api.http.post(f"/v1/responses/{created}/cancel", headers=others)).status_code == 404
    assert (await api.http.delete(f"/v1/responses/{created}", headers=others)).status_code == 404
    assert (await api.http.delete(f"/v1/responses/{created}", headers=mine)).status_code == 200


async def test_the_log_and_the_record_of_a_request_name_the_key_and_do_not_have_it(
    api: Api, key_set: KeySet, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)  # of every library too
    for key in (key_set.acme, "wrong-key"):
        await api.http.post("/v1/chat/completions", json=CHAT, headers=bearer(key))
    (line, *_) = (line for line in api.logs if line["event"] == "request")
    operator = bearer(key_set.operator)
    listed = (await api.admin.get("/debug/requests", headers=operator)).text
    one = (await api.admin.get(f"/debug/requests/{line['request_id']}", headers=operator)).text
    metrics = (await api.admin.get("/metrics")).text
    assert f'"key_id":"{line["key_id"]}"' in listed
    assert 'baton_requests_total{endpoint="chat.completions",status="401"}' in metrics
    salt = api.generator.requests[-1].capsules[0].cache_salt
    for text in (str(api.logs), caplog.text, listed, one, metrics):
        assert not any(secret in text for secret in (*key_set.secrets, "wrong-key", "plain-key", salt))


async def test_the_description_of_the_api_says_where_keys_are_asked_for(api: Api, key_set: KeySet):
    document = (await api.http.get("/openapi.json")).json()
    assert document["paths"]["/v1/models/{model}"]["get"]["parameters"][0]["example"] == "MODEL"  # nor which model
    assert document["components"]["securitySchemes"].keys() == {"bearer", "x-api-key"}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert ("security" in operation, "401" in operation["responses"]) == ((path not in OPEN),) * 2


async def test_a_defect_in_the_lookup_admits_nobody():
    """Whatever goes wrong there, the request goes no further."""

    class Defect:
        def caller(self, header: object, right: object) -> Any:
            raise RuntimeError("a defect")

    async with running_api(keys=Defect()) as broken:
        answer = await broken.http.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 500
        assert broken.generator.requests == []


async def test_without_keys_nobody_is_asked():
    async with running_api() as api:
        answer = await api.http.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 200
        assert api.generator.requests[-1].capsules[0].cache_salt == ""
        assert '"security":' not in (await api.http.get("/openapi.json")).text
        assert (await api.admin.get("/debug/ledger")).status_code == 200
