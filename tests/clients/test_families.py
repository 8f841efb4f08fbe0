"""Models of every family call tools over several rounds, in every API."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.families import FAMILIES
from tests.clients.place import Place
from tests.clients.scripted_gateway import ScriptedGateway
from tests.clients.scripted_model import calls, says
from tests.machine import NAMESPACES, needs

TEXT = "Both are dry."
PROMPT = {"role": "user", "content": "Follow plan:weather."}
CITIES = ("Paris", "Rome")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}

Turns = list[Any]
Ask = Callable[[ScriptedGateway, Turns], tuple[str, str]]  # adds the answer, and the call's result. Text and arguments


def by_chats(gateway: ScriptedGateway, turns: Turns) -> tuple[str, str]:
    tools = [{"type": "function", "function": TOOL}]
    message = gateway.post("/v1/chat/completions", messages=turns, tools=tools)["choices"][0]["message"]
    made = message.get("tool_calls") or []
    turns += [message, *({"role": "tool", "tool_call_id": call["id"], "content": "Dry."} for call in made)]
    return message["content"], "".join(call["function"]["arguments"] for call in made)


def by_responses(gateway: ScriptedGateway, turns: Turns) -> tuple[str, str]:
    output = gateway.post("/v1/responses", input=turns, tools=[{"type": "function", **TOOL}])["output"]
    made = [item for item in output if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "Dry."} for call in made]
    turns += [*output, *results]
    texts = [part["text"] for item in output if item["type"] == "message" for part in item["content"]]
    return "".join(texts), "".join(call["arguments"] for call in made)


def by_messages(gateway: ScriptedGateway, turns: Turns) -> tuple[str, str]:
    tools = [{"name": TOOL["name"], "input_schema": SCHEMA}]
    content = gateway.post("/v1/messages", max_tokens=512, messages=turns, tools=tools)["content"]
    made = [block for block in content if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "Dry."} for use in made]
    turns += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
    return "".join(block.get("text", "") for block in content), "".join(str(use["input"]) for use in made)


@pytest.mark.parametrize("ask", [by_chats, by_responses, by_messages])
@pytest.mark.parametrize("gateway", FAMILIES, indirect=True)
def test_tools_are_called_over_two_rounds(gateway: ScriptedGateway, ask: Ask):
    gateway.model.plans = {"weather": [*(calls("weather", city=city) for city in CITIES), says(TEXT)]}
    turns: Turns = [PROMPT]
    for city in CITIES:
        text, arguments = ask(gateway, turns)
        assert not text
        assert city in arguments
    assert ask(gateway, turns) == (TEXT, "")


@needs(NAMESPACES)
def test_a_client_that_speaks_to_anyone_else_is_noticed(gateways: Callable[[str], ScriptedGateway], place: Place):
    gateway = gateways("qwen3")
    before = gateway.num_elsewhere()
    program = "import socket\ntry:\n    socket.create_connection(('192.0.2.1', 80))\nexcept OSError:\n    pass"
    place.run("python3", "-c", program, enter=gateway.enter)
    assert gateway.num_elsewhere() == before + 1
