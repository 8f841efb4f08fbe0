"""Anthropic's own client against the whole HTTP application, over a scripted generator."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from pydantic import BaseModel

from services.gateway.api.generation import Failed, Overloaded, Unavailable
from services.protocol.outcomes import FinishReason
from tests.gateway.running_api import Api, running_api
from tests.gateway.scripted_generator import Script, delta_per_token, one_delta

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, Any] = {"model": "m", "max_tokens": 20, "messages": HI}


@pytest_asyncio.fixture
async def api() -> AsyncIterator[Api]:
    async with running_api() as running:
        running.generator.script = Script(delta_per_token(running.tokens("Hello, 🙂 world"), cached_tokens=4))
        yield running


@pytest_asyncio.fixture
async def client(api: Api) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=api.base_url, api_key="none", max_retries=0) as client:
        yield client


async def test_a_whole_message(api: Api, client: anthropic.AsyncAnthropic):
    message = await client.messages.create(**ASKED, system="Be brief.")
    assert [block.text for block in message.content] == ["Hello, 🙂 world"]
    assert (message.role, message.model, message.stop_reason, message.stop_sequence) == (
        "assistant",
        "m",
        "max_tokens",
        None,
    )
    assert message.id.startswith("msg_")
    assert message._request_id == message.id.removeprefix("msg_")
    usage = message.usage
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (4, 0)
    assert usage.output_tokens == len(api.tokens("Hello, 🙂 world"))
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert usage.input_tokens + 4 == len(api.tokens(prompt))
    (asked,) = api.generator.requests
    assert asked.capsules[0].token_ids.tolist() == api.tokens(prompt)


async def test_the_stream_helper_reads_the_same_message(api: Api, client: anthropic.AsyncAnthropic):
    whole = await client.messages.create(**ASKED)
    async with client.messages.stream(**ASKED) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert len(texts) > 3
    assert "".join(texts) == "Hello, 🙂 world"
    assert final.to_dict() == {**whole.to_dict(), "id": final.id, "content": [{"type": "text", "text": "".join(texts)}]}


async def test_the_events_of_a_stream_come_in_order(api: Api, client: anthropic.AsyncAnthropic):
    api.generator.script = Script(one_delta(api.tokens("Hi"), FinishReason.LENGTH))
    stream = await client.messages.create(**ASKED, stream=True)
    names = [event.type async for event in stream]
    assert names == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_the_client_without_asyncio(api: Api):
    def ask() -> tuple[str, str]:
        with anthropic.Anthropic(base_url=api.base_url, api_key="none", max_retries=0) as client:
            whole = client.messages.create(**ASKED)
            with client.messages.stream(**ASKED) as stream:
                return whole.content[0].text, stream.get_final_text()

    assert await asyncio.to_thread(ask) == ("Hello, 🙂 world",) * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_sequence_that_ended_a_message_is_named(
    api: Api, client: anthropic.AsyncAnthropic, stream: bool
):
    asked = {**ASKED, "stop_sequences": ["never", "wor"]}
    if stream:
        async with client.messages.stream(**asked) as streamed:
            message = await streamed.get_final_message()
    else:
        message = await client.messages.create(**asked)
    assert message.content[0].text == "Hello, 🙂 "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "wor")


async def test_the_end_of_a_turn(api: Api, client: anthropic.AsyncAnthropic):
    api.generator.script = Script(one_delta([*api.tokens("Yes"), 1], FinishReason.STOP))
    message = await client.messages.create(**ASKED)
    assert (message.content[0].text, message.stop_reason) == ("Yes", "end_turn")
    api.generator.script = Script(one_delta([1], FinishReason.STOP))
    assert (await client.messages.create(**ASKED)).content == []


async def test_two_turns_with_the_blocks_sent_back(api: Api, client: anthropic.AsyncAnthropic):
    first = await client.messages.create(**ASKED)
    turns = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": "Go on"}]
    second = await client.messages.create(**{**ASKED, "messages": turns})
    assert second.content[0].text == "Hello, 🙂 world"
    prompt = api.tokenizer.decode(api.generator.requests[-1].capsules[0].token_ids.tolist())
    assert "assistant\nHello, 🙂 world" in prompt
    assert "user\nGo on" in prompt


async def test_a_message_that_is_begun_is_continued(api: Api, client: anthropic.AsyncAnthropic):
    turns = [*HI, {"role": "assistant", "content": "The best answer is ("}]
    await client.messages.create(**{**ASKED, "messages": turns})
    tokens = api.generator.requests[-1].capsules[0].token_ids.tolist()
    assert (
        tokens[-len(api.tokens("best answer is (")) :]
        == api.tokens(" best answer is (")[-len(api.tokens("best answer is (")) :]
    )


async def test_tokens_are_counted_as_messages_count_them(api: Api, client: anthropic.AsyncAnthropic):
    message = await client.messages.create(**ASKED, system="Be brief.")
    counted = await client.messages.count_tokens(model="m", messages=HI, system="Be brief.")
    assert counted.input_tokens == message.usage.input_tokens + 4


async def test_an_answer_of_a_given_form(api: Api, client: anthropic.AsyncAnthropic):
    class City(BaseModel):
        name: str

    api.generator.script = Script(one_delta(api.tokens('{"name": "Rome"}'), FinishReason.LENGTH))
    message = await client.messages.parse(**ASKED, output_format=City)
    assert message.parsed_output == City(name="Rome")
    assert "name" in api.generator.requests[-1].capsules[0].sampling.grammar


async def test_errors_are_the_clients_own(api: Api, client: anthropic.AsyncAnthropic):
    with pytest.raises(anthropic.BadRequestError) as bad:
        await client.messages.create(**{**ASKED, "max_tokens": 0})
    assert bad.value.type == "invalid_request_error"
    assert "max_tokens" in str(bad.value)
    assert bad.value.request_id == bad.value.response.headers["x-request-id"]
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(**{**ASKED, "model": "other"})
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.RequestTooLargeError) as large:
        await client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": "x" * (1 << 20)}]})
    assert large.value.type == "request_too_large"


@pytest.mark.parametrize("error", [Overloaded("busy", 7), Unavailable("no worker", 7)])
async def test_a_server_with_too_much_to_do_is_overloaded(
    api: Api, client: anthropic.AsyncAnthropic, error: Unavailable
):
    api.generator.error = error
    with pytest.raises(anthropic.OverloadedError) as refused:
        await client.messages.create(**ASKED)
    assert (refused.value.status_code, refused.value.type) == (529, "overloaded_error")
    assert refused.value.response.headers["retry-after"] == "7"


async def test_a_failure_before_and_in_the_middle_of_a_stream(api: Api, client: anthropic.AsyncAnthropic):
    api.generator.error = Failed("all attempts failed")
    with pytest.raises(anthropic.InternalServerError) as before:
        await client.messages.create(**ASKED, stream=True)
    assert before.value.type == "api_error"
    api.generator.error = None
    api.generator.script = Script(one_delta(api.tokens("Hel"), FinishReason.NONE), error=Failed("all attempts failed"))
    texts: list[str] = []

    async def read() -> None:
        async with client.messages.stream(**ASKED) as stream:
            async for text in stream.text_stream:
                texts.append(text)

    with pytest.raises(anthropic.APIStatusError) as middle:
        await read()
    assert texts == ["Hel"]
    assert middle.value.body["error"]["type"] == "api_error"
    assert middle.value.body["request_id"] == middle.value.request_id


async def test_requests_are_logged_and_counted_under_their_names(api: Api, client: anthropic.AsyncAnthropic):
    await client.messages.create(**ASKED)
    await client.messages.count_tokens(model="m", messages=HI)
    assert [line["endpoint"] for line in api.logs if line["event"] == "request"] == ["messages"]
    metrics = (await api.admin.get("/metrics")).text
    assert 'endpoint="messages.count_tokens"' in metrics


@pytest.mark.parametrize("text", ["H", "Hello"])
async def test_the_first_event_has_what_the_first_token_says_of_the_cache(api: Api, text: str):
    tokens = api.tokens(text)
    api.generator.script = Script(delta_per_token(tokens, cached_tokens=4))
    async with anthropic.AsyncAnthropic(base_url=api.base_url, api_key="none", max_retries=0) as client:
        events = [event async for event in await client.messages.create(**ASKED, stream=True)]
    first, last = events[0].message.usage, events[-2].usage
    assert (first.cache_read_input_tokens, last.cache_read_input_tokens) == (4, 4)
    assert first.input_tokens == last.input_tokens == len(api.generator.requests[-1].capsules[0].token_ids) - 4
    assert last.output_tokens == len(tokens)


async def test_a_prompt_that_is_too_long_is_said_to_be_so(client: anthropic.AsyncAnthropic):
    for text in ("x" * 300, "x" * 100_000):
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: This model's maximum context length"):
            await client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": text}]})


async def test_the_tool_runner_goes_on_without_a_thread(api: Api, client: anthropic.AsyncAnthropic):
    @anthropic.beta_async_tool  # type: ignore[untyped-decorator]
    async def add(a: int, b: int) -> str:
        """Adds."""
        return str(a + b)

    api.generator.max_model_len = 2048
    runner = client.beta.messages.tool_runner(**ASKED, tools=[add])
    assert (await runner.until_done()).content[0].text == "Hello, 🙂 world"
    assert [line["status"] for line in api.logs if line["event"] == "request"] == [400, 200]
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.beta.messages.create(**ASKED, thread={"type": "create"})
    details = refused.value.body["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
