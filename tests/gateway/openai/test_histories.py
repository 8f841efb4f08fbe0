"""Histories that clients really send are taken by chats: whatever an answer or a tool once gave."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.gateway.openai.test_tools import CLOCK, TEMPLATE
from tests.gateway.running_api import Api, running_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api(template=TEMPLATE) as running:
        running.generator.max_model_len = 4096
        yield running


async def prompt_of(api: Api, *messages: Any, **fields: Any) -> str:
    answer = await api.chat(messages=list(messages), **fields)
    assert answer.status_code == 200, answer.text
    return api.tokenizer.backend.decode(
        api.generator.requests[-1].capsules[0].token_ids.tolist(), skip_special_tokens=False
    )


def say(role: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calling(function: Any, **more: Any) -> dict[str, Any]:
    return say("assistant", tool_calls=[{"id": "a", "type": "function", "function": function, **more}])


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
async def test_no_content_is_the_same_in_every_form(api: Api, role: str):
    contents: list[Any] = ["", None, []]
    prompts = [await prompt_of(api, say(role, content), say("user", "Hi")) for content in contents]
    prompts.append(await prompt_of(api, {"role": role}, say("user", "Hi")))
    assert len(set(prompts)) == 1
    assert prompts[0].count("<|im_start|>") == 3


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"town": "Kö', '"{\\"town\\": \\"Kö"'),
        (None, "{}"),
        ("", "{}"),
        ("null", "{}"),
        ([1, "b"], '[1, "b"]'),
        ({"town": "Köln"}, '{"town": "Köln"}'),
        ('{"town": "Köln"}', '{"town": "Köln"}'),
        ("not JSON", '"not JSON"'),
    ],
)
async def test_arguments_of_earlier_calls_are_shown_as_they_are(api: Api, arguments: Any, shown: str):
    called = calling({"name": "weather", "arguments": arguments})
    prompt = await prompt_of(api, say("user", "Hi"), called, say("tool", "x", tool_call_id="a"))
    assert f'{{"name": "weather", "arguments": {shown}}}' in prompt


@pytest.mark.parametrize("part", [IMAGE, {"type": "input_audio", "input_audio": {}}, {"type": "file", "file": {}}])
async def test_media_are_a_line_of_text_in_a_tools_result_and_refused_in_a_users_turn(api: Api, part: Any):
    called = calling({"name": "weather"})
    result = say("tool", [{"type": "text", "text": "Look:"}, part], tool_call_id="a")
    prompt = await prompt_of(api, say("user", "Hi"), called, result)
    assert f"Look:\n[{part['type']}: this model reads text alone]" in prompt
    refused = await api.chat(messages=[say("user", [part])])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[0].content[0].type")


async def test_results_are_shown_in_the_order_of_the_calls(api: Api):
    calls = [{"id": own, "type": "function", "function": {"name": own}} for own in ("a", "b")]
    results = [say("tool", "second", tool_call_id="b"), say("tool", "first", tool_call_id="a")]
    prompt = await prompt_of(api, say("user", "Hi"), say("assistant", tool_calls=calls), *results)
    assert prompt.index("first") < prompt.index("second")


async def test_an_answer_comes_back_with_all_its_fields(api: Api):
    answer = say(
        "assistant",
        "Hello",
        refusal=None,
        audio={"id": "audio_1"},
        annotations=[{"type": "url_citation", "url_citation": {"url": "x"}}],
        reasoning_details=[{"type": "reasoning.text", "text": "hm"}],
    )
    sent = await api.chat(messages=[say("user", "Hi"), answer, say("user", "Go on")])
    assert sent.status_code == 200, sent.text
    assert sent.headers["x-baton-ignored-fields"] == "messages[1].reasoning_details, messages[1].audio"
    assert "I cannot." in await prompt_of(api, say("user", "Hi"), say("assistant", refusal="I cannot."))
    refusal = [{"type": "refusal", "refusal": "I will not."}]
    assert "I will not." in await prompt_of(api, say("user", "Hi"), say("assistant", refusal))


async def test_calls_of_older_clients_and_ids_of_any_form(api: Api):
    older = say("assistant", function_call={"name": "clock", "arguments": "{}"})
    prompt = await prompt_of(api, say("user", "Hi"), older, say("function", "12:00", name="clock"), tools=[CLOCK])
    assert '<tool_call>{"name": "clock", "arguments": {}}</tool_call>' in prompt
    assert "<|im_start|>tool\n12:00" in prompt
    for own in (7, "toolu_01/x y", "", None):
        called = say("assistant", tool_calls=[{"id": own, "function": {"name": "clock", "arguments": "{}"}}])
        assert "12:00" in await prompt_of(api, say("user", "Hi"), called, say("tool", "12:00", tool_call_id=own))


async def test_a_template_that_refuses_late_messages_of_the_system_is_given_them_in_users_turns():
    template = "{% for m in messages[1:] if m.role == 'system' %}{{ raise_exception('first') }}{% endfor %}"
    async with running_api(template=template + TEMPLATE) as api:
        prompt = await prompt_of(
            api, say("system", "Be short."), say("developer", "Be kind."), say("user", "Hi"), say("system", "Now long.")
        )
        assert "<|im_start|>system\nBe short.\n\nBe kind.<|im_end|>" in prompt
        assert "<|im_start|>user\n<system>\nNow long.\n</system><|im_end|>" in prompt


async def test_a_text_that_is_null_is_an_empty_one(api: Api):
    for role in ("user", "assistant", "tool"):
        nothing, empty = ([{"type": "text", "text": text}] for text in (None, ""))
        shown = [await prompt_of(api, say("user", "Hi"), say(role, content)) for content in (nothing, empty)]
        assert shown[0] == shown[1]


@pytest.mark.parametrize("thinking", ["so it is", [{"type": "text", "text": "so"}, {"type": "text", "text": "it is"}]])
async def test_thoughts_among_the_parts_of_an_answer_are_its_reasoning(api: Api, thinking: Any):
    parts = [{"type": "thinking", "thinking": thinking}, {"type": "text", "text": "Yes"}]
    text = thinking if isinstance(thinking, str) else "so\nit is"
    shown = await prompt_of(api, say("user", "Hi"), say("assistant", parts), say("user", "Go on"))
    assert shown == await prompt_of(
        api, say("user", "Hi"), say("assistant", "Yes", reasoning_content=text), say("user", "Go on")
    )
    assert "reads text alone" not in shown


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("value", [{"summary": []}, ["a"], 5])
async def test_reasoning_that_is_no_text_is_left_out_and_named(api: Api, field: str, value: Any):
    answer = await api.chat(messages=[say("user", "Hi"), say("assistant", "Yes", **{field: value}), say("user", "So?")])
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-baton-ignored-fields"] == f"messages[1].{field}"


async def test_calls_without_a_name_or_of_any_input_are_read(api: Api):
    assert '"name": ""' in await prompt_of(api, say("user", "Hi"), calling({"name": None, "arguments": "{}"}))
    assert '"name": ""' in await prompt_of(api, say("user", "Hi"), calling(None))
    for value, text in ((None, '""'), ("a", '"a"'), ({"a": 1}, r'"{\"a\":1}"')):
        call = {"id": "a", "type": "custom", "custom": {"name": "sh", "input": value}}
        assert f'"input": {text}' in await prompt_of(api, say("user", "Hi"), say("assistant", tool_calls=[call]))
