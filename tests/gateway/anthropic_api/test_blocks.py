"""The blocks of answers from made-up updates, whole and as events: the same content, and never two blocks open."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from services.gateway.anthropic_api.answer import Head, as_input, content_of, ending, usage_json
from services.gateway.anthropic_api.events import MessageEvents
from services.gateway.api.answers.choice import ToolCallPart, Update, Usage

USAGE = Usage(prompt_tokens=10, completion_tokens=7, cached_tokens=4)


def update(
    text: str = "", reasoning: str = "", calls: Sequence[ToolCallPart] = (), finish: str | None = None
) -> Update:
    return Update(0, text, [1], None, finish, reasoning=reasoning, tool_calls=tuple(calls))


THINKS_AND_CALLS = [
    update(reasoning="First "),
    update(reasoning="add."),
    update(text="Adding"),
    update(text=" now."),
    update(calls=[ToolCallPart(0, "call_1", "add", "")]),
    update(calls=[ToolCallPart(0, None, None, '{"a":')]),
    update(calls=[ToolCallPart(0, None, None, " 1}"), ToolCallPart(1, "call_2", "now", "{}")]),
    update(finish="tool_calls"),
]
CALLS = [
    {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
    {"type": "tool_use", "id": "call_2", "name": "now", "input": {}},
]
CASES: dict[str, tuple[list[Update], list[dict[str, Any]]]] = {
    "nothing": ([update(finish="stop")], []),
    "text": ([update("a"), update("b", finish="stop")], [{"type": "text", "text": "ab"}]),
    "all in one": (
        [update("text", "why", [ToolCallPart(0, "c", "f", '{"x": "y"}')], "tool_calls")],
        [
            {"type": "thinking", "thinking": "why", "signature": "unsigned"},
            {"type": "text", "text": "text"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"x": "y"}},
        ],
    ),
    "thinks and calls": (
        THINKS_AND_CALLS,
        [
            {"type": "thinking", "thinking": "First add.", "signature": "unsigned"},
            {"type": "text", "text": "Adding now."},
            *CALLS,
        ],
    ),
    "text between calls": (
        [
            update(calls=[ToolCallPart(0, "call_1", "add", '{"a": 1}')]),
            update("and"),
            update(calls=[ToolCallPart(1, "call_2", "now", "{}")], finish="tool_calls"),
        ],
        [CALLS[0], {"type": "text", "text": "and"}, CALLS[1]],
    ),
}


def events_of(updates: Sequence[Update], shows_thinking: bool = True) -> list[dict[str, Any]]:
    """The events of a message, in JSON values. Text by itself takes the short form, as in a stream."""
    writer = MessageEvents(Head("msg_1", "m"), shows_thinking)
    parts = [writer.opening(Usage(10, 1, 0))]
    for each in updates:
        plain = each == update(text=each.text)
        parts.append(writer.text(0, each.text) if plain else writer.take(each))
    stream = b"".join([*parts, writer.closing(USAGE)]).decode()
    found = []
    for event in stream.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def content_from(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that a client makes of events. Fails where two blocks are open, or an event is about a closed one."""
    content: list[dict[str, Any]] = []
    open_block = None
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert (open_block, event["index"]) == (None, len(content))
                open_block = event["index"]
                content.append({**event["content_block"], "pieces": ""})
            case "content_block_delta":
                assert event["index"] == open_block
                _, piece = event["delta"].values()
                if event["delta"]["type"] == "signature_delta":
                    content[-1]["signature"] = piece
                else:
                    content[-1]["pieces"] += piece
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
    assert open_block is None
    return [_joined(block) for block in content]


def _joined(block: dict[str, Any]) -> dict[str, Any]:
    pieces = block.pop("pieces")
    match block["type"]:
        case "tool_use":
            return {**block, "input": json.loads(pieces or "{}")}
        case "text":
            return {**block, "text": pieces}
        case _:
            return {**block, "thinking": pieces}


@pytest.mark.parametrize("case", CASES)
def test_whole_and_streamed_answers_have_the_same_blocks(case: str):
    updates, expected = CASES[case]
    assert content_of(updates, shows_thinking=True) == expected
    assert content_from(events_of(updates)) == expected


def test_a_stream_begins_with_the_message_and_ends_with_its_usage():
    start, ping, *_, delta, stop = events_of(CASES["text"][0])
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["input_tokens"] == 10
    assert ping == {"type": "ping"}
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"] == usage_json(USAGE)
    assert stop == {"type": "message_stop"}


def test_thinking_may_be_left_out_of_answers():
    (block, *_) = content_of(THINKS_AND_CALLS, shows_thinking=False)
    assert block == {"type": "thinking", "thinking": "", "signature": "unsigned"}
    assert content_from(events_of(THINKS_AND_CALLS, shows_thinking=False))[0] == block


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (update(finish="stop"), ("end_turn", None)),
        (update(finish="length"), ("max_tokens", None)),
        (update(finish="tool_calls"), ("tool_use", None)),
        (update(finish="stop")._replace(stop_reason="END"), ("stop_sequence", "END")),
        (update(finish="stop")._replace(stop_reason=7), ("end_turn", None)),
    ],
)
def test_why_a_message_ended(last: Update, expected: tuple[str, str | None]):
    assert tuple(ending(last).values()) == expected


def test_cached_tokens_are_not_input_tokens():
    assert usage_json(USAGE) == {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 7,
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ('{"a": {"b": 1}}', {"a": {"b": 1}}),
        ('{"a": [1, 2', {}),
        ('{"a": 12', {}),
        ('{"a": "x, y", "b": {"c": [1]}, "d": "e', {"a": "x, y", "b": {"c": [1]}}),
        ('{"a": "\\"},", "b": 1', {"a": '"},'}),
        (' {"a": {"b": 1}', {"a": {"b": 1}}),
        ('{"a": "x"', {"a": "x"}),
        ('{"a": "x\\\\"', {"a": "x\\"}),
        ('{"a": "x\\"', {}),
        ('{"a": 1, "b"', {"a": 1}),
        ('{"a": 1, "b": tru', {"a": 1}),
        ('{"a": 1} {', {"value": '{"a": 1} {'}),
        ("[1, 2", {"value": "[1, 2"}),
        ("[1]", {"value": [1]}),
        ("no JSON", {"value": "no JSON"}),
        ("{no JSON", {}),
        ('{"a": 123456789012345678901234567890}', {"value": '{"a": 123456789012345678901234567890}'}),
    ],
)
def test_the_input_of_a_tool_is_an_object(arguments: str, expected: dict[str, Any]):
    assert as_input(arguments) == expected
