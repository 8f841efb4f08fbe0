"""Chats with tools and reasoning over gRPC: the prompts and grammars that HTTP has, and answers in parts."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import orjson
import pytest
import pytest_asyncio
from google.protobuf.message import Message

from protos import inference_pb2, inference_pb2_grpc
from services.protocol.outcomes import FinishReason
from tests.gateway.openai.test_tools import CALLED, CALLS, CLOCK, TEMPLATE, WEATHER, write
from tests.gateway.running_api import Api, running_api
from tests.gateway.tokenizer_files import CHATML

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = {"role": "user", "content": "Hi"}
TOOLS = [
    {
        "name": "weather",
        "description": "The weather in a town.",
        "parameters": orjson.dumps(WEATHER["function"]["parameters"]).decode(),
    },
    {"name": "clock"},
]
CALL = {"id": "call_1", "name": "weather", "arguments": '{"town": "Köln"}'}
OVER_HTTP = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Köln"}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}


@dataclass
class Both:
    """A gateway by both APIs."""

    api: Api
    stub: Any

    def call(self, metadata: tuple[tuple[str, str], ...] = (), **chat: Any) -> Any:
        request = inference_pb2.GenerateRequest(chat={"messages": [USER], **chat})
        return self.stub.Generate(request, timeout=120, metadata=metadata)

    async def chat(self, **chat: Any) -> list[inference_pb2.GenerateResponse]:
        return [answer async for answer in self.call(**chat)]

    async def refusal(self, **chat: Any) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.chat(**chat)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        return raised.value.details() or ""


@asynccontextmanager
async def served_by(api: Api) -> AsyncIterator[Both]:
    api.generator.max_model_len = 4096
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await api.start_grpc()}") as channel:
        yield Both(api, inference_pb2_grpc.InferenceStub(channel))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Both]:
    async with running_api(template=TEMPLATE) as api, served_by(api) as both:
        yield both


@pytest.fixture
def both(running: Both) -> Both:
    running.api.generator.requests.clear()
    return running


def message_of(answers: list[inference_pb2.GenerateResponse], choice: int = 0) -> dict[str, Any]:
    """A choice's message, put together from its responses."""
    own = [answer for answer in answers if answer.choice == choice]
    calls: list[list[str]] = []
    for part in (part for answer in own for part in answer.tool_calls):
        if part.id:
            assert (part.call, part.id[:5]) == (len(calls), "call_")
            calls.append([part.name, ""])
        assert bool(part.id) == bool(part.name)
        calls[part.call][1] += part.arguments
    assert not any(answer.finish_reason for answer in own[:-1])
    return {
        "text": "".join(answer.text for answer in own),
        "reasoning": "".join(answer.reasoning for answer in own),
        "calls": [tuple(call) for call in calls],
        "finish": inference_pb2.FinishReason.Name(own[-1].finish_reason).removeprefix("FINISH_REASON_"),
    }


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_calls_and_reasoning_come_in_parts(both: Both, per_token: bool, n: int):
    tokens = write(both.api, CALLED, per_token)
    request = inference_pb2.GenerateRequest(chat={"messages": [USER], "tools": TOOLS}, n=n)
    answers = [answer async for answer in both.stub.Generate(request)]
    expected = {"text": "I look.", "reasoning": "Which town?", "calls": CALLS, "finish": "TOOL_CALLS"}
    assert [message_of(answers, choice) for choice in range(n)] == [expected] * n
    assert [token for answer in answers if not answer.choice for token in answer.token_ids] == tokens
    usage = answers[-1].usage
    assert usage.completion_tokens == n * len(tokens)
    of_http = (await both.api.chat(tools=[WEATHER, CLOCK], n=n)).json()["usage"]["completion_tokens_details"]
    assert usage.reasoning_tokens == of_http["reasoning_tokens"] > 0


async def test_an_answer_that_is_cut_keeps_its_part_of_a_call(both: Both):
    write(both.api, CALLED[: CALLED.index("ln")], finish=FinishReason.LENGTH)
    message = message_of(await both.chat(tools=TOOLS))
    assert (message["calls"], message["finish"]) == ([("weather", '{"town": "Kö')], "LENGTH")


async def test_reasoning_may_be_left_out_and_its_tokens_count(both: Both):
    tokens = write(both.api, CALLED)
    answers = await both.chat(tools=TOOLS, include_reasoning=False)
    message = message_of(answers)
    assert (message["reasoning"], message["calls"]) == ("", CALLS)
    assert answers[-1].usage.reasoning_tokens > 0
    assert sum(len(answer.token_ids) for answer in answers) == len(tokens)


async def test_an_answer_may_be_held_to_one_call(both: Both):
    write(both.api, CALLED)
    assert message_of(await both.chat(tools=TOOLS, parallel_tool_calls=False))["calls"] == CALLS[:1]


async def test_reasoning_of_a_model_without_any_is_not_counted():
    async with running_api() as api, served_by(api) as plain:
        assert not (await plain.chat())[-1].usage.HasField("reasoning_tokens")


SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tools": TOOLS}, {"tools": [WEATHER, CLOCK]}),
    ({"tools": TOOLS, "tool_choice": "required"}, {"tools": [WEATHER, CLOCK], "tool_choice": "required"}),
    ({"tools": TOOLS, "tool_choice": "none"}, {"tools": [WEATHER, CLOCK], "tool_choice": "none"}),
    (
        {"tools": TOOLS, "tool_name": "clock"},
        {"tools": [WEATHER, CLOCK], "tool_choice": {"type": "function", "function": {"name": "clock"}}},
    ),
    (
        {"tools": [{**TOOLS[0], "strict": True}], "parallel_tool_calls": False},
        {
            "tools": [{"type": "function", "function": {**WEATHER["function"], "strict": True}}],
            "parallel_tool_calls": False,
        },
    ),
    ({"reasoning_effort": "none"}, {"reasoning_effort": "none"}),
    (
        {"reasoning_effort": "high", "thinking_token_budget": 3},
        {"reasoning_effort": "high", "thinking_token_budget": 3},
    ),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT], "tools": TOOLS},
        {
            "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [OVER_HTTP]}, RESULT],
            "tools": [WEATHER, CLOCK],
        },
    ),
]


@pytest.mark.parametrize(("chat", "fields"), SAME, ids=lambda value: ", ".join(value)[:60])
async def test_prompt_and_grammar_are_those_of_http(both: Both, chat: dict[str, Any], fields: dict[str, Any]):
    write(both.api, "Yes")
    await both.chat(**chat)
    assert (await both.api.chat(**fields)).status_code == 200
    assert (await both.api.chat()).status_code == 200
    mine, theirs, without = (request.capsules[0] for request in both.api.generator.requests)
    assert mine.token_ids.tolist() == theirs.token_ids.tolist()
    assert mine.sampling.grammar == theirs.sampling.grammar
    differs = (mine.token_ids.tolist(), mine.sampling.grammar) != (without.token_ids.tolist(), without.sampling.grammar)
    assert differs == (fields.get("tool_choice") != "none")
    tokenized = await both.stub.Tokenize(inference_pb2.TokenizeRequest(chat={"messages": [USER], **chat}))
    assert list(tokenized.token_ids) == mine.token_ids.tolist()


async def test_earlier_reasoning_reaches_templates_by_either_name():
    template = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.reasoning }}]{{ m.content }}{% endfor %}"
    async with running_api(template=template) as api:
        async with served_by(api) as both:
            await both.chat(messages=[USER, {"role": "assistant", "content": "Yes", "reasoning": "Hm."}])
        prompt = api.generator.requests[0].capsules[0].token_ids.tolist()
        assert api.tokenizer.decode(prompt, skip_special_tokens=True).endswith("[Hm.|Hm.]Yes")


async def test_tools_that_the_template_does_not_know_are_inserted_and_metadata_say_so():
    async with running_api(template=CHATML) as api, served_by(api) as both:
        write(api, "Yes")
        call = both.call(tools=TOOLS)
        assert [answer async for answer in call]
        assert ("x-baton-tools", "inserted") in tuple(await call.trailing_metadata())
        plain = both.call()
        assert [answer async for answer in plain]
        assert "x-baton-tools" not in dict(await plain.trailing_metadata())


@pytest.mark.parametrize(
    ("chat", "param"),
    [
        ({"tools": [{"name": "a b"}]}, "chat.tools[0].name"),
        ({"tools": [{"name": "a"}, {"name": "a"}]}, "chat.tools[1].name"),
        ({"tools": [{"name": "a", "parameters": "{"}]}, "chat.tools[0].parameters"),
        ({"tools": [{"name": "a", "parameters": "[" * 2000}]}, "chat.tools[0].parameters"),
        ({"tools": [{"name": "a", "parameters": "[" * 100_000}]}, "chat.tools[0].parameters"),
        ({"tools": [{"name": "a", "parameters": "[1]"}]}, "chat.tools[0].parameters"),
        ({"tools": [{"name": "a"}] * 129}, "chat.tools"),
        ({"tools": TOOLS, "tool_choice": "weather"}, "chat.tool_choice"),
        ({"tools": TOOLS, "tool_choice": ""}, "chat.tool_choice"),
        ({"tools": TOOLS, "tool_name": "nobody"}, "chat.tool_name"),
        ({"tool_choice": "required"}, "chat.tool_choice"),
        ({"tool_name": "weather"}, "chat.tool_name"),
        ({"thinking_token_budget": 2**31}, "chat.thinking_token_budget"),
        ({"messages": [{**USER, "tool_calls": [CALL] * 513}]}, "chat.messages[0].tool_calls"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_bad_field_is_named_as_it_is_called_here(both: Both, chat: dict[str, Any], param: str):
    details = await both.refusal(**chat)
    assert details.startswith(f"{param}: ")
    assert "function" not in details
    assert both.api.generator.requests == []


async def test_what_the_model_cannot_do_is_refused_by_name():
    async with running_api(template="{{ tools }} in a form of its own") as api, served_by(api) as both:
        assert (await both.refusal(tools=TOOLS)).startswith("chat.tools: ")


async def test_hints_are_named_as_they_are_called_here():
    async with running_api() as api, served_by(api) as both:
        write(api, "Yes")
        for hint in ({"thinking_token_budget": 5}, {"reasoning_effort": "low"}, {"reasoning_effort": "extreme"}):
            request = inference_pb2.GenerateRequest(chat={"messages": [USER], **hint})
            assert await ignored(both, request) == f"chat.{next(iter(hint))}"
    async with running_api(strict_fields=True) as api, served_by(api) as both:
        assert (await both.refusal(reasoning_effort="low")).startswith("chat.reasoning_effort: ")


def with_unknown(message: Message) -> Message:
    message.MergeFromString(bytes([0xF8, 0x3F, 1]))  # field 1023
    return message


async def ignored(both: Both, request: inference_pb2.GenerateRequest) -> str:
    call = both.stub.Generate(request)
    assert [answer async for answer in call]
    return str(dict(await call.trailing_metadata()).get("x-baton-ignored-fields", ""))


async def test_fields_of_a_newer_version_are_named_wherever_they_are(both: Both):
    write(both.api, "Yes")
    request = inference_pb2.GenerateRequest(chat={"messages": [USER, USER], "tools": TOOLS})
    assert await ignored(both, request) == ""
    for message in (request.chat, request.chat.messages[1], request.chat.tools[0]):
        with_unknown(message)
    found = await ignored(both, request)
    assert found == "chat.field 1023, chat.messages[1].field 1023, chat.tools[0].field 1023"


async def test_fields_of_a_newer_version_are_refused_where_the_server_is_strict():
    async with running_api(strict_fields=True) as api, served_by(api) as both:
        chat = inference_pb2.Chat(messages=[USER])
        with_unknown(chat.messages[0])
        with pytest.raises(grpc.aio.AioRpcError, match=r"chat\.messages\[0\]\.field 1023"):
            [_ async for _ in both.stub.Generate(inference_pb2.GenerateRequest(chat=chat))]
        assert await both.chat()


async def test_an_echo_begins_with_the_last_message_of_the_assistant(both: Both):
    write(both.api, " and so on.")
    chat = {"messages": [USER, {"role": "assistant", "content": "I think"}], "continue_final_message": True}
    request = inference_pb2.GenerateRequest(chat=chat, echo=True)
    answers = [answer async for answer in both.stub.Generate(request)]
    assert message_of(answers)["text"] == "I think and so on."
    assert not any(answer.num_echoed for answer in answers)


async def test_a_large_chat_with_tools_is_translated_beside_the_loop(both: Both):
    """Above the size at which messages are decoded and translated on the side thread."""
    write(both.api, CALLED)
    schema = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1200)}}
    both.api.generator.max_model_len = 1 << 20
    tools = [TOOLS[0], {"name": "large", "parameters": orjson.dumps(schema).decode()}, TOOLS[1]]
    assert message_of(await both.chat(tools=tools))["calls"] == CALLS


async def test_order_of_a_schema_s_fields_is_kept(both: Both):
    """The prompt would else differ from call to call, and miss the cache."""
    write(both.api, "Yes")
    for names in itertools.permutations("abc"):
        schema = {name: {"type": "string"} for name in names}
        parameters = orjson.dumps({"properties": schema, "type": "object"}).decode()
        await both.chat(tools=[{"name": "f", "parameters": parameters}])
        prompt = both.api.generator.requests[-1].capsules[0].token_ids.tolist()
        text = both.api.tokenizer.decode(prompt, skip_special_tokens=True)
        assert '"properties": ' + orjson.dumps(schema).decode().replace(":", ": ").replace(",", ", ") in text
