"""Cohere's client for Python: chats, streams of them, tools, and embeddings."""

import base64
from collections.abc import Iterator
from typing import Any

import cohere
import numpy as np
import pytest
from cohere.base_client import OMIT

from tests.clients.asked import MAX_CALL_TOKENS, MESSAGES, MODEL, TOOL, Weather
from tests.e2e.stack import Stack

ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 16, "messages": MESSAGES, "temperature": 0}
TOOLS = [{"type": "function", "function": TOOL}]


@pytest.fixture
def client(stack: Stack) -> Iterator[cohere.ClientV2]:
    with cohere.ClientV2(base_url=stack.gateway.url, api_key="none") as client:
        yield client


@pytest.mark.usefixtures("handed_off")
def test_a_chat_is_streamed_as_it_is_whole(client: cohere.ClientV2):
    whole = client.chat(**ASKED)
    *events, last = client.chat_stream(**ASKED)
    text = "".join(event.delta.message.content.text for event in events if event.type == "content-delta")
    assert [text] == [item.text for item in whole.message.content]
    assert (last.delta.finish_reason, last.delta.usage.tokens) == (whole.finish_reason, whole.usage.tokens)


@pytest.mark.usefixtures("handed_off")
def test_a_tool_is_called_and_its_result_sent_back(client: cohere.ClientV2):
    fields: dict[str, Any] = {**ASKED, "max_tokens": MAX_CALL_TOKENS, "tools": TOOLS, "tool_choice": "REQUIRED"}
    asked = client.chat(**fields)
    calls = asked.message.tool_calls  # a model of random weights may go on calling, until its tokens are used up
    Weather.model_validate_json(calls[0].function.arguments)
    events = [*client.chat_stream(**fields)]
    begun = [event.delta.message.tool_calls.function.name for event in events if event.type == "tool-call-start"]
    grown = [event for event in events if event.type == "tool-call-delta" and event.index == 0]
    assert begun == [call.function.name for call in calls]
    pieces = [event.delta.message.tool_calls.function.arguments for event in grown]
    assert "".join(pieces) == calls[0].function.arguments
    answer = {"role": "assistant", "tool_calls": calls[:1]}
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": "Rain."}
    told = client.chat(**{**ASKED, "messages": [*MESSAGES, answer, result]}, tools=TOOLS, tool_choice="NONE")
    assert told.message.content[0].text


@pytest.mark.usefixtures("handed_off")
def test_an_answer_has_the_form_of_a_schema(client: cohere.ClientV2):
    form = {"type": "json_object", "json_schema": Weather.model_json_schema()}
    answer = client.chat(**{**ASKED, "max_tokens": MAX_CALL_TOKENS}, response_format=form)
    Weather.model_validate_json(answer.message.content[0].text)


def test_embeddings_are_the_same_in_every_type(stack: Stack, client: cohere.ClientV2):
    """Strict servers take none that says what its texts are for, as the client likes to."""
    types = ["float", "base64", "binary", "ubinary"]
    texts = ["one", "two three"]
    found = client.embed(model=MODEL, texts=texts, input_type=OMIT, embedding_types=types).embeddings
    floats = np.array(found.float_, np.float32)
    assert floats.shape[0] == 2
    assert np.linalg.norm(floats, axis=1) == pytest.approx(1, abs=1e-5)
    assert [base64.b64decode(text) for text in found.base64] == [row.tobytes() for row in floats]
    assert np.array_equal(np.unpackbits(np.array(found.ubinary, np.uint8), axis=1), floats >= 0)
    assert np.array_equal(np.array(found.binary) + 128, found.ubinary)
    with pytest.raises(cohere.BadRequestError, match="input_type"):
        client.embed(model=MODEL, texts=texts, input_type="search_query")
    stack.gateway.wait_for_baseline()
