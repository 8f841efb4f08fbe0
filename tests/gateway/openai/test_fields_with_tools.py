"""vLLM's fields where content, reasoning and calls are told apart."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from services.gateway.api.records.request_record import IGNORED_FIELDS
from services.protocol.frames import TokenLogprobs
from services.protocol.outcomes import FinishReason
from tests.gateway.openai.test_tools import CALLED, CALLS, CLOCK, TEMPLATE, WEATHER
from tests.gateway.running_api import Api, events, running_api
from tests.gateway.scripted_generator import Script, delta_per_token, one_delta

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOLS = [WEATHER, CLOCK]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api(template=TEMPLATE, trusts_templates=True) as running:
        running.generator.max_model_len = 4096
        yield running


async def answer_of(api: Api, *, stream: bool, **fields: Any) -> list[dict[str, Any]]:
    """The JSON of an answer: its chunks, or the one body."""
    response = await api.chat(stream=stream, **fields)
    assert response.status_code == 200, response.text
    return [chunk for chunk in events(response) if chunk != "[DONE]"] if stream else [response.json()]


def choices_in(answer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice for part in answer for choice in part["choices"]]


@pytest.mark.parametrize("make_deltas", [delta_per_token, one_delta])
@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_and_the_stop_token_of_an_answer_with_calls(api: Api, make_deltas: Any, stream: bool):
    tokens = [*api.tokens(CALLED), 9]
    api.generator.script = Script(make_deltas(tokens, FinishReason.STOP))
    answer = await answer_of(api, stream=stream, tools=TOOLS, return_token_ids=True, stop_token_ids=[9])
    choices = choices_in(answer)
    assert [token for choice in choices for token in choice.get("token_ids", ())] == tokens
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("tool_calls", 9)
    prompt = api.generator.requests[-1].capsules[0].token_ids.tolist()
    assert [part["prompt_token_ids"] for part in answer if "prompt_token_ids" in part] == [prompt]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_is_named_and_shown_in_the_content_behind_reasoning(api: Api, stream: bool):
    api.generator.script = Script(delta_per_token(api.tokens("<think>\nWhy?\n</think>\n\none STOP two")))
    for include, text in ((True, "one STOP"), (False, "one ")):
        fields = {"stop": ["STOP"], "include_stop_str_in_output": include}
        choices = choices_in(await answer_of(api, stream=stream, **fields))
        shown = [choice.get("delta") or choice.get("message") or {} for choice in choices]
        assert "".join(part.get("content") or "" for part in shown) == text
        assert "".join(part.get("reasoning") or "" for part in shown) == "Why?"
        assert choices[-1]["stop_reason"] == "STOP"


async def test_every_chunk_of_calls_has_the_usage_so_far(api: Api):
    tokens = api.tokens(CALLED)
    api.generator.script = Script(delta_per_token(tokens))
    options = {"include_usage": True, "continuous_usage_stats": True}
    opening, *rest = await answer_of(api, stream=True, tools=TOOLS, stream_options=options)
    assert opening["usage"]["completion_tokens"] == 0
    assert opening["usage"]["prompt_tokens"] == rest[0]["usage"]["prompt_tokens"] > 0
    counts = [chunk["usage"]["completion_tokens"] for chunk in rest]
    assert counts == sorted(counts)
    assert counts[-1] == len(tokens)


async def test_chunks_of_several_tokens_have_the_same_calls(api: Api):
    api.generator.script = Script(delta_per_token(api.tokens(CALLED)))
    found = []
    for interval in (1, 7):
        choices = choices_in(await answer_of(api, stream=True, tools=TOOLS, stream_interval=interval))
        parts = [part for choice in choices for part in choice["delta"].get("tool_calls", ())]
        names = [(part["index"], part["function"]["name"]) for part in parts if "id" in part]
        arguments = [
            "".join(part["function"]["arguments"] for part in parts if part["index"] == call) for call in (0, 1)
        ]
        found.append((names, arguments))
    assert found[0] == found[1] == ([(0, "weather"), (1, "clock")], [arguments for _, arguments in CALLS])


async def test_a_call_that_is_required_wins_over_a_form(api: Api):
    api.generator.script = Script(one_delta(api.tokens(CALLED)))
    form = {"response_format": {"type": "json_object"}}
    grammars = []
    for fields in ({}, form):
        assert (await api.chat(tools=TOOLS, tool_choice="required", **fields)).status_code == 200
        grammars.append(api.generator.requests[-1].capsules[0].sampling.grammar)
    assert grammars[0] == grammars[1] != ""


async def test_an_echo_is_content_as_it_is(api: Api):
    """It is what the client sent: no part of it is read as reasoning, and it is not read twice."""
    api.generator.script = Script(one_delta(api.tokens("-two")))
    last = {"role": "assistant", "content": "<think>\nWhy?\n</think>\n\none"}
    fields = {"messages": [{"role": "user", "content": "Hi"}, last], "continue_final_message": True, "echo": True}
    (choice,) = choices_in(await answer_of(api, stream=False, **fields))
    assert choice["message"]["content"] == last["content"] + "-two"
    assert "reasoning" not in choice["message"]


async def test_a_scored_prompt_has_its_logprobs_beside_an_answer_with_calls(api: Api):
    fields = {"prompt_logprobs": 0, "tools": TOOLS}
    api.generator.script = Script(one_delta(api.tokens("x")))
    await api.chat(**fields)
    prompt = api.generator.requests[-1].capsules[0].token_ids.tolist()
    scored = [TokenLogprobs(-1.0, ()) for _ in prompt[1:]]
    (delta,) = one_delta(api.tokens(CALLED), FinishReason.STOP)
    api.generator.script = Script([replace(delta, prompt_logprobs=scored)])
    (body,) = await answer_of(api, stream=False, **fields)
    assert len(body["prompt_logprobs"]) == len(prompt)
    assert len(body["choices"][0]["message"]["tool_calls"]) == 2


async def test_effort_is_what_the_template_in_use_reads(api: Api):
    api.generator.script = Script(one_delta(api.tokens("Hello")))
    assert IGNORED_FIELDS not in (await api.chat(reasoning_effort="low")).headers
    own = "{% for m in messages %}{{ m.content }}{% endfor %}"
    answer = await api.chat(reasoning_effort="low", chat_template=own)
    assert (answer.status_code, answer.headers[IGNORED_FIELDS]) == (200, "reasoning_effort")


async def test_a_form_is_refused_where_the_model_marks_the_text_of_its_answers():
    """The parser would find no text in an answer that is the form alone."""
    mark = {"open": "<|channel|>final<|message|>", "close": "<|end|>"}
    own = {"start_anchor": "<|start|>assistant", "fields": {"content": mark}}
    async with running_api(template=TEMPLATE, response_template=own) as api:
        answer = await api.chat(response_format={"type": "json_object"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
        assert (await api.chat()).status_code == 200
