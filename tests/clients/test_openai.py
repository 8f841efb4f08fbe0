"""OpenAI's client for Python: every call that programs make of it, sync and async."""

from typing import Any

import openai
import pytest

from tests.clients.asked import GREEDY, MESSAGES, MODEL, TOOL, Weather
from tests.e2e.stack import Stack

pytestmark = pytest.mark.usefixtures("handed_off")
TOOLS: dict[str, Any] = {**GREEDY, "max_tokens": 64, "tools": [{"type": "function", "function": TOOL}]}
NAMED = {"type": "function", "function": {"name": "Weather"}}


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return stack.gateway.client


def test_a_chat_is_streamed_as_it_is_whole(client: openai.OpenAI):
    whole = client.chat.completions.create(**GREEDY)
    with client.chat.completions.stream(**GREEDY, stream_options={"include_usage": True}) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        last = stream.get_final_completion()
    assert text == last.choices[0].message.content == whole.choices[0].message.content
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 16


async def test_the_async_client_gets_the_same_as_the_sync_one(stack: Stack, client: openai.OpenAI):
    whole = client.chat.completions.create(**GREEDY)
    async with openai.AsyncOpenAI(base_url=f"{stack.gateway.url}/v1", api_key="none", max_retries=0) as other:
        assert (await other.chat.completions.create(**GREEDY)).choices == whole.choices
        chunks = [chunk async for chunk in await other.chat.completions.create(**GREEDY, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


def test_a_chat_is_parsed_into_a_class(client: openai.OpenAI):
    chat = client.chat.completions.parse(**{**GREEDY, "max_tokens": 64}, response_format=Weather)
    assert isinstance(chat.choices[0].message.parsed, Weather)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_tool_is_called_and_its_result_sent_back(client: openai.OpenAI, choice: Any):
    asked = client.chat.completions.create(**TOOLS, tool_choice=choice).choices[0]
    assert asked.finish_reason == "tool_calls"
    for call in asked.message.tool_calls:
        assert call.function.name == "Weather"
        Weather.model_validate_json(call.function.arguments)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Rain."} for call in asked.message.tool_calls]
    turns = [*MESSAGES, asked.message, *results]
    answer = client.chat.completions.create(**{**TOOLS, "messages": turns, "max_tokens": 8}, tool_choice="none")
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


def test_calls_are_streamed_as_they_are_whole(client: openai.OpenAI):
    whole = client.chat.completions.create(**TOOLS, tool_choice=NAMED).choices[0]
    with client.chat.completions.stream(**TOOLS, tool_choice=NAMED) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == whole.finish_reason == "tool_calls"
    calls = [[call.function for call in choice.message.tool_calls] for choice in (whole, streamed)]
    assert [(call.name, call.arguments) for call in calls[0]] == [(call.name, call.arguments) for call in calls[1]]


def test_a_response_is_streamed_as_it_is_whole_and_goes_on(client: openai.OpenAI):
    fields: dict[str, Any] = {"model": MODEL, "input": "Hello", "temperature": 0, "max_output_tokens": 16}
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        last = stream.get_final_response()
    assert text == last.output_text == whole.output_text
    turn = client.responses.create(**{**fields, "input": "Go on"}, previous_response_id=whole.id)
    assert turn.usage.input_tokens > whole.usage.input_tokens
    parsed = client.responses.parse(**{**fields, "max_output_tokens": 64}, text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)


def test_a_response_calls_a_tool(client: openai.OpenAI):
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 64, "store": False}
    tools = [{"type": "function", **TOOL}]
    asked = client.responses.create(**fields, input=MESSAGES, tools=tools, tool_choice="required")
    calls = [item for item in asked.output if item.type == "function_call"]
    for call in calls:
        Weather.model_validate_json(call.arguments)
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "Rain."} for call in calls]
    turns = [*MESSAGES, *asked.output, *results]
    answer = client.responses.create(**fields, input=turns, tools=tools, tool_choice="none")
    assert answer.output_text
