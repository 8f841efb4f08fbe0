"""Custom tools in chats with the official client: their prompts, answers, and histories."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from services.protocol.outcomes import FinishReason
from tests.gateway.openai.test_tools import CLOCK, TEMPLATE
from tests.gateway.running_api import Api, running_api
from tests.gateway.scripted_generator import Script, delta_per_token, one_delta

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHELL: Any = {"type": "custom", "custom": {"name": "shell", "description": "Runs a command."}}
DIGITS: Any = {
    "type": "custom",
    "custom": {"name": "dial", "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]+"}}},
}
USER: list[Any] = [{"role": "user", "content": "Hi"}]
CALLED = (
    'I look.\n<tool_call>{"name": "shell", "arguments": {"input": "echo \\"a\\"\\n"}}</tool_call>\n'
    '<tool_call>{"name": "clock", "arguments": {"zone": 1}}</tool_call>'
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api(template=TEMPLATE) as running:
        running.generator.max_model_len = 4096
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(api: Api) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("make_deltas", [delta_per_token, one_delta])
async def test_calls_of_custom_tools_whole_and_streamed(api: Api, client: openai.AsyncOpenAI, make_deltas: Any):
    api.generator.script = Script(make_deltas([*api.tokens(CALLED), 1], FinishReason.STOP))
    fields: Any = {"model": "m", "messages": USER, "tools": [SHELL, CLOCK]}
    (choice,) = (await client.chat.completions.create(**fields)).choices
    first, second = list(choice.message.tool_calls or [])
    assert choice.finish_reason == "tool_calls"
    assert first.type == "custom"
    assert (first.custom.name, first.custom.input) == ("shell", 'echo "a"\n')
    assert second.type == "function"
    assert (second.function.name, second.function.arguments) == ("clock", '{"zone": 1}')
    names, inputs, arguments = list[str](), "", ""
    async for chunk in await client.chat.completions.create(stream=True, **fields):
        for part in chunk.choices[0].to_dict()["delta"].get("tool_calls", ()):
            assert ("custom" in part) == (part["index"] == 0)
            called = part.get("custom") or part["function"]
            names += [called["name"]] if "name" in called else []
            inputs += called.get("input", "")
            arguments += called.get("arguments", "")
    assert (names, inputs, arguments) == (["shell", "clock"], 'echo "a"\n', '{"zone": 1}')


async def test_a_custom_tool_is_a_function_of_one_text_to_its_model(api: Api):
    api.generator.script = Script(one_delta(api.tokens("Hello")))
    call = {"id": "a", "type": "custom", "custom": {"name": "shell", "input": "ls\n"}}
    history = [
        *USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ]
    assert (await api.chat(messages=history, tools=[SHELL, DIGITS])).status_code == 200
    prompt = api.tokenizer.backend.decode(api.generator.requests[-1].capsules[0].token_ids.tolist())
    assert '"name": "shell", "description": "Runs a command.", "parameters": {"type": "object"' in prompt
    assert "Matches this regex grammar:\\n[0-9]+" in prompt
    assert '{"name": "shell", "arguments": {"input": "ls\\n"}}' in prompt


async def test_a_grammar_and_a_choice_by_name_hold_the_answer(api: Api):
    for choice in (None, "required", {"type": "custom", "custom": {"name": "dial"}}):
        assert (await api.chat(tools=[SHELL, DIGITS], tool_choice=choice)).status_code == 200
        assert "[0-9]+" in api.generator.requests[-1].capsules[0].sampling.grammar
    assert (await api.chat(tools=[SHELL])).status_code == 200
    assert api.generator.requests[-1].capsules[0].sampling.grammar == ""


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "tools[1].custom"),
        ({"type": "custom", "custom": {"name": "a b"}}, "tools[1].custom.name"),
        ({"type": "custom", "custom": {"name": "a", "format": {"type": "poem"}}}, "tools[1].custom.format.type"),
        ({"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}}, "tools[1].custom.format"),
        ({"type": "custom", "custom": {"name": "clock"}}, "tools[1].custom.name"),
        (
            {**DIGITS, "custom": {"name": "a", "format": {"type": "grammar", "grammar": {"syntax": "ebnf"}}}},
            "tools[1].custom.format.grammar.syntax",
        ),
    ],
)
async def test_a_wrong_custom_tool_is_refused_by_its_field(api: Api, tool: Any, param: str):
    refused = await api.chat(tools=[CLOCK, tool])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_tools_that_only_a_vendor_runs_are_left_out_and_named(api: Api):
    search = {"type": "web_search", "filters": {"any": "thing"}}
    answer = await api.chat(tools=[search, CLOCK, {"type": "code_interpreter"}])
    assert answer.headers["x-baton-ignored-fields"] == "tools[0], tools[2]"
    with_one = api.generator.requests[-1].capsules[0].token_ids.tolist()
    await api.chat(tools=[CLOCK])
    assert api.generator.requests[-1].capsules[0].token_ids.tolist() == with_one
    strict = {"type": "function", "function": {"name": "a", "strict": True, "parameters": {"type": "strin"}}}
    refused = await api.chat(tools=[search, strict])
    assert refused.json()["error"]["param"].startswith("tools")


@pytest.mark.parametrize("fields", [{"tools": []}, {"tool_choice": "auto"}, {"tools": [], "tool_choice": "none"}])
async def test_no_tools_are_none(api: Api, fields: dict[str, Any]):
    assert (await api.chat(**fields)).status_code == 200
    prompt = api.generator.requests[-1].capsules[0].token_ids.tolist()
    await api.chat()
    assert api.generator.requests[-1].capsules[0].token_ids.tolist() == prompt
