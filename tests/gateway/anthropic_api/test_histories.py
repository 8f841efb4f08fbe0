"""Earlier turns, which a client sends again with every request: whatever they hold, the conversation goes on."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.gateway.anthropic_api.request import NEUTRAL, MessagesRequest
from services.gateway.anthropic_api.translation import MessagesChat, chat_fields
from services.gateway.api.requests.validation import validate_request
from tests.gateway.anthropic_api.test_tools import TEMPLATE
from tests.gateway.running_api import Api, running_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

IGNORED = "x-baton-ignored-fields"
HI: dict[str, Any] = {"role": "user", "content": "Hi"}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
NOTES = {
    "type": "document",
    "title": "Notes",
    "source": {"type": "text", "media_type": "text/plain", "data": "Buy milk."},
}
FOUND = {"type": "search_result", "title": "T", "source": "https://x", "content": [{"type": "text", "text": "A hit."}]}
SERVER_BLOCKS = [
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
    {"type": "mcp_tool_use", "id": "m", "name": "n", "server_name": "s", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False, "content": []},
    {"type": "redacted_thinking", "data": "xyz"},
    {"type": "compaction", "content": None, "encrypted_content": "xyz"},
    {"type": "of_2030", "a": {"b": [1]}},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api(template=TEMPLATE) as running:
        running.generator.max_model_len = 4096
        yield running


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def call(call_id: Any, value: Any = None) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "f", "input": value}


def result(call_id: Any, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


async def shown(api: Api, *turns: tuple[str, Any], named: str | None = None, **fields: Any) -> str:
    """The prompt after the first turn of the user, without the marks of turns."""
    messages = [HI, *({"role": role, "content": content} for role, content in turns)]
    body = {"model": "m", "max_tokens": 9, "messages": messages, **fields}
    response = await api.http.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    assert response.headers.get(IGNORED) == named
    prompt = api.tokenizer.decode(api.generator.requests[-1].capsules[0].token_ids.tolist())
    return prompt.partition("user\nHi\n")[2].removesuffix("\nassistant\n")


@pytest.mark.parametrize("nothing", [[], None, "", [text("")], [text("a")][:0]], ids=str)
async def test_a_turn_without_content_is_one_in_every_role(api: Api, nothing: Any):
    assert await shown(api, ("assistant", nothing), ("user", "a")) == "assistant\n\nuser\na"
    assert await shown(api, ("assistant", "a"), ("user", nothing)) == "assistant\na\nuser\n"
    assert await shown(api, ("assistant", "a"), ("system", nothing), ("user", "b")) == "assistant\na\nuser\nb"


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        (None, {}),
        ("", {}),
        ({"a": 1}, {"a": 1}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1', {"value": '{"a": 1'}),
        ([1], {"value": [1]}),
        (5, {"value": 5}),
    ],
    ids=str,
)
async def test_the_input_of_a_call_is_shown_as_an_object(api: Api, value: Any, arguments: dict[str, Any]):
    prompt = await shown(api, ("assistant", [call("a", value)]), ("user", [result("a", "x")]))
    written = json.dumps({"name": "f", "arguments": arguments})
    assert prompt == f"assistant\n<tool_call>{written}</tool_call>\ntool\nx"


@pytest.mark.parametrize("call_id", ["toolu_1", "", None, 7, "a/b?" * 200])
async def test_ids_have_any_form(api: Api, call_id: Any):
    prompt = await shown(api, ("assistant", [call(call_id, {})]), ("user", [result(call_id, "x")]))
    assert prompt.endswith("tool\nx")


async def test_results_come_in_the_order_of_their_calls_and_before_texts(api: Api):
    answer = ("assistant", [text("Both."), call("a", {}), call("b", {})])
    asked = ("user", [text("first"), result("b", "2"), text("then"), result("a", "1"), text("")])
    prompt = await shown(api, answer, asked)
    assert prompt.endswith("tool\n1\ntool\n2\nuser\nfirst\nthen")
    assert (await shown(api, answer, ("user", [result("b", "2")]), ("user", [result("a", "1")]))).endswith("1\ntool\n2")
    # Ids that come again are those of the last calls; results without a call stay where they are.
    again = (answer, ("user", [result("a", "1"), result("b", "2")]), ("assistant", [call("b", {}), call("a", {})]))
    prompt = await shown(
        api, *again, ("user", [result("x", "9"), result("a", "1"), result("b", "2"), result("y", "8")])
    )
    assert prompt.endswith("tool\n2\ntool\n1\ntool\n9\ntool\n8")


@pytest.mark.parametrize(
    ("content", "line", "named"),
    [
        ([PNG], "[image, image/png: left out, since this model reads text only]", "[0]"),
        ([text("See:"), PNG], "See:\n[image, image/png: left out, since this model reads text only]", "[1]"),
        ([PDF], "[document, application/pdf: left out, since this model reads text only]", "[0]"),
        ([{"type": "of_2030"}], "[of_2030: left out, since this model reads text only]", "[0]"),
        ([NOTES], "Notes\nBuy milk.", None),
        ([FOUND], "T\nhttps://x\nA hit.", None),
        ([{"type": "tool_reference", "tool_name": "g"}], "g", None),
        (None, "", None),
        ([], "", None),
    ],
    ids=str,
)
async def test_what_is_no_text_in_a_result_is_a_line_that_says_so(api: Api, content: Any, line: str, named: str | None):
    where = None if named is None else f"messages[2].content[0].content{named}"
    asked = ("user", [result("a", content)])
    prompt = await shown(api, ("assistant", [call("a", {})]), asked, named=where)
    assert prompt.endswith(f"tool\n{line}")


async def test_an_error_of_a_tool_says_so(api: Api):
    prompt = await shown(
        api,
        ("assistant", [call("a", {})]),
        ("user", [result("a", [PNG], is_error=True)]),
        named="messages[2].content[0].content[0]",
    )
    assert "tool\nError: [image" in prompt


@pytest.mark.parametrize("block", SERVER_BLOCKS, ids=lambda block: block["type"])
async def test_blocks_of_a_vendors_server_are_left_out_of_answers(api: Api, block: dict[str, Any]):
    answer = ("assistant", [block, text("Done.")])
    named = "messages[1].content[0]"
    assert await shown(api, answer, ("user", "Go on"), named=named) == "assistant\nDone.\nuser\nGo on"
    assert await shown(api, ("assistant", [block]), ("user", "Go on"), named=named) == "assistant\n\nuser\nGo on"


async def test_texts_of_documents_are_read_in_turns_of_the_user_and_notes_to_a_server_left_out(api: Api):
    asked = ("user", [NOTES, FOUND, {"type": "container_upload", "file_id": "f"}, text("And?")])
    prompt = await shown(api, ("assistant", "a"), asked, named="messages[2].content[2]")
    assert prompt.endswith("user\nNotes\nBuy milk.\nT\nhttps://x\nA hit.\nAnd?")


async def test_a_text_with_citations_is_read(api: Api):
    cited = {"type": "text", "text": "a", "citations": [{"type": "char_location", "cited_text": "b"}]}
    prompt = await shown(api, ("assistant", [cited]), ("user", "?"), named="messages[1].content[0].citations")
    assert prompt == "assistant\na\nuser\n?"


async def test_a_call_without_a_result_is_counted_and_asks_for_nothing(api: Api):
    body = {"model": "m", "messages": [HI, {"role": "assistant", "content": [call("a", {})]}]}
    counted = await api.http.post("/v1/messages/count_tokens", json=body)
    assert counted.status_code == 200
    refused = await api.http.post("/v1/messages", json={**body, "max_tokens": 9})
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_each_result_may_become_a_message():
    """Of 2,048 messages, as many as a request may have, results make more of a chat."""
    ids = [f"c{number}" for number in range(3)]
    turns = [
        ("user", "Hi"),
        *[("assistant", [call(each) for each in ids]), ("user", [result(each, "1") for each in ids])] * 600,
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    request = validate_request({"messages": messages, "max_tokens": 1}, MessagesRequest, NEUTRAL)
    assert len(validate_request(chat_fields(request), MessagesChat, {}).messages) == 1 + 600 * 4
