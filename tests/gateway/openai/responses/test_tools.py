"""Tools and reasoning in responses, with the official client: whole and streamed answers are the same."""

import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from services.gateway.openai.responses.store import MemoryResponseStore
from services.protocol.outcomes import FinishReason
from tests.gateway.openai.test_tools import CALLED, CALLS, TEMPLATE, WEATHER, write
from tests.gateway.running_api import Api, running_api

TOOLS: list[Any] = [
    {"type": "function", **WEATHER["function"]},
    {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}},
]


@pytest_asyncio.fixture
async def api() -> AsyncIterator[Api]:
    async with running_api(template=TEMPLATE, response_store=MemoryResponseStore(60, time.monotonic)) as running:
        running.generator.max_model_len = 4096
        yield running


@pytest_asyncio.fixture
async def client(api: Api) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def shape(response: Any) -> list[tuple[str, ...]]:
    """The items of a response, without ids."""
    found: list[tuple[str, ...]] = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.type, item.name, item.arguments))
        else:
            found.append((item.type, item.content[0].text))
    return found


async def test_reasoning_text_and_calls_are_items(api: Api, client: openai.AsyncOpenAI):
    write(api, CALLED)
    whole = await client.responses.create(model="m", input="Hi", tools=TOOLS)
    assert shape(whole) == [
        ("reasoning", "Which town?"),
        ("message", "I look."),
        *(("function_call", name, arguments) for name, arguments in CALLS),
    ]
    assert whole.status == "completed"
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    write(api, CALLED, per_token=False)
    at_once = await client.responses.create(model="m", input="Hi", tools=TOOLS)
    assert shape(at_once) == shape(whole)
    write(api, CALLED)
    async with client.responses.stream(model="m", input="Hi", tools=TOOLS) as stream:
        events = [event async for event in stream]
        streamed = await stream.get_final_response()
    assert shape(streamed) == shape(whole)
    assert streamed.usage == whole.usage == at_once.usage
    for kind, text in (("reasoning_text", "Which town?"), ("output_text", "I look.")):
        deltas = [event.delta for event in events if event.type == f"response.{kind}.delta"]
        assert "".join(deltas) == text
        assert len(deltas) > 1
    for number, (_, arguments) in enumerate(CALLS):
        own = [event for event in events if getattr(event, "output_index", None) == number + 2]
        deltas = [event.delta for event in own if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == arguments


async def test_a_tool_loop_by_previous_response_id(api: Api, client: openai.AsyncOpenAI):
    write(api, CALLED)
    first = await client.responses.create(model="m", input="Hi", tools=TOOLS)
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"of {item.name}"}
        for item in first.output
        if item.type == "function_call"
    ]
    write(api, "Rain.")
    second = await client.responses.create(
        model="m", input=outputs, previous_response_id=first.id, tools=TOOLS, tool_choice="none"
    )
    assert second.output_text == "Rain."
    prompt = prompt_of(api)
    assert '<tool_call>{"name": "weather", "arguments": {"town": "Köln"}}</tool_call>' in prompt
    assert "<|im_start|>tool\nof weather<|im_end|>\n<|im_start|>tool\nof clock<|im_end|>" in prompt


async def test_a_choice_of_a_tool_is_a_grammar(api: Api, client: openai.AsyncOpenAI):
    write(api, CALLED)
    choice: Any = {"type": "function", "name": "weather"}
    await client.responses.create(model="m", input="Hi", tools=TOOLS, tool_choice=choice)
    assert "weather" in api.generator.requests[-1].capsules[0].sampling.grammar


PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "+" /[^\\n]+/'},
}
NAMESPACE = {"type": "namespace", "name": "crm", "tools": [TOOLS[0], {**PATCH, "format": {"type": "text"}}]}
PATCHED = (
    '<tool_call>\n{"name": "patch", "arguments": {"input": "+a \\"b\\" \\u00e9\\t"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "crm__patch", "arguments": {"input": "c"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "crm__weather", "arguments": {"town": "Ulm"}}\n</tool_call>'
)


def called(response: Any) -> list[tuple[str, ...]]:
    return [
        (item.type, item.namespace, item.name, item.input if item.type == "custom_tool_call" else item.arguments)
        for item in response.output
    ]


async def test_custom_tools_and_namespaces_are_called_and_their_outputs_read(api: Api, client: openai.AsyncOpenAI):
    tools: list[Any] = [PATCH, {"type": "web_search"}, NAMESPACE]
    calls = [
        ("custom_tool_call", None, "patch", '+a "b" é\t'),
        ("custom_tool_call", "crm", "patch", "c"),
        ("function_call", "crm", "weather", '{"town": "Ulm"}'),
    ]
    write(api, PATCHED)
    whole = await client.responses.with_raw_response.create(model="m", input="Hi", tools=tools)
    assert whole.headers["x-baton-ignored-fields"] == "tools[1]"
    first = whole.parse()
    assert called(first) == calls
    assert "QUOTED" in api.generator.requests[-1].capsules[0].sampling.grammar
    write(api, PATCHED)
    async with client.responses.stream(model="m", input="Hi", tools=tools) as stream:
        events = [event async for event in stream]
        assert called(await stream.get_final_response()) == calls
    pieces = [event for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert len(pieces) > 2
    for index, (_, _, _, text) in enumerate(calls[:2]):
        assert "".join(event.delta for event in pieces if event.output_index == index) == text
    outputs = [
        {"type": f"{item.type}_output", "call_id": item.call_id, "output": f"of {item.name}"} for item in first.output
    ]
    write(api, "Done.")
    history: Any = [{"role": "user", "content": "Hi"}, *first.output, *outputs]
    again = await client.responses.create(model="m", input=history, tools=tools)
    prompt = prompt_of(api)
    for name, arguments in (("patch", '{"input": "+a \\"b\\" é\\t"}'), ("crm__weather", '{"town": "Ulm"}')):
        assert f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>' in prompt
    assert "tool\nof patch<|im_end|>\n<|im_start|>tool\nof patch<|im_end|>\n<|im_start|>tool\nof weather" in prompt
    write(api, "Done.")
    await client.responses.create(model="m", input=outputs, previous_response_id=first.id, tools=tools)
    assert prompt_of(api) == prompt
    assert again.output_text == "Done."


async def test_what_a_background_response_called_is_told_again(api: Api, client: openai.AsyncOpenAI):
    write(api, PATCHED)
    tools: list[Any] = [PATCH, NAMESPACE]
    fields: dict[str, Any] = {"model": "m", "input": "Hi", "tools": tools, "background": True}
    events = [event async for event in await client.responses.create(**fields, stream=True)]
    kept = [event async for event in await client.responses.retrieve(events[0].response.id, stream=True)]
    assert kept == events
    assert called(kept[-1].response)[1] == ("custom_tool_call", "crm", "patch", "c")


async def test_a_named_custom_tool_is_the_one_call(api: Api, client: openai.AsyncOpenAI):
    write(api, CALLED)
    choice: Any = {"type": "custom", "name": "patch"}
    await client.responses.create(model="m", input="Hi", tools=[*TOOLS, PATCH], tool_choice=choice)
    grammar = api.generator.requests[-1].capsules[0].sampling.grammar
    assert ("patch" in grammar, "weather" in grammar) == (True, False)


async def test_a_call_that_is_required_wins_over_a_form(api: Api, client: openai.AsyncOpenAI):
    """Instructor asks for both."""
    fields: dict[str, Any] = {"model": "m", "input": "Hi", "tools": TOOLS, "tool_choice": "required"}
    write(api, CALLED)
    await client.responses.create(**fields)
    write(api, CALLED)
    await client.responses.create(**fields, text={"format": {"type": "json_object"}})
    plain, formed = (request.capsules[0].sampling.grammar for request in api.generator.requests[-2:])
    assert plain == formed


def prompt_of(api: Api) -> str:
    """The last prompt."""
    tokens = api.generator.requests[-1].capsules[0].token_ids.tolist()
    return api.tokenizer.backend.decode(tokens, skip_special_tokens=False)


async def test_what_is_cut_off_in_a_call_is_incomplete(api: Api, client: openai.AsyncOpenAI):
    write(api, '<tool_call>{"name": "weather", "arguments": {"tow', finish=FinishReason.LENGTH)
    response = await client.responses.create(model="m", input="Hi", tools=TOOLS)
    assert (response.status, response.output[-1].status) == ("incomplete", "incomplete")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].name"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_bad_tools_are_named(api: Api, fields: dict[str, Any], param: str):
    answer = await api.http.post("/v1/responses", json={"input": "Hi", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
