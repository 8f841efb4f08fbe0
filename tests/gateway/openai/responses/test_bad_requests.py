"""Bad requests for responses: each gets 400 and one envelope that names the field; nothing reaches a worker."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.gateway.openai.responses.store import MemoryResponseStore
from tests.gateway.openai.test_bad_input import assert_refused
from tests.gateway.running_api import Api, running_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOL = {"type": "function", "name": "f"}
NAMELESS_TOOL = {"type": "function"}
CUSTOM = {"type": "custom", "name": "f"}
BAD_LARK = {"syntax": "lark", "definition": "start: other"}
NAMELESS = {"type": "json_schema", "schema": {"type": "object"}}
BAD_SCHEMA = {"type": "json_schema", "name": "a", "schema": {"type": "strin"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api(response_store=MemoryResponseStore(60, time.monotonic)) as running:
        running.generator.max_model_len = 64
        yield running
        assert running.generator.requests == []


def message(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"input": [{"role": role, "content": [*parts]}]}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "empty_array"),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": [5]}, "input[0]", "invalid_value"),
        ({"input": ["x"]}, "input[0]", "invalid_value"),
        ({"input": [{"type": "web_search_call"}]}, "input", "empty_array"),
        ({"input": [{"type": ["x"]}]}, "input[0].type", "invalid_type"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id", "missing_required_parameter"),
        ({"input": [{"content": "x"}]}, "input[0].role", "missing_required_parameter"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
        (message({"type": "input_image", "image_url": "x"}), "input[0].content[0]", "unsupported_parameter"),
        (message({"type": "input_file", "file_id": "x"}), "input[0].content[0]", "unsupported_parameter"),
        (message("x"), "input[0].content[0]", "invalid_value"),
        (message({"text": "x"}), "input[0].content[0].type", "missing_required_parameter"),
        (message({"type": "input_text"}), "input[0].content[0].text", "missing_required_parameter"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "missing_required_parameter"),
        (
            {"input": [{"type": "function_call_output", "output": "x"}]},
            "input[0].call_id",
            "missing_required_parameter",
        ),
        ({"instructions": 5}, "instructions", "invalid_type"),
        ({"max_output_tokens": 0}, "max_output_tokens", "integer_below_min_value"),
        ({"input": "word " * 100}, "input", "context_length_exceeded"),
        ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
        ({"temperature": 2.5}, "temperature", "decimal_above_max_value"),
        ({"top_p": 0}, "top_p", "integer_below_min_value"),
        ({"top_k": -2}, "top_k", "integer_below_min_value"),
        ({"seed": 2**64}, "seed", None),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"stream": "x"}, "stream", "invalid_type"),
        ({"tools": [{"name": "f"}]}, "tools[0].type", "missing_required_parameter"),
        ({"tools": ["f"]}, "tools[0]", "invalid_value"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [NAMELESS_TOOL]}]}, "tools[0].tools[0].name", None),
        ({"tools": [{**CUSTOM, "format": {"type": "grammar"}}]}, "tools[0].format", "invalid_value"),
        ({"tools": [{**CUSTOM, "format": {"type": "grammar", **BAD_LARK}}]}, "tools", "invalid_grammar"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name", "invalid_value"),
        ({"tool_choice": "any"}, "tool_choice.type", "invalid_value"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "unsupported_parameter"),
        ({"tool_choice": {"type": "custom", "name": "f"}, "tools": [TOOL]}, "tool_choice", "invalid_value"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice", "invalid_value"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
        ({"text": {"format": NAMELESS}}, "text.format", "invalid_value"),
        ({"text": {"format": BAD_SCHEMA}}, "text.format", "invalid_grammar"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"include": [5]}, "include[0]", "invalid_type"),
        ({"top_logprobs": 2}, "top_logprobs", None),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
        ({"truncation": "auto", "input": "word " * 100}, "input", "context_length_exceeded"),
        ({"truncation": "left"}, "truncation", "invalid_value"),
        ({"background": True, "store": False}, "background", None),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
        ({"max_tool_calls": 0}, "max_tool_calls", "integer_below_min_value"),
        ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
        ({"kv_transfer_params": {}}, "kv_transfer_params", "unknown_parameter"),
        ({"previous_response_id": ""}, "previous_response_id", None),
    ],
)
async def test_bad_fields_are_named(api: Api, fields: dict[str, Any], param: str, code: str | None):
    assert_refused(await api.http.post("/v1/responses", json={"model": "m", "input": "Hi", **fields}), param, code)


async def test_nan_names_its_field(api: Api):
    body = b'{"input": "Hi", "temperature": NaN}'
    answer = await api.http.post("/v1/responses", content=body, headers={"content-type": "application/json"})
    assert_refused(answer, "temperature")


@pytest.mark.parametrize("response_id", ["resp_none", "x" * 300, "%00", "..%2F.."])
@pytest.mark.parametrize(
    ("method", "rest"), [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]
)
async def test_an_unknown_response_is_not_found(api: Api, response_id: str, method: str, rest: str):
    answer = await api.http.request(method, f"/v1/responses/{response_id}{rest}")
    assert_refused(answer, None, status=404)


async def test_another_model_is_not_found(api: Api):
    answer = await api.http.post("/v1/responses", json={"model": "other", "input": "Hi"})
    assert_refused(answer, "model", "model_not_found", status=404)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=x", "stream"),
        ("starting_after=1", "starting_after"),
    ],
)
async def test_bad_queries_are_named(api: Api, query: str, param: str):
    for path in ("/v1/responses/resp_1", "/v1/responses/resp_1/input_items"):
        assert_refused(await api.http.get(f"{path}?{query}"), param)


async def test_a_query_of_many_fields_is_refused(api: Api):
    assert_refused(await api.http.get("/v1/responses/resp_1?" + "&".join(f"a{n}=1" for n in range(100))), None)


async def test_a_conversation_has_a_bound(api: Api):
    items = [{"role": "user", "content": "x"}] * 2049
    assert_refused(await api.http.post("/v1/responses", json={"input": items}), "input", "array_above_max_length")


async def test_fields_that_nobody_knows_are_named_wherever_they_are():
    body = {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi", "b": 1}], "a": 1}],
        "c": 1,
        "tool_choice": "auto",
    }
    async with running_api() as api:
        answer = await api.http.post("/v1/responses", json=body)
        assert answer.headers["x-baton-ignored-fields"] == "c, input[0].a, input[0].content[0].b"
    async with running_api(strict_fields=True) as api:
        assert_refused(await api.http.post("/v1/responses", json=body), "c", "unknown_parameter")


async def test_pages_of_input_items_have_bounds():
    async with running_api(response_store=MemoryResponseStore(60, time.monotonic)) as api:
        kept = (await api.http.post("/v1/responses", json={"input": "Hi"})).json()["id"]
        path = f"/v1/responses/{kept}/input_items"
        for query in ("limit=0", "limit=101", "limit=x", "limit=", "limit=²", "order=up", "after=msg_1"):
            assert_refused(await api.http.get(f"{path}?{query}"), query.partition("=")[0])


async def test_what_cannot_be_included_when_a_response_is_read_is_named():
    query = "include[]=message.output_text.logprobs&include[]=reasoning.encrypted_content"
    async with running_api(response_store=MemoryResponseStore(60, time.monotonic)) as api:
        kept = (await api.http.post("/v1/responses", json={"input": "Hi"})).json()["id"]
        for path in (f"/v1/responses/{kept}", f"/v1/responses/{kept}/input_items"):
            answer = await api.http.get(f"{path}?{query}")
            assert (answer.status_code, answer.headers["x-baton-ignored-fields"]) == (200, "include[1]")
    async with running_api(strict_fields=True) as api:
        assert_refused(await api.http.get(f"/v1/responses/resp_1?{query}"), "include[1]", "unsupported_parameter")
