"""Calls of tools through the whole stack: held by grammars, through handoffs, and when a worker dies."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
import jsonschema  # type: ignore[import-untyped]
import pytest

from protos import inference_pb2, inference_pb2_grpc
from tests.e2e.conftest import write_model
from tests.e2e.schemas import draw
from tests.e2e.stack import Stack, running_stack, wait_until
from tests.faults.case import busiest

ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "pattern": "^[a-z]{100}$"},
        "number": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["street", "number"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A prefill worker and two decode workers, of a model whose template knows no tools."""
    model = write_model(tmp_path_factory.mktemp("llama"), "llama", max_position_embeddings=2048)
    with running_stack(model, decode=2, options=["--max-num-batched-tokens", "37"]) as running:
        yield running


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def ask(stack: Stack, seed: int = 0, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "Call."}]
    fixed: dict[str, Any] = {"model": "tiny", "temperature": 1.0, "seed": seed}
    return stack.gateway.client.chat.completions.create(messages=messages, **{**fixed, **fields})


def objects(count: int) -> list[dict[str, Any]]:
    """Schemas of objects, as arguments have them."""
    return [_with_value(schema) for schema in draw(count)]


def _with_value(schema: dict[str, Any]) -> dict[str, Any]:
    own = {name: part for name, part in schema.items() if name != "$defs"}
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    return {"type": "object", "properties": {"value": own}, "required": ["value"], **definitions}


@pytest.mark.long
def test_arguments_validate_against_the_schemas_of_required_calls(stack: Stack):
    before = stack.gateway.metric("baton_handoffs_total", outcome="completed")
    num_whole = 0
    for seed, schema in enumerate(objects(12)):
        tools = [tool("first", schema), tool("second", ADDRESS)]
        answer = ask(stack, seed, tools=tools, tool_choice="required", n=2)
        for choice in answer.choices:
            calls = choice.message.tool_calls
            assert choice.message.content is None
            for call in calls if choice.finish_reason == "tool_calls" else calls[:-1]:
                used = {"first": schema, "second": ADDRESS}[call.function.name]
                jsonschema.Draft202012Validator(used).validate(json.loads(call.function.arguments))
                num_whole += 1
    assert num_whole >= 12
    assert stack.gateway.metric("baton_handoffs_total", outcome="completed") > before


def test_a_named_tool_is_called_once(stack: Stack):
    for seed, schema in enumerate(objects(6)):
        tools = [tool("first", schema), tool("second", ADDRESS)]
        choice = {"type": "function", "function": {"name": "second"}}
        (call,) = ask(stack, seed, tools=tools, tool_choice=choice).choices[0].message.tool_calls
        assert call.function.name == "second"
        jsonschema.Draft202012Validator(ADDRESS).validate(json.loads(call.function.arguments))


@pytest.mark.long
def test_a_streamed_call_goes_on_when_its_worker_dies(stack: Stack):
    fields: dict[str, Any] = {
        "tools": [tool("second", ADDRESS)],
        "tool_choice": {"type": "function", "function": {"name": "second"}},
    }
    expected = ask(stack, 7, **fields).choices[0]
    arguments, killed, finish = "", False, None
    for chunk in ask(stack, 7, stream=True, **fields):
        for part in chunk.choices[0].delta.tool_calls or ():
            arguments += part.function.arguments
        finish = chunk.choices[0].finish_reason or finish
        if len(arguments) > 60 and not killed:
            killed = True
            stack.workers[busiest(stack, "decode")].kill()
    assert killed
    assert arguments == expected.message.tool_calls[0].function.arguments
    assert finish == expected.finish_reason == "tool_calls"
    stack.heal()
    wait_until(stack.gateway.at_baseline)


def joined(answers: Iterable[inference_pb2.GenerateResponse]) -> tuple[list[list[str]], int]:
    """The calls of a streamed answer, and its finish reason."""
    calls: list[list[str]] = []
    finish = 0
    for answer in answers:
        for part in answer.tool_calls:
            if part.id:
                calls.append([part.name, ""])
            calls[part.call][1] += part.arguments
        finish = answer.finish_reason or finish
    return calls, finish


def test_a_call_over_grpc_is_that_of_http_and_goes_on_when_its_worker_dies(stack: Stack):
    """Handed off from the prefill worker each time, with a second turn that has the call and its result."""
    fields: dict[str, Any] = {"tools": [tool("second", ADDRESS)], "tool_choice": "required"}
    (expected,) = ask(stack, 11, **fields, parallel_tool_calls=False).choices[0].message.tool_calls
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Call."}],
        "tools": [{"name": "second", "parameters": json.dumps(ADDRESS)}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    before = stack.gateway.metric("baton_handoffs_total", outcome="completed")
    lost = stack.gateway.metric("baton_attempt_ends_total", reason="worker_lost")
    with grpc.insecure_channel(f"127.0.0.1:{stack.gateway.grpc_port}") as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)

        def generate(**more: Any) -> Iterator[inference_pb2.GenerateResponse]:
            request = inference_pb2.GenerateRequest(chat={**chat, **more}, temperature=1.0, seed=11)
            for number, answer in enumerate(inference.Generate(request, timeout=300)):
                if number == 8 and not more:
                    stack.workers[busiest(stack, "decode")].kill()
                yield answer

        calls, finish = joined(generate())
        assert calls == [[expected.function.name, expected.function.arguments]]
        assert finish == inference_pb2.FINISH_REASON_TOOL_CALLS
        assert stack.gateway.metric("baton_attempt_ends_total", reason="worker_lost") > lost
        stack.heal()
        call = {"id": expected.id, "name": calls[0][0], "arguments": calls[0][1]}
        turn = [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "x"},
        ]
        ((name, arguments),), _ = joined(generate(messages=[*chat["messages"], *turn]))
        assert name == "second"
        jsonschema.Draft202012Validator(ADDRESS).validate(json.loads(arguments))
    assert stack.gateway.metric("baton_handoffs_total", outcome="completed") - before >= 2
    wait_until(stack.gateway.at_baseline)
