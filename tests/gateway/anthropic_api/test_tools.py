"""Tools and thinking by the official client, over scripted answers: whole, streamed, and in a second turn."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from services.protocol.outcomes import FinishReason
from tests.gateway.running_api import Api, running_api
from tests.gateway.scripted_generator import Script, delta_per_token

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>'
WRITTEN = f"<think>\nSum them.\n</think>\n\nAdding.\n{CALL}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ASKED: dict[str, Any] = {
    "model": "m",
    "max_tokens": 120,
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
}


@pytest_asyncio.fixture
async def api() -> AsyncIterator[Api]:
    async with running_api(template=TEMPLATE) as running:
        running.generator.max_model_len = 2048
        running.generator.script = Script(delta_per_token([*running.tokens(WRITTEN), 1], FinishReason.STOP))
        yield running


@pytest_asyncio.fixture
async def client(api: Api) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=api.base_url, api_key="none", max_retries=0) as client:
        yield client


async def ask(client: anthropic.AsyncAnthropic, stream: bool, **fields: Any) -> anthropic.types.Message:
    if not stream:
        return await client.messages.create(**{**ASKED, **fields})
    async with client.messages.stream(**{**ASKED, **fields}) as streamed:
        return await streamed.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_text_and_calls_are_blocks(api: Api, client: anthropic.AsyncAnthropic, stream: bool):
    message = await ask(client, stream)
    thinking, text, call = message.content
    assert (thinking.type, thinking.thinking.strip()) == ("thinking", "Sum them.")
    assert thinking.signature
    assert (text.type, text.text.strip()) == ("text", "Adding.")
    assert (call.type, call.name, call.input) == ("tool_use", "add", {"a": 1, "b": [2, "x"]})
    assert message.stop_reason == "tool_use"


async def test_a_second_turn_has_the_call_and_its_result(api: Api, client: anthropic.AsyncAnthropic):
    first = await ask(client, stream=True)
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "3"}
    turns = [*ASKED["messages"], {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    await ask(client, False, messages=turns)
    prompt = api.tokenizer.decode(api.generator.requests[-1].capsules[0].token_ids.tolist())
    assert "Sum them." in prompt
    assert f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'a': 1, 'b': [2, 'x']}})}</tool_call>" in prompt
    assert "tool\n3" in prompt


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
async def test_a_call_that_must_be_is_held_by_a_grammar(
    api: Api, client: anthropic.AsyncAnthropic, choice: dict[str, Any]
):
    await ask(client, False, tool_choice=choice)
    assert "add" in api.generator.requests[-1].capsules[0].sampling.grammar


async def test_thinking_may_be_omitted(api: Api, client: anthropic.AsyncAnthropic):
    message = await ask(client, False, thinking={"type": "adaptive", "display": "omitted"})
    assert message.content[0].thinking == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice"),
        ({"tools": [*ASKED["tools"], *ASKED["tools"]]}, "tools[1].name"),
        ({"tools": [{"name": f"f{number}", "input_schema": {}} for number in range(129)]}, "tools"),
        ({"tools": [{"name": "f" * 129, "input_schema": {}}]}, "tools[0].name"),
    ],
)
async def test_errors_of_tools_and_thinking_name_their_fields(
    api: Api, client: anthropic.AsyncAnthropic, fields: dict[str, Any], param: str
):
    with pytest.raises(anthropic.BadRequestError) as refused:
        await ask(client, False, **fields)
    message = refused.value.body["error"]["message"]
    assert message.startswith(f"{param}: ")
    assert "reasoning_effort" not in message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"thinking": {"type": "disabled"}}, "thinking"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "between_tools"}}, None),
        ({"thinking": {"type": "enabled"}}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 31_999}}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 119}}, None),
    ],
)
async def test_wishes_for_more_or_less_thinking_that_the_template_does_not_know(
    api: Api, client: anthropic.AsyncAnthropic, fields: dict[str, Any], named: str | None
):
    answer = await client.messages.with_raw_response.create(**ASKED, **fields)
    assert answer.headers.get("x-baton-ignored-fields") == named
    assert (await answer.parse()).content[0].type == "thinking"
    assert not api.generator.requests[-1].capsules[0].sampling.grammar


async def test_a_budget_of_thinking_below_all_tokens_is_kept(api: Api, client: anthropic.AsyncAnthropic):
    await ask(client, False, thinking={"type": "enabled", "budget_tokens": 118})
    assert "{0,118}" in api.generator.requests[-1].capsules[0].sampling.grammar


async def test_as_many_tools_and_as_long_names_as_are_taken(api: Api, client: anthropic.AsyncAnthropic):
    api.generator.max_model_len = 1 << 20
    names = [f"{number:f>128}" for number in range(128)]
    await ask(client, False, tools=[{"name": name, "input_schema": {}} for name in names])
    assert len(api.generator.requests) == 1


TAGS = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[1, 2"
CUT = {
    "hermes": ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [1, 2', '{"a": 1, "b": [1, 2', {"a": 1}),
    "text": ('<tool_call>\n{"name": "add", "arguments": {"b": "rm -rf /tm', '{"b": "rm -rf /tm', {}),
    "qwen3-coder": (TAGS, '{"a": 1', {}),
}


@pytest.mark.parametrize("form", CUT)
async def test_a_call_that_is_cut_off_is_not_closed(form: str):
    written, pieces, whole = CUT[form]
    template = TEMPLATE + ("{# <function=f> <parameter=p> #}" if form == "qwen3-coder" else "")
    async with running_api(template=template) as api:
        api.generator.max_model_len = 2048
        api.generator.script = Script(delta_per_token(api.tokens(written), FinishReason.LENGTH))
        async with anthropic.AsyncAnthropic(base_url=api.base_url, api_key="none", max_retries=0) as client:
            message = await ask(client, False)
            assert (message.stop_reason, message.content[-1].name) == ("max_tokens", "add")
            assert message.content[-1].input == whole
            stream = await client.messages.create(**ASKED, stream=True)
            deltas = [event.delta for event in [event async for event in stream] if event.type == "content_block_delta"]
            assert "".join(delta.partial_json for delta in deltas if delta.type == "input_json_delta") == pieces
