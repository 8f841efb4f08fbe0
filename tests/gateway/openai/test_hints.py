"""Hints are taken and named at every API, and change nothing; strict servers refuse them by name."""

import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.gateway.anthropic_api.request import NEUTRAL as MESSAGES_NEUTRAL
from services.gateway.anthropic_api.request import MessagesRequest
from services.gateway.api.dialects.completions import CompletionRequest
from services.gateway.api.records.request_record import IGNORED_FIELDS
from services.gateway.api.requests.chat import ChatRequest
from services.gateway.api.requests.hints import HINTS, Hinting, reason_of
from services.gateway.cohere_api.chat_request import CHAT_NEUTRAL as COHERE_NEUTRAL
from services.gateway.cohere_api.chat_request import CohereChatRequest
from services.gateway.cohere_api.embed_request import EmbedRequest
from services.gateway.openai.neutral import CHAT_NEUTRAL, COMPLETIONS_NEUTRAL, RESPONSES_NEUTRAL
from services.gateway.openai.responses.request import ResponsesRequest
from tests.gateway.running_api import MODEL, Api, running_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Each hint with a value that this model does not act on.
VALUES: dict[str, Any] = {
    "billing_policy": {"any": "thing"},
    "compaction": {"type": "summarize"},
    "container": "of-2030",
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "diagnostics": {"any": "thing"},
    "fallback_credit_token": "x",
    "fallbacks": "default",
    "guided_decoding_backend": "xgrammar",
    "include": ["reasoning.encrypted_content"],
    "inference_geo": "us",
    "mcp_servers": [{"type": "url", "url": "https://x", "name": "s"}],
    "input_type": "search_query",
    "input": [{"role": "user", "content": "Hi"}, {"type": "web_search_call", "id": "ws_1"}],
    "media_io_kwargs": {"video": {"num_frames": 40}},
    "mm_processor_kwargs": {"num_crops": 4},
    "output_config": {"effort": "utmost"},
    "prediction": {"type": "content", "content": "Hello"},
    "prompt_cache_options": {"ttl": "1h"},
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "utmost", "summary": "concise", "generate_summary": "concise"},
    "reasoning_effort": "utmost",
    "return_token_offsets": True,
    "service_tier": "flex",
    "speed": "fast",
    "store": True,
    "text": {"verbosity": "low"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "thinking_token_budget": 1024,
    "tools": [{"type": "web_search"}],
    "verbosity": "low",
    "web_search_options": {"search_context_size": "low"},
}
# Fields of which only some entries are hints: tests/gateway/anthropic_api/test_hints.py.
_WITH_A_PLACE = {"messages", "metadata", "system"}
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**MESSAGES, "seed": 1},
    "/v1/completions": {"prompt": "Hi", "seed": 1},
    "/v1/responses": {"input": "Hi", "seed": 1},
    "/v1/messages": {**MESSAGES, "max_tokens": 2048, "temperature": 0},
    "/v2/chat": {**MESSAGES, "seed": 1},
}
# A response is kept. Tools of a vendor's in messages have tests of their own.
ELSEWHERE = {("/v1/responses", "store"), ("/v1/messages", "tools"), ("/v2/chat", "tools")}
CASES = [(path, name) for path in BODIES for name in VALUES if (path, name) not in ELSEWHERE]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api() as running:
        running.generator.max_model_len = 4096
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict() -> AsyncIterator[Api]:
    async with running_api(strict_fields=True) as running:
        yield running


def is_named(path: str, name: str) -> bool:
    """True for a hint that is this field, or inside it; or where the API knows no such field, for the field."""
    return path == name or (re.split(r"\W", path)[0] == name and reason_of(path) is not None)


@pytest.mark.few(40)
@pytest.mark.parametrize(("path", "name"), CASES)
async def test_a_hint_is_named_and_changes_nothing(api: Api, path: str, name: str):
    body = {"model": MODEL, **BODIES[path]}
    assert (await api.http.post(path, json=body)).status_code == 200
    answer = await api.http.post(path, json={**body, name: VALUES[name]})
    assert answer.status_code == 200, answer.text
    named = answer.headers[IGNORED_FIELDS].split(", ")
    assert named
    assert all(is_named(each, name) for each in named), named
    plain, hinted = (request.capsules[0] for request in api.generator.requests[-2:])
    assert plain.token_ids.tolist() == hinted.token_ids.tolist()
    assert replace(plain.sampling, seed=0) == replace(hinted.sampling, seed=0)
    assert path == "/v1/messages" or plain.sampling.seed == hinted.sampling.seed


@pytest.mark.few(40)
@pytest.mark.parametrize(("path", "name"), CASES)
async def test_a_strict_server_refuses_a_hint_by_its_name(strict: Api, path: str, name: str):
    answer = await strict.http.post(path, json={"model": MODEL, **BODIES[path], name: VALUES[name]})
    assert answer.status_code == 400
    message = answer.json().get("error", answer.json())["message"]
    assert name in message
    assert name not in _FIELDS[path] or "is not acted on" in message
    assert strict.generator.requests == []


_FIELDS: dict[str, set[str]] = {
    "/v1/chat/completions": {*ChatRequest.model_fields, *CHAT_NEUTRAL},
    "/v1/completions": {*CompletionRequest.model_fields, *COMPLETIONS_NEUTRAL},
    "/v1/responses": {*ResponsesRequest.model_fields, *RESPONSES_NEUTRAL},
    "/v1/messages": {*MessagesRequest.model_fields, *MESSAGES_NEUTRAL},
    "/v2/chat": {*CohereChatRequest.model_fields, *COHERE_NEUTRAL},
    "/v2/embed": {*EmbedRequest.model_fields},
}


def hinting_models(kind: type[Hinting] = Hinting) -> Iterator[type[Hinting]]:
    for below in kind.__subclasses__():
        yield below
        yield from hinting_models(below)


async def test_the_table_of_hints_is_whole_and_has_no_more():
    """Every field that a model names as a hint has a reason; every hint is a field that some API knows."""
    named = {name for model in hinting_models() for name in model.hints}
    assert {name for name in named if not any(path.split(".")[-1] == name for path in HINTS)} == set()
    known = set().union(*_FIELDS.values())
    roots = {re.split(r"\W", path)[0] for path in HINTS}
    assert roots - known == set()
    assert roots - set(VALUES) == _WITH_A_PLACE


async def test_the_documentation_lists_every_hint_with_its_reason():
    listed = re.findall(r"^\| `([\w.\[\]-]+)` \| (.+) \|$", _section("### Hints"), re.MULTILINE)
    assert dict(listed) == dict(HINTS)


def _section(heading: str) -> str:
    text = (Path(__file__).parents[3] / "docs/api.md").read_text(encoding="utf-8")
    return text.partition(f"\n{heading}\n")[2].partition("\n### ")[0]
