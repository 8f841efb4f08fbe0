"""Hints of the Messages API: each is taken and named, changes no token, and is refused by name with --strict-fields."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from services.gateway.api.requests.hints import reason_of
from services.protocol.capsule import Capsule
from tests.gateway.running_api import Api, running_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

IGNORED = "x-baton-ignored-fields"
TOOL = {"name": "f", "input_schema": {"type": "object"}}
PLAIN: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
WITH_TOOL: dict[str, Any] = {"tools": [TOOL]}
VENDORS = [
    {"type": "web_search_20260318", "name": "web_search", "max_uses": 5},
    {"type": "web_fetch_20250910", "name": "web_fetch"},
    {"type": "code_execution_20260521", "name": "code_execution"},
    {"type": "computer_20251124", "name": "computer", "display_width_px": 800, "display_height_px": 600},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "memory_20250818", "name": "memory"},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "mcp_toolset", "mcp_server_name": "s", "cache_control": {"type": "ephemeral"}},
    {"type": "something_of_2030", "name": "x", "options": {"a": 1}},
]

# Fields with a hint, the path by which an answer names it, and the fields that the same request has without it.
HINTS: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, "context_management", {}),
    ({"context_management": "of any form"}, "context_management", {}),
    ({"compaction": {"type": "summarize"}}, "compaction", {}),
    ({"output_config": {"effort": "high"}}, "output_config.effort", {}),
    ({"output_config": {"effort": "endless"}}, "output_config.effort", {}),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget", {}),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens", {}),
    ({"thinking": {"type": "enabled", "budget_tokens": "all"}}, "thinking.budget_tokens", {}),
    ({"thinking": {"type": "adaptive", "display": "updates"}}, "thinking.display", {}),
    ({"thinking": {"type": "of 2030", "depth": 3}}, "thinking", {}),
    ({"thinking": "hard"}, "thinking", {}),
    ({"service_tier": "flex"}, "service_tier", {}),
    ({"speed": "fast"}, "speed", {}),
    ({"inference_geo": "us"}, "inference_geo", {}),
    ({"metadata": {"user_id": "u", "team": "x"}}, "metadata.team", {}),
    ({"metadata": {"user_id": 5}}, "metadata.user_id", {}),
    ({"metadata": "mine"}, "metadata", {}),
    ({"container": {"skills": []}}, "container", {}),
    ({"fallbacks": "default"}, "fallbacks", {}),
    ({"mcp_servers": [{"type": "url", "url": "https://x", "name": "s"}]}, "mcp_servers", {}),
    *(({"tools": [vendors]}, "tools[0]", {}) for vendors in VENDORS),
    ({"tools": [VENDORS[0], TOOL, VENDORS[1]]}, "tools[0], tools[2]", WITH_TOOL),
    ({"tools": [VENDORS[0]], "tool_choice": {"type": "auto"}}, "tools[0]", {}),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading", WITH_TOOL),
    ({"tools": [{**TOOL, "allowed_callers": ["code_execution_20260521"]}]}, "tools[0].allowed_callers", WITH_TOOL),
    ({"tools": [{**TOOL, "input_examples": [{"a": 1}]}]}, "tools[0].input_examples", WITH_TOOL),
    ({"tools": [{**TOOL, "type": "function"}]}, "tools[0].type", WITH_TOOL),
    (
        {
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: v=1;"},
                {"type": "text", "text": "Be brief."},
            ]
        },
        "system.x-anthropic-billing-header",
        {"system": "Be brief."},
    ),
    (
        {"system": "x-anthropic-billing-header: v=1; e=cli;\nBe brief."},
        "system.x-anthropic-billing-header",
        {"system": "Be brief."},
    ),
    ({"system": "x-anthropic-billing-header: v=2"}, "system.x-anthropic-billing-header", {}),
]
# What asks for nothing, or for what is always so, and is not named.
QUIET: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"cache_control": {"type": "of 2030", "scope": "global"}}, {}),
    ({"tools": []}, {}),
    ({"tool_choice": {"type": "auto"}}, {}),
    ({"tool_choice": {"type": "none"}}, {}),
    ({"tools": [{**TOOL, "eager_input_streaming": True, "cache_control": "x"}]}, WITH_TOOL),
    ({"tools": [{**TOOL, "defer_loading": False, "allowed_callers": ["direct"], "input_examples": []}]}, WITH_TOOL),
    ({"thinking": {"type": "enabled", "budget_tokens": 31_999}}, {}),
    ({"thinking": {"type": "disabled"}}, {}),
    ({"system": "Be brief: x-anthropic-billing-header: 1"}, {"system": "Be brief: x-anthropic-billing-header: 1"}),
    ({"system": ""}, {}),
    ({"metadata": {"user_id": "u"}, "service_tier": "auto", "speed": "standard"}, {}),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api() as running:
        running.generator.max_model_len = 2048
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict() -> AsyncIterator[Api]:
    async with running_api(strict_fields=True) as running:
        running.generator.max_model_len = 2048
        yield running


async def ask(api: Api, fields: dict[str, Any], path: str = "/v1/messages?beta=true") -> httpx2.Response:
    return await api.http.post(path, json={**PLAIN, **fields}, headers={"anthropic-beta": "of-2030-01-01"})


async def capsule(api: Api, fields: dict[str, Any]) -> Capsule:
    """What workers are sent, with the same seed for all."""
    api.generator.requests.clear()
    response = await ask(api, fields)
    assert response.status_code == 200, response.text
    (made,) = api.generator.requests[0].capsules
    return replace(made, sampling=replace(made.sampling, seed=0))


def same(one: Capsule, other: Capsule) -> bool:
    return one.token_ids.tolist() == other.token_ids.tolist() and one.sampling == other.sampling


@pytest.mark.parametrize(("fields", "named", "without"), HINTS, ids=str)
async def test_a_hint_is_named_and_changes_no_token(
    api: Api, strict: Api, fields: dict[str, Any], named: str, without: dict[str, Any]
):
    for stream in (False, True):
        response = await ask(api, {**fields, "stream": stream})
        assert (response.status_code, response.headers.get(IGNORED)) == (200, named)
    assert same(await capsule(api, fields), await capsule(api, without))
    refused = await ask(strict, fields)
    first = named.partition(",")[0]
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(f"{first}: ")
    assert reason_of(first) is not None or "Unrecognized" in refused.text


@pytest.mark.parametrize(("fields", "without"), QUIET, ids=str)
async def test_what_asks_for_nothing_is_not_named(
    api: Api, strict: Api, fields: dict[str, Any], without: dict[str, Any]
):
    for each in (api, strict):
        response = await ask(each, fields)
        assert (response.status_code, response.headers.get(IGNORED)) == (200, None)
    assert same(await capsule(api, fields), await capsule(api, without))


@pytest.mark.parametrize(("fields", "named", "without"), [*HINTS[:9], HINTS[21], HINTS[-1]], ids=str)
async def test_counting_takes_hints_too(api: Api, fields: dict[str, Any], named: str, without: dict[str, Any]):
    path = "/v1/messages/count_tokens"
    counts = []
    for each in (fields, without):
        response = await ask(api, {**each, "max_tokens": None}, path)
        assert response.status_code == 200, response.text
        counts.append(response.json())
    assert counts[0] == counts[1]


async def test_more_tokens_than_there_is_room_for_are_cut_to_the_room(api: Api):
    whole = await capsule(api, {"max_tokens": 32_000})
    assert whole.sampling.max_tokens == 2048 - len(whole.token_ids)
    response = await ask(api, {"max_tokens": 32_000})
    assert response.json()["stop_reason"] == "max_tokens"
    assert IGNORED not in response.headers


async def test_what_a_worker_would_be_sent_is_what_it_is_sent(api: Api):
    fields = {"max_tokens": 32_000, "system": "Be brief.", "top_k": 3, "speed": "fast", "stop_sequences": ["x"]}
    sent = await capsule(api, fields)
    rendered = await ask(api, fields, "/v1/messages/render")
    assert (rendered.status_code, rendered.headers[IGNORED]) == (200, "speed")
    answer = rendered.json()
    assert answer["request_id"] == f"msg_{rendered.headers['request-id']}"
    assert answer["token_ids"] == sent.token_ids.tolist()
    params = answer["sampling_params"]
    assert (params["max_tokens"], params["top_k"], params["stop"]) == (sent.sampling.max_tokens, 3, ["x"])
    assert len(api.generator.requests) == 1
    refused = await ask(api, {"max_tokens": 0}, "/v1/messages/render")
    assert (refused.status_code, refused.json()["type"]) == (400, "error")
