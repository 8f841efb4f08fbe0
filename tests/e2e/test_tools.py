"""Calls of tools through the whole stack: held by grammars, through handoffs, and when a worker dies."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

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
