"""Anthropic's Messages API through the whole stack: every answer was handed off, and is the one that a chat gets."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.e2e.stack import Stack

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "one two three " * 20}]
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "messages": MESSAGES, "extra_body": {"temperature": 0}}


@pytest.fixture
def client(stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stack.gateway.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message_is_the_answer_that_a_chat_gets(stack: Stack, client: anthropic.Anthropic):
    before = stack.gateway.metric("baton_handoffs_total", outcome="completed")
    chat = stack.gateway.client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=24)
    whole = client.messages.create(**ASKED)
    with client.messages.stream(**ASKED) as stream:
        streamed = stream.get_final_message()
    expected = chat.choices[0].message.content
    assert [block.text for block in whole.content] == [block.text for block in streamed.content] == [expected]
    for message in (whole, streamed):
        usage = message.usage
        assert (message.stop_reason, usage.output_tokens) == ("max_tokens", chat.usage.completion_tokens)
        assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert streamed.usage.cache_read_input_tokens > 0
    assert client.messages.count_tokens(model="tiny", messages=MESSAGES).input_tokens == chat.usage.prompt_tokens
    assert stack.gateway.metric("baton_handoffs_total", outcome="completed") >= before + 3


def test_a_message_has_the_form_that_was_asked_for(stack: Stack, client: anthropic.Anthropic):
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["yes", "kind"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "schema": schema}}
    message = client.messages.create(**{**ASKED, "max_tokens": 64}, output_config=form)
    assert message.stop_reason == "end_turn"
    jsonschema.validate(json.loads(message.content[0].text), schema)
