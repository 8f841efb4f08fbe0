"""Requests of the Messages API become chats: JSON in, JSON out."""

import json
from typing import Any

import pytest

from services.gateway.anthropic_api.errors import own_name
from services.gateway.anthropic_api.request import NEUTRAL, MessagesRequest
from services.gateway.anthropic_api.translation import chat_fields
from services.gateway.api.requests.validation import parse_request


def request(**fields: Any) -> MessagesRequest:
    asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return parse_request(json.dumps(asked).encode(), MessagesRequest, NEUTRAL)


def translated(**fields: Any) -> dict[str, Any]:
    """The chat of a request, without what every request here has."""
    chat = chat_fields(request(**fields))
    assert (chat.pop("model"), chat.pop("max_tokens")) == ("m", 9)
    return chat


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": each} for each in texts]


HI = {"role": "user", "content": text("Hi")}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "b": [2]}}
CHAT_CALL = {"id": "toolu_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":[2]}'}}


def test_a_plain_request_is_a_plain_chat():
    assert translated() == {"messages": [HI]}


@pytest.mark.parametrize("system", ["Be brief.", text("Be brief.")])
def test_the_system_prompt_is_the_first_message(system: Any):
    assert translated(system=system)["messages"] == [{"role": "system", "content": text("Be brief.")}, HI]


def test_sampling_parameters_have_the_names_of_chats():
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop_sequences": ["\n\n"], "stream": True}
    chat = translated(**asked, metadata={"user_id": "u"}, service_tier="auto")
    expected = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop": ["\n\n"], "stream": True, "user": "u"}
    assert chat == {"messages": [HI], **expected}


def test_turns_of_one_role_are_one_message():
    turns = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": text("b", "c")},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": text("e")},
        {"role": "user", "content": "f"},
    ]
    assert translated(messages=turns)["messages"] == [
        {"role": "user", "content": text("a", "b", "c")},
        {"role": "assistant", "content": text("d", "e")},
        {"role": "user", "content": text("f")},
    ]


def test_an_answer_that_is_begun_is_continued():
    chat = translated(messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The best is ("}])
    assert chat["continue_final_message"] is True
    assert chat["add_generation_prompt"] is False


def test_an_answer_sent_back_keeps_its_reasoning_and_its_calls():
    thinking = {"type": "thinking", "thinking": "Add them.", "signature": "unsigned"}
    redacted = {"type": "redacted_thinking", "data": "xyz"}
    turns = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [thinking, redacted, *text("Adding."), {**CALL, "caller": {"type": "direct"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "3"}, *text("And?")]},
    ]
    expected = {"content": text("Adding."), "reasoning_content": "Add them.", "tool_calls": [CHAT_CALL]}
    assert translated(messages=turns)["messages"] == [
        HI,
        {"role": "assistant", **expected},
        {"role": "tool", "tool_call_id": "toolu_1", "content": text("3")},
        {"role": "user", "content": text("And?")},
    ]


def test_an_answer_without_content_is_one():
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": []}, {"role": "user", "content": "?"}]
    assert translated(messages=turns)["messages"][1] == {"role": "assistant"}


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"content": text("no", "way"), "is_error": True}, text("Error: no", "way")),
        ({"content": "3", "is_error": False}, text("3")),
        ({}, text("")),
        ({"is_error": True}, text("Error: ")),
    ],
)
def test_results_of_tools(result: dict[str, Any], expected: list[dict[str, str]]):
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", **result}]},
    ]
    last = translated(messages=turns)["messages"][-1]
    assert last == {"role": "tool", "tool_call_id": "toolu_1", "content": expected}


def test_tools_have_the_form_of_functions():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [
        {"name": "add", "description": "Adds.", "input_schema": schema, "strict": True, "cache_control": None},
        {"type": "custom", "name": "now", "input_schema": {"type": "object"}, "eager_input_streaming": True},
    ]
    assert translated(tools=tools)["tools"] == [
        {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": schema, "strict": True}},
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "add"}, {"tool_choice": {"type": "function", "function": {"name": "add"}}}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"type": "auto", "disable_parallel_tool_use": False}, {"tool_choice": "auto", "parallel_tool_calls": True}),
    ],
)
def test_the_choice_of_tools(choice: dict[str, Any], expected: dict[str, Any]):
    chat = translated(tools=[{"name": "add", "input_schema": {}}], tool_choice=choice)
    del chat["messages"], chat["tools"]
    assert chat == expected


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ({"type": "disabled"}, {"reasoning_effort": "none"}),
        ({"type": "adaptive"}, {"chat_template_kwargs": {"enable_thinking": True}}),
        (
            {"type": "enabled", "budget_tokens": 7, "display": "summarized"},
            {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 7},
        ),
    ],
)
def test_thinking(thinking: dict[str, Any], expected: dict[str, Any]):
    assert translated(thinking=thinking) == {"messages": [HI], **expected}
    effort = {"effort": "low"}
    assert translated(thinking=thinking, output_config=effort) == {
        "messages": [HI],
        "reasoning_effort": "low",
        **expected,
    }


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        (None, True),
        ({"type": "adaptive"}, True),
        ({"type": "adaptive", "display": "summarized"}, True),
        ({"type": "adaptive", "display": "omitted"}, False),
    ],
)
def test_answers_show_thinking_unless_it_is_to_be_omitted(thinking: dict[str, Any] | None, shown: bool):
    assert request(thinking=thinking).shows_thinking is shown


@pytest.mark.parametrize(("effort", "expected"), [("low", "low"), ("high", "high"), ("max", "max")])
def test_effort(effort: str, expected: str):
    assert translated(output_config={"effort": effort})["reasoning_effort"] == expected


def test_a_form_of_the_answer():
    schema = {"type": "object"}
    form = {"type": "json_schema", "schema": schema}
    expected = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    assert translated(output_config={"format": form})["response_format"] == expected
    assert translated(output_format=form)["response_format"] == expected


@pytest.mark.parametrize(
    ("chats", "own"),
    [
        ("stop", "stop_sequences"),
        ("temperature", "temperature"),
        ("response_format", "output_config.format"),
        ("tools[2].function.parameters", "tools[2].input_schema"),
        ("tools[0].function.name", "tools[0].name"),
        ("messages[7].tool_calls", "messages"),
    ],
)
def test_errors_name_the_fields_of_the_request(chats: str, own: str):
    assert own_name(chats, request(tools=[{"name": "f", "input_schema": {}}] * 3)) == own


def test_errors_number_tools_as_the_request_does():
    search, tool = {"type": "web_search_20260318", "name": "s"}, {"name": "f", "input_schema": {}}
    asked = request(tools=[search, tool, search, tool])
    assert own_name("tools[1].function.name", asked) == "tools[3].name"
    assert own_name("tools", asked) == "tools"
