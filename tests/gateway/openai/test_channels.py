"""Answers in channels by every API, whole and streamed, over a scripted generator: as gpt-oss writes them."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import openai
import pytest
import pytest_asyncio

from services.gateway.text.model_output.channel_marks import ALL, MARKS
from services.protocol.outcomes import FinishReason
from tests.clients.families import TEMPLATES
from tests.gateway.api.test_answer_grammar import accepts
from tests.gateway.openai.test_tools import CLOCK, WEATHER, parts, streamed, whole
from tests.gateway.running_api import Api, running_api
from tests.gateway.scripted_generator import Script, delta_per_token, one_delta

pytestmark = pytest.mark.asyncio(loop_scope="module")

CALLED = (
    "<|channel|>analysis<|message|>Which town?<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
    '{"town": "Köln <b>"}<|call|>'
)
SAID = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4.<|return|>"
ARGUMENTS = '{"town": "Köln <b>"}'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    template = (TEMPLATES / "channels.jinja").read_text()
    async with running_api(template=template, special_tokens=tuple(MARKS)) as api:
        api.generator.max_model_len = 4096
        yield api


@pytest_asyncio.fixture(loop_scope="module")
async def client(api: Api) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def write(api: Api, text: str, *, per_token: bool = True, finish: FinishReason = FinishReason.STOP) -> None:
    """Makes the model write a text, whose last token ends it, as `<|call|>` and `<|return|>` do."""
    deltas = delta_per_token if per_token else one_delta
    api.generator.script = Script(deltas(api.tokens(text), finish))


def prompt_of(api: Api) -> str:
    return api.tokenizer.decode(api.generator.requests[-1].capsules[0].token_ids.tolist(), skip_special_tokens=False)


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("fields", [{}, {"skip_special_tokens": False}])
async def test_chats_have_reasoning_content_and_calls(
    api: Api, client: openai.AsyncOpenAI, per_token: bool, fields: dict[str, Any]
):
    write(api, CALLED, per_token=per_token)
    answer = await whole(client, tools=[WEATHER, CLOCK], extra_body=fields)
    expected = {
        "content": "I look.",
        "reasoning": "Which town?",
        "calls": [["weather", ARGUMENTS]],
        "finish": "tool_calls",
    }
    assert parts(answer.choices[0]) == expected
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(api.tokens("Which town?")) + 1  # and the mark
    assert await streamed(client, tools=[WEATHER, CLOCK], extra_body=fields) == [expected]
    write(api, SAID, per_token=per_token)
    said = {"content": "4.", "reasoning": "hm", "calls": [], "finish": "stop"}
    assert parts((await whole(client, extra_body=fields)).choices[0]) == said
    assert await streamed(client, extra_body=fields) == [said]


async def test_an_answer_that_was_cut(api: Api, client: openai.AsyncOpenAI):
    write(api, CALLED.split('ln <b>"')[0], finish=FinishReason.LENGTH)
    (answer,) = await streamed(client, tools=[WEATHER])
    assert (answer["calls"], answer["finish"]) == ([["weather", '{"town": "Kö']], "length")


async def test_responses_have_reasoning_messages_and_calls(api: Api):
    write(api, CALLED)
    tool = {"type": "function", **WEATHER["function"]}
    body = {"model": "m", "input": "Hi", "tools": [tool]}
    answer = (await api.http.post("/v1/responses", json=body)).json()
    kinds = [item["type"] for item in answer["output"]]
    assert kinds == ["reasoning", "message", "function_call"]
    assert answer["output"][0]["content"][0]["text"] == "Which town?"
    assert answer["output"][1]["content"][0]["text"] == "I look."
    assert answer["output"][2]["arguments"] == ARGUMENTS
    results = [{"type": "function_call_output", "call_id": answer["output"][2]["call_id"], "output": "Dry."}]
    write(api, SAID)
    turns = [{"role": "user", "content": "Hi"}, answer["output"][0], answer["output"][2], *results]
    await api.http.post("/v1/responses", json={**body, "input": turns})
    assert "<|channel|>analysis<|message|>Which town?<|end|>" in prompt_of(api)
    assert '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"Dry."<|end|>' in prompt_of(api)


async def test_messages_have_thinking_text_and_uses_of_tools(api: Api):
    write(api, CALLED)
    tools = [{"name": "weather", "input_schema": WEATHER["function"]["parameters"]}]
    body = {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    answer = (await api.http.post("/v1/messages", json=body)).json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
    assert answer["content"][2]["input"] == json.loads(ARGUMENTS)
    assert answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("effort", "shown"), [("low", "low"), ("high", "high"), ("minimal", "low"), ("xhigh", "high"), (None, "medium")]
)
async def test_the_effort_goes_to_the_template(api: Api, effort: str | None, shown: str):
    answer = await api.chat(**({} if effort is None else {"reasoning_effort": effort}))
    assert "x-baton-ignored-fields" not in answer.headers
    assert f"Reasoning: {shown}<|end|>" in prompt_of(api)
    assert not api.generator.requests[-1].capsules[0].sampling.grammar


async def test_no_effort_leaves_the_analysis_out(api: Api):
    await api.chat(reasoning_effort="none")
    held = api.generator.requests[-1].capsules[0].sampling.grammar
    assert "Reasoning: low<|end|>" in prompt_of(api)
    assert accepts(held, "<|channel|>final<|message|>4.", api.tokenizer)
    assert not accepts(held, SAID.removesuffix("<|return|>"), api.tokenizer)


async def test_grammars_hold_channels(api: Api):
    await api.chat(tools=[WEATHER], tool_choice="required", response_format={"type": "json_object"})
    held = api.generator.requests[-1].capsules[0].sampling.grammar
    assert accepts(held, CALLED.removesuffix("<|call|>"), api.tokenizer)
    await api.chat(thinking_token_budget=3)
    held = api.generator.requests[-1].capsules[0].sampling.grammar
    assert accepts(held, SAID.removesuffix("<|return|>"), api.tokenizer)
    assert not accepts(held, SAID.removesuffix("<|return|>").replace("hm", "far more than three"), api.tokenizer)


async def test_a_message_is_continued_in_its_channel(api: Api, client: openai.AsyncOpenAI):
    write(api, " world<|return|>")
    messages: Sequence[Any] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    answer = await whole(client, messages=messages, extra_body={"continue_final_message": True})
    assert prompt_of(api).endswith("<|channel|>final<|message|>Hello")
    assert parts(answer.choices[0]) == {"content": " world", "reasoning": "", "calls": [], "finish": "stop"}


async def test_no_character_that_stands_for_a_mark_is_shown(api: Api, client: openai.AsyncOpenAI):
    for text in (SAID + CALLED, "<|start|>" * 3, "<|end|>a<|message|>b<|constrain|>c", "a<|channel|>"):
        write(api, text)
        for fields in ({}, {"tools": [WEATHER]}):
            answer = await whole(client, **fields, logprobs=True)
            assert not set(ALL) & set(answer.model_dump_json() + json.dumps(await streamed(client, **fields)))
