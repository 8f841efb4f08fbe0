"""Requests for responses become chats: messages of items, tools and forms as chats have them."""

from typing import Any

import pytest

from services.gateway.api.errors import ApiError
from services.gateway.api.validation import validate_request
from services.gateway.openai.neutral import RESPONSES_NEUTRAL
from services.gateway.openai.responses.request import ResponsesRequest
from services.gateway.openai.responses.translation import chat_fields, chat_of


def fields_of(**body: Any) -> dict[str, Any]:
    request = validate_request({"input": "Hi", **body}, ResponsesRequest, RESPONSES_NEUTRAL)
    request.check_combinations()
    return chat_fields(request, request.input)


def text(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


HI = {"role": "user", "content": text("Hi")}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
SAME_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_a_string_is_a_message_of_the_user():
    assert fields_of() == {"messages": [HI]}


def test_instructions_come_first():
    assert fields_of(instructions="Be brief.")["messages"] == [{"role": "system", "content": "Be brief."}, HI]


def test_messages_keep_their_roles_and_parts():
    items = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "A", "annotations": []}], "id": "msg_1"},
    ]
    assert fields_of(input=items)["messages"] == [
        {"role": "developer", "content": text("D")},
        {"role": "user", "content": [*text("a"), *text("b")]},
        {"role": "assistant", "content": text("A")},
    ]


def test_reasoning_text_and_calls_that_follow_each_other_are_one_message():
    """An answer has them as items of their own, a chat in one message."""
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]}
    items = [
        {"role": "user", "content": "Hi"},
        reasoning,
        {"role": "assistant", "content": "A"},
        CALL,
        {**CALL, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
        CALL,
    ]
    calls = [SAME_CALL, {**SAME_CALL, "id": "c2"}]
    assert fields_of(input=items)["messages"] == [
        HI,
        {"role": "assistant", "reasoning_content": "R", "content": text("A"), "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "3"},
        {"role": "assistant", "tool_calls": [SAME_CALL]},
    ]


def test_two_answers_in_a_row_stay_two_messages():
    items = [{"role": "assistant", "content": "A"}, {"role": "assistant", "content": "B"}]
    contents = [message["content"] for message in fields_of(input=items)["messages"]]
    assert contents == [text("A"), text("B")]


def test_functions_become_the_tools_of_a_chat():
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
    choice = {"type": "function", "name": "add"}
    found = fields_of(tools=[{"type": "function", **function}], tool_choice=choice, parallel_tool_calls=False)
    assert found["tools"] == [{"type": "function", "function": function}]
    assert found["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert found["parallel_tool_calls"] is False
    assert "tools" not in fields_of(tools=[])
    assert fields_of(tool_choice="required")["tool_choice"] == "required"


def test_a_form_becomes_a_response_format():
    schema = {"name": "Sum", "schema": {"type": "object"}, "strict": True}
    found = fields_of(text={"format": {"type": "json_schema", **schema}, "verbosity": "medium"})
    assert found["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert fields_of(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    assert "response_format" not in fields_of(text={"format": {"type": "text"}})


def test_effort_logprobs_limits_and_sampling_have_the_names_of_a_chat():
    found = fields_of(
        reasoning={"effort": "low"},
        include=["message.output_text.logprobs"],
        top_logprobs=3,
        max_output_tokens=7,
        temperature=0.5,
        top_k=4,
        seed=1,
        stop="x",
        stream=True,
        store=False,
    )
    del found["messages"]
    assert found == {
        "reasoning_effort": "low",
        "logprobs": True,
        "top_logprobs": 3,
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_k": 4,
        "seed": 1,
        "stop": ["x"],
    }


def test_what_is_wrong_with_the_chat_is_named_as_in_the_request():
    body = {"input": "Hi", "structured_outputs": {"regex": "a"}, "max_output_tokens": 3}
    request = validate_request(body, ResponsesRequest, RESPONSES_NEUTRAL)
    with pytest.raises(ApiError) as refused:
        chat_of(request.model_copy(update={"max_output_tokens": -1}), request.input)
    assert refused.value.param == "max_output_tokens"
    assert "'max_output_tokens'" in refused.value.message
