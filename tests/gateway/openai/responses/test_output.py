"""Updates become output items and events, which say the same."""

import itertools
import json
from typing import Any

import orjson
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from services.gateway.api.answers.choice import ToolCallPart, Update, joined
from services.gateway.openai.logprobs import LogprobEntries
from services.gateway.openai.responses.events import Events
from services.gateway.openai.responses.items import response_with_item
from services.gateway.openai.responses.offered_tools import OfferedTools, offered
from services.gateway.openai.responses.output import ItemStatus, Nobody, Output
from services.gateway.openai.responses.tools import Tools
from services.gateway.openai.token_names import TokenNames
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.frames import TokenLogprobs
from tests.gateway.tokenizer_files import byte_level

TOKENIZER = Tokenizer(byte_level(), {})
ENTRIES = LogprobEntries(TOKENIZER, TokenNames(TOKENIZER, by_id=False))
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def update(text: str = "", reasoning: str = "", calls: tuple[ToolCallPart, ...] = (), **more: Any) -> Update:
    return Update(0, text, [5], None, more.pop("finish", None), reasoning=reasoning, tool_calls=calls, **more)


RESPONSE = f"resp_{5:032x}"
TOOLS = OfferedTools(
    [
        *offered(
            TypeAdapter(Tools).validate_python(
                [
                    {"type": "custom", "name": "patch"},
                    {"type": "namespace", "name": "math", "tools": [{"type": "function", "name": "sub"}]},
                ]
            ),
            "tools",
        )
    ]
)

EVERYTHING = [
    update(reasoning="I "),
    update(reasoning="add."),
    update("The "),
    update("sum:"),
    update(calls=(ToolCallPart(0, "c1", "add", ""),)),
    update(calls=(ToolCallPart(0, None, None, '{"a":'),)),
    update(calls=(ToolCallPart(0, None, None, "1}"), ToolCallPart(1, "c2", "math__sub", "{"))),
    update(calls=(ToolCallPart(1, None, None, "}"),)),
    update(calls=(ToolCallPart(2, "c3", "patch", "", custom=True),)),
    update(calls=(ToolCallPart(2, None, None, '+a"', custom=True), ToolCallPart(2, None, None, "b", custom=True))),
    update(finish="tool_calls"),
]


def run(updates: list[Update], status: ItemStatus = ItemStatus.COMPLETED) -> tuple[Output, list[dict[str, Any]]]:
    events = Events()
    output = Output(ENTRIES, events, RESPONSE, TOOLS)
    for each in updates:
        output.take(each)
    output.close(status)
    return output, parsed(events.taken())


def parsed(stream: bytes) -> list[dict[str, Any]]:
    found = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def items(output: Output) -> list[dict[str, Any]]:
    """The items as JSON, without the ids that are made for each."""
    listed = orjson.loads(orjson.dumps(output.as_json()))
    return [{name: value for name, value in item.items() if name != "id"} for item in listed]


def test_reasoning_text_and_each_call_are_items():
    output, _ = run(EVERYTHING)
    reasoning, message, first, second, third = items(output)
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "I add."}]
    assert message["content"] == [{"type": "output_text", "text": "The sum:", "annotations": [], "logprobs": []}]
    call = {"type": "function_call", "status": "completed", "call_id": "c1", "name": "add", "arguments": '{"a":1}'}
    assert first == call
    assert second == {**call, "call_id": "c2", "namespace": "math", "name": "sub", "arguments": "{}"}
    about = {"type": "custom_tool_call", "status": "completed"}
    assert third == {**about, "call_id": "c3", "name": "patch", "input": '+a"b'}


def test_the_id_of_an_item_says_in_which_response_it_is():
    ids = [item["id"] for item in run(EVERYTHING)[0].as_json()]
    assert [item_id.partition("_")[0] for item_id in ids] == ["rs", "msg", "fc", "fc", "ctc"]
    assert {response_with_item(item_id) for item_id in ids} == {RESPONSE}
    assert len(set(ids)) == len(ids)
    assert response_with_item(f"msg_{'0' * 32}") is response_with_item("of another server") is None


def test_the_pieces_of_a_stream_are_the_whole():
    """For each item: the joined deltas, the text of the done event, and that of the item are the same."""
    output, events = run(EVERYTHING)
    whole = run([joined(EVERYTHING)])[0]
    assert items(whole) == items(output)
    for item in output.as_json():
        own = [event for event in events if event.get("item_id") == item["id"]]
        text = item.get("arguments") or item.get("input") or item["content"][0]["text"]
        assert "".join(event["delta"] for event in own if event["type"].endswith(".delta")) == text
        ends = (".text.done", "_text.done", "arguments.done", "input.done")
        (done,) = [event for event in own if event["type"].endswith(ends)]
        assert next(done[name] for name in ("arguments", "input", "text") if name in done) == text
    finished = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert finished == orjson.loads(orjson.dumps(output.as_json()))


def test_events_of_an_item_come_in_order():
    _, events = run([update("a"), update("b")])
    assert [event["type"].removeprefix("response.") for event in events] == [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]


def test_an_item_ends_before_the_next_one_begins():
    _, events = run(EVERYTHING)
    bounds = [event["type"] for event in events if "output_item" in event["type"]]
    assert bounds == ["response.output_item.added", "response.output_item.done"] * 5
    assert [event["output_index"] for event in events] == sorted(event["output_index"] for event in events)


def test_a_complete_output_has_a_message_even_if_it_is_empty():
    output, events = run([update(finish="stop")])
    (message,) = items(output)
    assert message["content"][0]["text"] == ""
    assert events[-1]["type"] == "response.output_item.done"


def test_what_was_cut_off_is_incomplete():
    statuses = [item["status"] for item in run(EVERYTHING[:4], ItemStatus.INCOMPLETE)[0].as_json()]
    assert statuses == ["completed", "incomplete"]
    assert run([], ItemStatus.INCOMPLETE)[0].as_json() == []


def test_the_short_form_says_what_the_long_one_says():
    events = Events()
    output = Output(ENTRIES, events, RESPONSE, TOOLS)
    assert not output.take_text("no message is open")
    output.take(update("a"))
    before = events.taken()
    assert output.take_text("b\n")
    short = events.delta("b\n")
    output.close(ItemStatus.COMPLETED)
    for long, found in itertools.zip_longest(
        run([update("a"), update("b\n")])[1], parsed(before + short + events.taken())
    ):
        assert {**long, "item_id": 0, "item": 0} == {**found, "item_id": 0, "item": 0}


@pytest.mark.parametrize("texts", [["a", "b", ""], ["", "a", "b"], ["", "", ""]])
def test_every_token_of_the_text_has_its_logprobs(texts: list[str]):
    """Also tokens that bring no text: a part of a character, and the end of the sequence."""
    entry = TokenLogprobs(-0.5, ((7, -0.5), (8, -1.0)))
    updates = [Update(0, text, [7], [entry], None) for text in texts]
    output, events = run(updates)
    (message,) = items(output)
    logprobs = message["content"][0]["logprobs"]
    assert [entry["logprob"] for entry in logprobs] == [-0.5] * 3
    assert [len(entry["top_logprobs"]) for entry in logprobs] == [2] * 3
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert list(itertools.chain(*deltas)) == logprobs


def test_reasoning_has_no_logprobs():
    entry = TokenLogprobs(-0.5, ())
    updates = [Update(0, "", [7], [entry], None, reasoning="r"), Update(0, "a", [8], [entry], "stop")]
    reasoning, message = items(run(updates)[0])
    assert "logprobs" not in reasoning["content"][0]
    assert len(message["content"][0]["logprobs"]) == 1


def test_nobody_needs_no_events():
    output = Output(ENTRIES, Nobody(), RESPONSE, TOOLS)
    for each in EVERYTHING:
        output.take(each)
    output.close(ItemStatus.COMPLETED)
    assert items(output) == items(run(EVERYTHING)[0])
