"""Bad requests, and requests for what is not there: the status, the form of the error, and the field that it names."""

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from services.gateway.anthropic_api.request import NEUTRAL, MessagesRequest
from tests.gateway.running_api import Api, running_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
IGNORED = "x-baton-ignored-fields"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict() -> AsyncIterator[Api]:
    async with running_api(strict_fields=True) as running:
        yield running


async def ask(api: Api, path: str = MESSAGES, /, **fields: Any) -> httpx2.Response:
    body = {"model": "m", "max_tokens": 9, "messages": HI, **fields}
    return await api.http.post(path, json={name: value for name, value in body.items() if value != "left out"})


def user(*blocks: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


TEXT = {"type": "text", "text": "Hi"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://x"}}
CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
WEB_SEARCH = {"type": "web_search_20260318", "name": "web_search"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
FORM = {"type": "json_schema", "schema": {"type": "object"}}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": "left out"}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages: prompt is too long"),
    ({"messages": "left out"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": 5}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": user("Hi")}, "messages[0].content[0]"),
    ({"messages": user({"text": "Hi"})}, "messages[0].content[0]"),
    ({"messages": user({"type": "text", "text": 5})}, "messages[0].content[0].text"),
    ({"messages": user(IMAGE)}, "messages[0].content[0]"),
    ({"messages": user({"type": "document", "source": {"type": "base64", "data": ""}})}, "messages[0].content[0]"),
    ({"messages": user({"type": "input_audio"})}, "messages[0].content[0]"),
    ({"messages": [*HI, {"role": "assistant", "content": "?"}, *user(TEXT, IMAGE)]}, "messages[2].content[1]"),
    ({"messages": [*HI, {"role": "assistant", "content": [CALL]}]}, "messages"),
    (
        {"messages": user({"type": "tool_result", "tool_use_id": [], "content": "x"})},
        "messages[0].content[0].tool_use_id",
    ),
    ({"system": 5}, "system"),
    ({"system": [IMAGE]}, "system[0]"),
    ({"temperature": 1.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
    ({"stream": "yes"}, "stream"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [TOOL, WEB_SEARCH, {**TOOL, "name": "a b"}]}, "tools[2].name"),
    ({"tools": [WEB_SEARCH, TOOL, TOOL]}, "tools[2].name"),
    ({"tools": [TOOL, WEB_SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice"),
    ({"tools": [WEB_SEARCH], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "odd"}}}}, "output_config.format"),
    ({"output_config": {"format": FORM}, "output_format": FORM}, "output_format"),
    ({"output_format": FORM, "messages": [*HI, {"role": "assistant", "content": "{"}]}, "output_config.format"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"kv_transfer_params": {}}, "kv_transfer_params"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=str)
async def test_bad_requests_name_the_field(api: Api, fields: dict[str, Any], param: str):
    api.generator.requests.clear()
    for stream in ({}, {"stream": True}):
        response = await ask(api, **{**stream, **fields})
        assert response.status_code == 400
        body = response.json()
        assert set(body) == {"type", "error", "request_id"}
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert body["error"]["message"].startswith(f"{param}")
        assert body["request_id"] == response.headers["request-id"]
    assert api.generator.requests == []


@pytest.mark.parametrize("body", [b"", b"{", b"null", b"[]", b"\xff", b"[" * 100_000])
async def test_a_body_that_is_no_object(api: Api, body: bytes):
    for path in (MESSAGES, COUNT):
        response = await api.http.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_of_another_type(api: Api):
    response = await api.http.post("/v1/messages", content=b"{}", headers={"content-type": "text/plain"})
    assert (response.status_code, response.json()["error"]["type"]) == (415, "invalid_request_error")


async def test_null_passes_for_every_optional_field(api: Api):
    fields = {*MessagesRequest.model_fields, *NEUTRAL} - {"model", "messages", "max_tokens"}
    response = await ask(api, MESSAGES, **dict.fromkeys(fields))
    assert response.status_code == 200, response.text


async def test_what_asks_for_nothing_passes(api: Api):
    cached: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    response = await ask(
        api,
        MESSAGES,
        **cached,
        messages=user({"type": "text", "text": "Hi", **cached}),
        system=[{"type": "text", "text": "Be brief.", **cached}],
        tools=[],
        thinking={"type": "disabled"},
        metadata={"user_id": "someone"},
        service_tier="standard_only",
        speed="standard",
        mcp_servers=[],
    )
    assert response.status_code == 200, response.text
    assert IGNORED not in response.headers


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"nobody": 1}, "nobody"),
    ({"metadata": {"nobody": 1}}, "metadata.nobody"),
    ({"messages": user({"type": "text", "text": "Hi", "nobody": 1})}, "messages[0].content[0].nobody"),
    ({"messages": [{"role": "user", "content": "Hi", "name": "x"}]}, "messages[0].name"),
]


@pytest.mark.parametrize(("fields", "path"), UNKNOWN, ids=[path for _, path in UNKNOWN])
async def test_fields_that_nobody_knows_are_named_and_do_nothing(
    api: Api, strict: Api, fields: dict[str, Any], path: str
):
    for stream in (False, True):
        response = await ask(api, **fields, stream=stream)
        assert (response.status_code, response.headers[IGNORED]) == (200, path)
    refused = await ask(strict, **fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(f"{path}: Unrecognized")


async def test_counting_knows_only_what_makes_the_prompt(api: Api, strict: Api):
    counted = await ask(api, COUNT)
    assert (counted.status_code, counted.headers[IGNORED]) == (200, "max_tokens")
    assert (await ask(strict, COUNT)).status_code == 400
    assert (await ask(strict, COUNT, max_tokens="left out")).status_code == 200


async def test_paths_that_no_api_has_answer_as_openai_does(api: Api):
    response = await api.http.post("/v1/messages/batches", json={})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")
