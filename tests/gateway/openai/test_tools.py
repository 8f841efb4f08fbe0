"""Tools and reasoning with the official client, over a scripted generator: whole and streamed answers are the same."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import llguidance
import openai
import pytest
import pytest_asyncio

from services.protocol.frames import TokenLogprobs
from services.protocol.outcomes import FinishReason
from tests.gateway.running_api import Api, events, running_api
from tests.gateway.scripted_generator import Script, delta_per_token, one_delta
from tests.gateway.tokenizer_files import CHATML

pytestmark = pytest.mark.asyncio(loop_scope="module")

# A template that knows tools, calls, and a switch of reasoning, which it else opens itself.
TEMPLATE = (
    "{% for t in tools or [] %}TOOL {{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% elif think_first %}<think>\n{% endif %}{% endif %}"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
USER: list[Any] = [{"role": "user", "content": "Hi"}]
CALLED = (
    '<think>\nWhich town?\n</think>\n\nI look.\n<tool_call>\n{"name": "weather", "arguments": {"town": "Köln"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
CALLS = [("weather", '{"town": "Köln"}'), ("clock", "{}")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Api]:
    async with running_api(template=TEMPLATE) as api:
        api.generator.max_model_len = 4096
        yield api


@pytest.fixture
def api(running: Api) -> Api:
    running.generator.requests.clear()
    running.generator.ended.clear()
    return running


@pytest_asyncio.fixture(loop_scope="module")
async def client(api: Api) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def write(api: Api, text: str, per_token: bool = True, finish: FinishReason = FinishReason.STOP) -> list[int]:
    """Makes the model write a text, and then its EOS where it stops."""
    tokens = api.tokens(text) + ([1] if finish is FinishReason.STOP else [])
    api.generator.script = Script((delta_per_token if per_token else one_delta)(tokens, finish))
    return tokens


async def whole(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    return await client.chat.completions.create(model="m", **{"messages": USER, **fields})


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> list[dict[str, Any]]:
    """The messages of all choices, and their finish reasons, put together from a stream."""
    found: dict[int, dict[str, Any]] = {}
    async for chunk in await whole(client, stream=True, **fields):
        for choice in chunk.choices:
            about = found.setdefault(choice.index, {"content": "", "reasoning": "", "calls": [], "finish": None})
            delta = choice.delta
            about["content"] += delta.content or ""
            about["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            for part in delta.tool_calls or ():
                if part.id is not None:
                    assert (part.index, part.type, part.function.arguments) == (len(about["calls"]), "function", "")
                    about["calls"].append([part.function.name, ""])
                about["calls"][part.index][1] += part.function.arguments
            about["finish"] = choice.finish_reason or about["finish"]
    return [found[index] for index in sorted(found)]


def parts(choice: Any) -> dict[str, Any]:
    calls = choice.message.tool_calls or ()
    assert all(call.id.startswith("call_") and call.type == "function" for call in calls)
    return {
        "content": choice.message.content or "",
        "reasoning": getattr(choice.message, "reasoning_content", None) or "",
        "calls": [[call.function.name, call.function.arguments] for call in calls],
        "finish": choice.finish_reason,
    }


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_calls_and_reasoning(api: Api, client: openai.AsyncOpenAI, per_token: bool, n: int):
    tokens = write(api, CALLED, per_token)
    answer = await whole(client, tools=[WEATHER, CLOCK], n=n)
    expected = {
        "content": "I look.",
        "reasoning": "Which town?",
        "calls": [list(call) for call in CALLS],
        "finish": "tool_calls",
    }
    assert [parts(choice) for choice in answer.choices] == [expected] * n
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 2 * n
    assert answer.usage.completion_tokens == n * len(tokens)
    reasoning = api.tokens("<think>\nWhich town?\n")
    assert answer.usage.completion_tokens_details.reasoning_tokens == n * len(reasoning)
    assert await streamed(client, tools=[WEATHER, CLOCK], n=n) == [expected] * n


async def test_content_is_null_beside_calls_alone(api: Api):
    write(api, '<tool_call>{"name": "clock", "arguments": {}}</tool_call>')
    answer = (await api.chat(tools=[CLOCK])).json()["choices"][0]
    assert answer["message"]["content"] is None
    assert "reasoning" not in answer["message"]
    assert answer["finish_reason"] == "tool_calls"


async def test_an_answer_that_is_cut_keeps_its_part_of_a_call(api: Api, client: openai.AsyncOpenAI):
    write(api, CALLED[: CALLED.index("ln")], finish=FinishReason.LENGTH)
    expected = {
        "content": "I look.",
        "reasoning": "Which town?",
        "calls": [["weather", '{"town": "Kö']],
        "finish": "length",
    }
    assert parts((await whole(client, tools=[WEATHER])).choices[0]) == expected
    assert await streamed(client, tools=[WEATHER]) == [expected]


async def test_what_is_no_call_is_content(api: Api, client: openai.AsyncOpenAI):
    text = "A <tool_call>nothing</tool_call> b"
    write(api, text)
    expected: dict[str, Any] = {"content": text, "reasoning": "", "calls": [], "finish": "stop"}
    assert parts((await whole(client, tools=[CLOCK])).choices[0]) == expected
    assert await streamed(client, tools=[CLOCK]) == [expected]


@pytest.mark.parametrize("fields", [{}, {"tools": [CLOCK], "tool_choice": "none"}])
async def test_calls_are_text_where_there_are_no_tools(api: Api, client: openai.AsyncOpenAI, fields: dict[str, Any]):
    text = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    write(api, text)
    assert (await whole(client, **fields)).choices[0].message.content == text
    assert "TOOL" not in prompt(api)


def prompt(api: Api) -> str:
    capsule = api.generator.requests[-1].capsules[0]
    return str(api.tokenizer.backend.decode(capsule.token_ids.tolist(), skip_special_tokens=False))


async def test_at_most_one_call(api: Api, client: openai.AsyncOpenAI):
    for per_token in (True, False):
        write(api, CALLED, per_token, FinishReason.LENGTH)
        fields: dict[str, Any] = {"tools": [WEATHER, CLOCK], "parallel_tool_calls": False}
        answer = parts((await whole(client, **fields)).choices[0])
        assert answer["calls"] == [list(CALLS[0])]
        assert answer["finish"] == "tool_calls"
        assert api.generator.ended == ([0] if per_token else [])
        api.generator.ended.clear()
        assert await streamed(client, **fields) == [answer]
        api.generator.ended.clear()


async def test_logprobs_are_those_of_all_tokens(api: Api):
    tokens = api.tokens(CALLED)
    entries = [TokenLogprobs(-0.5, ((token, -0.5),)) for token in tokens]
    api.generator.script = Script(delta_per_token(tokens, logprobs=entries))
    fields: dict[str, Any] = {"tools": [WEATHER, CLOCK], "logprobs": True, "top_logprobs": 1}
    answer = (await api.chat(**fields)).json()
    assert len(answer["choices"][0]["logprobs"]["content"]) == len(tokens)
    chunks = events(await api.chat(stream=True, **fields))[:-1]
    listed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert sum(len(each["content"]) for each in listed if each) == len(tokens)


async def test_history_and_tools_reach_the_template(api: Api, client: openai.AsyncOpenAI):
    write(api, "It rains.")
    first = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Köln"}'}}
    broken = {"id": "call_2", "type": "function", "function": {"name": "weather", "arguments": '{"town'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [first, broken]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    answer = await whole(client, messages=messages, tools=[WEATHER])
    assert answer.choices[0].message.content == "It rains."
    shown = prompt(api)
    assert f"TOOL {json.dumps(WEATHER)}" in shown
    assert '<tool_call>{"name": "weather", "arguments": {"town": "Köln"}}</tool_call>' in shown
    assert '<tool_call>{"name": "weather", "arguments": "{\\"town"}</tool_call>' in shown
    assert "<|im_start|>tool\nrain<|im_end|>" in shown


async def test_earlier_calls_that_are_nested_too_deeply_are_refused():
    """Where calls become JSON in the prompt, because the template knows none."""
    deep = "[" * 1000 + "]" * 1000
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": deep}}
    async with running_api(template=CHATML) as api:
        response = await api.chat(messages=[*USER, {"role": "assistant", "tool_calls": [call]}, *USER])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    assert "nested too deeply" in response.json()["error"]["message"]


async def test_grammars_of_choices(api: Api, client: openai.AsyncOpenAI):
    async def grammar(**fields: Any) -> str:
        write(api, "x")
        await whole(client, **fields)
        return api.generator.requests[-1].capsules[0].sampling.grammar

    assert await grammar(tools=[WEATHER]) == ""
    assert await grammar(tools=[WEATHER], tool_choice="auto", parallel_tool_calls=False) == ""
    required = await grammar(tools=[WEATHER, CLOCK], tool_choice="required")
    assert "weather" in required
    assert "clock" in required
    named = await grammar(tools=[WEATHER, CLOCK], tool_choice={"type": "function", "function": {"name": "clock"}})
    assert "clock" in named
    assert "weather" not in named


def accepts(api: Api, grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(api.tokenizer.backend.to_str()), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(api.tokens(text)) and matcher.is_accepting()


@pytest.mark.parametrize("budget", [None, 64])
async def test_grammars_accept_the_calls_that_were_asked_for(api: Api, client: openai.AsyncOpenAI, budget: int | None):
    def call(name: str, arguments: object) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    weather, wrong, clock = call("weather", {"town": "Ulm"}), call("weather", {"town": 1}), call("clock", {})
    text = "It rains."
    cases: list[tuple[Any, list[str], list[str]]] = [
        ("required", [weather, clock, f"{weather}\n{clock}"], [wrong, text, ""]),
        ({"type": "function", "function": {"name": "clock"}}, [clock], [weather, text]),
        ("auto", [weather, clock, text, "", f"{text} {clock}"], [wrong, f"{text} {wrong}", call("other", {})]),
    ]
    for choice, right, refused in cases:
        write(api, "x")
        extra = {} if budget is None else {"extra_body": {"thinking_token_budget": budget}}
        await whole(client, tools=[strict, CLOCK], tool_choice=choice, **extra)
        grammar = api.generator.requests[-1].capsules[0].sampling.grammar
        for thought in ("", "<think>hm</think>\n"):
            assert [answer for answer in right if not accepts(api, grammar, thought + answer)] == []
            assert [answer for answer in refused if accepts(api, grammar, thought + answer)] == []


@pytest.mark.parametrize("first", [True, False])
async def test_reasoning_that_the_prompt_opens(api: Api, client: openai.AsyncOpenAI, first: bool):
    text = "Hm.\n</think>\n\nYes" if first else "Yes"
    write(api, text)
    fields: dict[str, Any] = {"extra_body": {"chat_template_kwargs": {"think_first": first}}}
    expected: dict[str, Any] = {"content": "Yes", "reasoning": "Hm." if first else "", "calls": [], "finish": "stop"}
    assert parts((await whole(client, **fields)).choices[0]) == expected
    assert await streamed(client, **fields) == [expected]


async def test_effort_and_budget(api: Api, client: openai.AsyncOpenAI):
    write(api, "Yes")
    answer = await whole(client, reasoning_effort="none")
    assert answer.choices[0].message.content == "Yes"
    assert "<think>\n\n</think>" in prompt(api)
    await whole(client, reasoning_effort="none", extra_body={"thinking_token_budget": 3})
    assert api.generator.requests[-1].capsules[0].sampling.grammar == ""
    await whole(client, reasoning_effort="high", extra_body={"thinking_token_budget": 3})
    assert "{0,3}" in api.generator.requests[-1].capsules[0].sampling.grammar


async def test_a_form_begins_after_the_reasoning(api: Api, client: openai.AsyncOpenAI):
    write(api, "<think>a</think>[1]")
    answer = await whole(client, extra_body={"structured_outputs": {"regex": "[0-9]"}})
    assert answer.choices[0].message.content == "[1]"
    assert "reasoning" in api.generator.requests[-1].capsules[0].sampling.grammar


async def test_white_space_of_a_form_and_after_the_prompts_part_is_kept(api: Api):
    write(api, " yes ")
    answer = await api.chat(structured_outputs={"choice": [" yes ", " no"]})
    assert answer.json()["choices"][0]["message"]["content"] == " yes "
    write(api, " world and")
    turns = [*USER, {"role": "assistant", "content": "Hello"}]
    answer = await api.chat(messages=turns, continue_final_message=True, add_generation_prompt=False)
    assert answer.json()["choices"][0]["message"]["content"] == " world and"


async def test_a_schema_without_sense_does_not_break_answers():
    """What is no type leaves the texts of arguments as they are."""
    call = "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>"
    schema = {"type": "object", "properties": {"x": {"anyOf": 5, "type": 5}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    async with running_api(template=CHATML + "{# tools <function= #}") as api:
        write(api, call)
        answer = await api.chat(tools=[tool])
    calls = answer.json()["choices"][0]["message"]["tool_calls"]
    assert calls[0]["function"]["arguments"] == '{"x": "1"}'


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("text", ["Yes.\n\n", "def f():\n    pass\n\t ", " \n"])
async def test_white_space_at_the_end_is_kept(api: Api, client: openai.AsyncOpenAI, per_token: bool, text: str):
    write(api, text, per_token)
    for fields in ({}, {"tools": [CLOCK]}):
        assert (await whole(client, **fields)).choices[0].message.content == text
        assert (await streamed(client, **fields))[0]["content"] == text


async def test_arguments_between_tags_are_held_by_grammars():
    async with running_api(template=CHATML + "{# tools <tool_call> <function= #}") as api:
        call = "<tool_call>\n<function=weather>\n<parameter=town>\nKöln\n</parameter>\n</function>\n</tool_call>"
        strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
        named = {"type": "function", "function": {"name": "weather"}}
        for fields in ({"tool_choice": "required"}, {"tool_choice": named}, {}):
            write(api, call)
            message = (await api.chat(tools=[strict], **fields)).json()["choices"][0]["message"]
            assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"town": "Köln"}'}
            grammar = api.generator.requests[-1].capsules[0].sampling.grammar
            assert accepts(api, grammar, call)
            assert not accepts(api, grammar, call.replace("town", "city"))


async def test_requests_with_tools_have_a_template_of_their_own():
    async with running_api(template=CHATML, tool_template=TEMPLATE) as api:
        write(api, '<tool_call>{"name": "clock"}</tool_call>')
        response = await api.chat(tools=[CLOCK])
        assert response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "clock"
        assert "x-baton-tools" not in response.headers
        assert prompt(api).startswith('TOOL {"type": "function"')
        await api.chat()
        assert "TOOL" not in prompt(api)
        await api.chat(tools=[CLOCK], tool_choice="none")
        assert "TOOL" not in prompt(api)


async def test_reasoning_may_be_left_out(api: Api, client: openai.AsyncOpenAI):
    write(api, CALLED)
    fields: dict[str, Any] = {"tools": [WEATHER, CLOCK], "extra_body": {"include_reasoning": False}}
    answer = await whole(client, **fields)
    assert parts(answer.choices[0])["reasoning"] == ""
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    assert (await streamed(client, **fields))[0]["reasoning"] == ""


def text_of(chunks: Sequence[Any]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


async def test_a_template_without_tools_gets_ours():
    async with running_api(template=CHATML) as api:
        api.generator.max_model_len = 4096
        write(api, f"<tool_call>{json.dumps({'name': 'clock', 'arguments': {}})}</tool_call>")
        messages = [
            {"role": "system", "content": "Be brief."},
            *USER,
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "clock", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "noon"},
        ]
        response = await api.chat(tools=[CLOCK, WEATHER], messages=messages)
        assert response.headers["x-baton-tools"] == "inserted"
        assert response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "clock"
        shown = prompt(api)
        assert shown.count("<|im_start|>system\nBe brief.\n\nYou may call functions") == 1
        assert json.dumps(WEATHER) in shown
        assert '<|im_start|>assistant\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call><|im_end|>' in shown
        assert "<|im_start|>user\n<tool_response>\nnoon\n</tool_response><|im_end|>" in shown
        plain = await api.chat(tools=[CLOCK], tool_choice="none")
        assert "x-baton-tools" not in plain.headers
        assert "clock" not in prompt(api)


async def test_marks_that_are_special_tokens_are_seen():
    """A template of the model's own, whose mark is a token that answers else leave out."""
    own = {
        "start_anchor": "assistant\n",
        "fields": {"content": {"close": "<|im_end|>"}, "thinking": {"open": "<|eot|>", "close": "<|eos|>"}},
    }
    async with running_api(template=TEMPLATE, response_template=own) as api:
        tokens = api.tokens("<|eot|>hm<|eos|>Yes<|bos|>!")
        api.generator.script = Script(delta_per_token(tokens))
        message = (await api.chat()).json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("hm", "Yes!")


async def test_a_model_whose_calls_nobody_knows():
    async with running_api(template="{{ tools }} in a form of its own") as api:
        response = await api.chat(tools=[CLOCK])
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"
        assert "--tool-parser" in response.json()["error"]["message"]
