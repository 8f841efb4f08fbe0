"""OpenAI's client for Python: every call that programs make of it, sync and async."""

from typing import Any

import openai
import pytest

from tests.clients.asked import GREEDY, MAX_CALL_TOKENS, MESSAGES, MODEL, TOOL, Weather
from tests.e2e.stack import Stack

pytestmark = pytest.mark.usefixtures("handed_off")
FORMED: dict[str, Any] = {**GREEDY, "max_tokens": MAX_CALL_TOKENS}
TOOLS: dict[str, Any] = {
    **FORMED,
    "tools": [{"type": "function", "function": TOOL}],
    "parallel_tool_calls": False,  # else a model of random weights may go on calling
}
NAMED = {"type": "function", "function": {"name": "Weather"}}


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return stack.gateway.client


def test_a_chat_is_streamed_as_it_is_whole(client: openai.OpenAI):
    whole = client.chat.completions.create(**GREEDY)
    chunks = list(client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_the_async_client_gets_the_same_as_the_sync_one(stack: Stack, client: openai.OpenAI):
    whole = client.chat.completions.create(**GREEDY)
    async with openai.AsyncOpenAI(base_url=f"{stack.gateway.url}/v1", api_key="none", max_retries=0) as other:
        assert (await other.chat.completions.create(**GREEDY)).choices == whole.choices
        chunks = [chunk async for chunk in await other.chat.completions.create(**GREEDY, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


def test_a_chat_is_parsed_into_a_class(client: openai.OpenAI):
    parsed = client.chat.completions.parse(**FORMED, response_format=Weather).choices[0].message.parsed
    with client.chat.completions.stream(**FORMED, response_format=Weather) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    assert isinstance(parsed, Weather)
    assert Weather.model_validate_json(text) == parsed


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_tool_is_called_and_its_result_sent_back(client: openai.OpenAI, choice: Any):
    asked = client.chat.completions.create(**TOOLS, tool_choice=choice).choices[0]
    assert asked.finish_reason == "tool_calls"
    (call,) = asked.message.tool_calls
    assert call.function.name == "Weather"
    Weather.model_validate_json(call.function.arguments)
    turns = [*MESSAGES, asked.message, {"role": "tool", "tool_call_id": call.id, "content": "Rain."}]
    answer = client.chat.completions.create(**{**TOOLS, "messages": turns, "max_tokens": 8}, tool_choice="none")
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


def test_calls_are_streamed_as_they_are_whole(client: openai.OpenAI):
    whole = client.chat.completions.create(**TOOLS, tool_choice=NAMED).choices[0]
    with client.chat.completions.stream(**TOOLS, tool_choice=NAMED) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == whole.finish_reason == "tool_calls"
    first, second = (choice.message.tool_calls[0].function for choice in (whole, streamed))
    assert (first.name, first.arguments) == (second.name, second.arguments)


def test_a_response_is_streamed_as_it_is_whole_and_goes_on(client: openai.OpenAI):
    fields: dict[str, Any] = {"model": MODEL, "input": "Hello", "temperature": 0, "max_output_tokens": 16}
    whole = client.responses.create(**fields)
    events = list(client.responses.create(**fields, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    turn = client.responses.create(**{**fields, "input": "Go on"}, previous_response_id=whole.id)
    assert turn.usage.input_tokens > whole.usage.input_tokens


def test_a_response_is_parsed_into_a_class(client: openai.OpenAI):
    fields: dict[str, Any] = {"model": MODEL, "input": "Hello", "temperature": 0, "max_output_tokens": MAX_CALL_TOKENS}
    parsed = client.responses.parse(**fields, text_format=Weather).output_parsed
    with client.responses.stream(**fields, text_format=Weather) as stream:
        assert stream.get_final_response().output_parsed == parsed
    assert isinstance(parsed, Weather)


def test_a_response_calls_a_tool_and_the_next_gets_its_result(client: openai.OpenAI):
    fields: dict[str, Any] = {
        "model": MODEL,
        "temperature": 0,
        "max_output_tokens": MAX_CALL_TOKENS,
        "store": False,
        "tools": [{"type": "function", **TOOL}],
        "parallel_tool_calls": False,
    }
    asked = client.responses.create(**fields, input=MESSAGES, tool_choice="required")
    (call,) = asked.output
    assert call.type == "function_call"
    Weather.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    answer = client.responses.create(**fields, input=[*MESSAGES, call, result], tool_choice="none")
    assert answer.output_text
