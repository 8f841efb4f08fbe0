"""Requests for responses become chats: messages of items, tools and forms as chats have them."""

from typing import Any

import pytest

from services.gateway.api.errors import ApiError
from services.gateway.api.requests.validation import validate_request
from services.gateway.openai.neutral import RESPONSES_NEUTRAL
from services.gateway.openai.responses.asking import offered_tools
from services.gateway.openai.responses.input_items import of_conversation
from services.gateway.openai.responses.offered_tools import OfferedTools
from services.gateway.openai.responses.request import ResponsesRequest
from services.gateway.openai.responses.translation import chat_fields, chat_of


def fields_of(**body: Any) -> dict[str, Any]:
    request = validate_request({"input": "Hi", **body}, ResponsesRequest, RESPONSES_NEUTRAL)
    request.check_combinations()
    conversation = of_conversation(request.input)
    return chat_fields(request, conversation, offered_tools(request, conversation))


def text(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


FUNCTION = {"type": "function", "name": "find", "description": "Finds."}
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


def test_custom_tools_and_those_of_namespaces_become_tools_of_a_chat():
    form = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    patch = {"type": "custom", "name": "patch", "description": "Patches.", "format": form}
    tools = [
        {"type": "namespace", "name": "crm", "description": "Of people.", "tools": [FUNCTION, {"type": "mcp"}, patch]},
        {"type": "web_search"},
        {"type": "custom", "name": "note", "format": {"type": "text"}},
    ]
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}}
    about = {"name": "crm__find", "description": "Finds.\n\nAll tools crm__...: Of people."}
    offered = [
        {"type": "function", "function": about},
        {"type": "custom", "custom": {"name": "crm__patch", "description": "Patches.", "format": grammar}},
        {"type": "custom", "custom": {"name": "note", "format": {"type": "text"}}},
    ]
    assert fields_of(tools=tools)["tools"] == offered
    for choice, chosen in (
        ({"type": "function", "name": "find"}, {"type": "function", "function": {"name": "crm__find"}}),
        ({"type": "custom", "name": "patch", "namespace": "crm"}, {"type": "custom", "custom": {"name": "crm__patch"}}),
    ):
        assert fields_of(tools=tools, tool_choice=choice)["tool_choice"] == chosen
    allowed = [{"type": "custom", "name": "note"}, {"type": "web_search"}]
    for mode in ("auto", "required"):
        found = fields_of(tools=tools, tool_choice={"type": "allowed_tools", "mode": mode, "tools": allowed})
        assert (found["tools"], found["tool_choice"]) == (offered[2:], mode)
    allowed = [{"type": "namespace", "name": "crm"}]
    assert (
        fields_of(tools=tools, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": allowed})["tools"]
        == offered[:2]
    )


def test_items_add_tools_which_are_never_there_twice():
    note = {"type": "custom", "name": "note"}
    added = {"type": "additional_tools", "role": "developer", "tools": [note, FUNCTION, {"type": "web_search"}]}
    found = fields_of(input=[added, {"role": "user", "content": "Hi"}, added], tools=[note])
    assert [tool[tool["type"]]["name"] for tool in found["tools"]] == ["note", "find"]
    assert found["messages"] == [HI]


def test_calls_of_custom_tools_and_in_namespaces_have_the_names_that_the_model_knows():
    items = [
        {**CALL, "namespace": "crm"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "+a"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "Done"},
    ]
    (answer, output) = fields_of(input=items)["messages"]
    assert answer["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "crm__add", "arguments": '{"a": 1}'}},
        {"id": "c2", "type": "custom", "custom": {"name": "patch", "input": "+a"}},
    ]
    assert output == {"role": "tool", "tool_call_id": "c2", "content": "Done"}


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
        chat_of(request.model_copy(update={"max_output_tokens": -1}), of_conversation(request.input), OfferedTools())
    assert refused.value.param == "max_output_tokens"
    assert "'max_output_tokens'" in refused.value.message
