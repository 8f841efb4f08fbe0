"""Anthropic's client: messages, streams of them, and tools."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.clients.asked import MAX_CALL_TOKENS, MESSAGES, MODEL, TOOL, Weather
from tests.e2e.stack import Stack

pytestmark = pytest.mark.usefixtures("handed_off")
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 16, "messages": MESSAGES, "extra_body": {"temperature": 0}}
TOOLS = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}]


@pytest.fixture
def client(stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stack.gateway.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message_is_streamed_as_it_is_whole(client: anthropic.Anthropic):
    whole = client.messages.create(**ASKED)
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert [text] == [block.text for block in last.content] == [block.text for block in whole.content]
    assert last.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "Weather"}])
def test_a_tool_is_used_and_its_result_sent_back(client: anthropic.Anthropic, choice: dict[str, str]):
    once = {**choice, "disable_parallel_tool_use": True}  # else a model of random weights may go on calling
    fields: dict[str, Any] = {**ASKED, "max_tokens": MAX_CALL_TOKENS, "tools": TOOLS, "tool_choice": once}
    asked = client.messages.create(**fields)
    assert asked.stop_reason == "tool_use"
    (use,) = asked.content
    Weather.model_validate(use.input)
    with client.messages.stream(**fields) as stream:
        (streamed,) = stream.get_final_message().content
    assert (streamed.name, streamed.input) == (use.name, use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Rain."}
    turns = [*MESSAGES, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**{**ASKED, "messages": turns}, tools=TOOLS, tool_choice={"type": "none"})
    assert answer.content[0].text
