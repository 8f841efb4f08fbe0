"""The official client: responses whole and streamed, conversations, forms, reading, deleting, cancelling."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types.responses import Response
from pydantic import BaseModel

from services.gateway.api.generation import Failed
from services.gateway.openai.responses.store import MemoryResponseStore, Renewal, StoreUnavailable
from services.protocol.frames import TokenLogprobs
from services.protocol.outcomes import FinishReason
from tests.gateway.running_api import Api, running_api
from tests.gateway.scripted_generator import Script, delta_per_token, one_delta

LOGPROBS = "message.output_text.logprobs"


@pytest_asyncio.fixture
async def api() -> AsyncIterator[Api]:
    async with running_api(response_store=MemoryResponseStore(60, time.monotonic)) as running:
        yield running


@pytest_asyncio.fixture
async def client(api: Api) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def say(api: Api, text: str, finish: FinishReason = FinishReason.STOP) -> None:
    """Makes this text the next answers, a token at a time. The token that stops a sequence is not text."""
    tokens = api.tokens(text)
    api.generator.script = Script(
        delta_per_token([*tokens, 1] if finish is FinishReason.STOP else tokens, finish, cached_tokens=4)
    )


def prompt_of(api: Api) -> str:
    """The last prompt that went to the workers."""
    tokens = api.generator.requests[-1].capsules[0].token_ids
    return str(api.tokenizer.backend.decode(tokens.tolist(), skip_special_tokens=False))


async def test_a_whole_response(api: Api, client: openai.AsyncOpenAI):
    say(api, "Hello, 🙂 world")
    response = await client.responses.create(
        model="m",
        instructions="Be brief.",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        metadata={"a": "b"},
        temperature=0.5,
        max_output_tokens=20,
    )
    Response.model_validate(response.model_dump())
    assert response.output_text == "Hello, 🙂 world"
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 4
    assert response.usage.output_tokens == len(api.tokens("Hello, 🙂 world")) + 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert (response.instructions, response.metadata, response.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert prompt_of(api).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")


async def test_the_client_that_waits(api: Api):
    def talk() -> None:
        with openai.OpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0) as client:
            talk_with(client)

    def talk_with(client: openai.OpenAI) -> None:
        response = client.responses.create(model="m", input="Hi")
        with client.responses.stream(model="m", input="Hi", previous_response_id=response.id) as stream:
            texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(texts) == response.output_text == "Hello"
        assert client.responses.retrieve(response.id).output_text == "Hello"

    await asyncio.to_thread(talk)


async def test_a_streamed_response_is_the_whole_one(api: Api, client: openai.AsyncOpenAI):
    say(api, "Hello, 🙂 world")
    async with client.responses.stream(model="m", input="Hi", max_output_tokens=20) as stream:
        events = [event async for event in stream]
        response = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello, 🙂 world"
    assert response.output_text == "Hello, 🙂 world"
    assert response.usage is not None
    whole = await client.responses.create(model="m", input="Hi", max_output_tokens=20)
    assert whole.usage == response.usage
    kept = await client.responses.retrieve(response.id)
    assert (kept.output[0].id, kept.output_text) == (response.output[0].id, response.output_text)


async def test_an_answer_that_reaches_its_limit_is_incomplete(api: Api, client: openai.AsyncOpenAI):
    say(api, "Hello", FinishReason.LENGTH)
    response = await client.responses.create(model="m", input="Hi", max_output_tokens=1)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    stream = await client.responses.create(model="m", input="Hi", max_output_tokens=1, stream=True)
    events = [event async for event in stream]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"


async def test_parse_gives_an_object(api: Api, client: openai.AsyncOpenAI):
    class Sum(BaseModel):
        total: int

    say(api, '{"total": 3}')
    response = await client.responses.parse(model="m", input="1 + 2", text_format=Sum)
    assert response.output_parsed == Sum(total=3)
    assert "total" in api.generator.requests[-1].capsules[0].sampling.grammar
    async with client.responses.stream(model="m", input="1 + 2", text_format=Sum) as stream:
        assert (await stream.get_final_response()).output_parsed == Sum(total=3)


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_the_text(api: Api, client: openai.AsyncOpenAI, stream: bool):
    tokens = api.tokens("ab")
    entries = [TokenLogprobs(-0.25, ((token, -0.25), (9, -3.0))) for token in tokens]
    api.generator.script = Script(delta_per_token(tokens, FinishReason.LENGTH, logprobs=entries))
    asked: dict[str, Any] = {"model": "m", "input": "Hi", "include": [LOGPROBS], "top_logprobs": 2}
    if stream:
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        response = events[-1].response
    else:
        response = await client.responses.create(**asked)
    logprobs = response.output[0].content[0].logprobs
    assert [(entry.token, entry.logprob, len(entry.top_logprobs)) for entry in logprobs] == [
        ("a", -0.25, 2),
        ("b", -0.25, 2),
    ]
    assert api.generator.requests[-1].capsules[0].sampling.num_logprobs == 2


async def test_a_conversation_goes_on_from_a_response(api: Api, client: openai.AsyncOpenAI):
    """Instructions belong to one request; everything else is there again."""
    say(api, "Paris")
    first = await client.responses.create(model="m", input="Capital of France?", instructions="Be brief.")
    second = await client.responses.create(model="m", input="And of Italy?", previous_response_id=first.id)
    await client.responses.delete(first.id)
    await client.responses.create(model="m", input="Thanks", previous_response_id=second.id)
    turns = ["user\nCapital of France?", "assistant\nParis", "user\nAnd of Italy?", "assistant\nParis", "user\nThanks"]
    assert prompt_of(api) == "".join(f"<|im_start|>{t}<|im_end|>\n" for t in turns) + "<|im_start|>assistant\n"


async def test_output_that_a_client_sends_back_is_input(api: Api, client: openai.AsyncOpenAI):
    say(api, "Paris")
    first = await client.responses.create(model="m", input="Capital of France?", store=False)
    items = [{"role": "user", "content": "Capital of France?"}, *(item.model_dump() for item in first.output)]
    await client.responses.create(model="m", input=[*items, {"role": "user", "content": "Thanks"}])
    assert "<|im_start|>assistant\nParis<|im_end|>\n<|im_start|>user\nThanks" in prompt_of(api)


async def test_input_items_are_listed_in_pages(api: Api, client: openai.AsyncOpenAI):
    first = await client.responses.create(model="m", input="One")
    second = await client.responses.create(
        model="m",
        previous_response_id=first.id,
        input=[{"role": "user", "content": "Two"}, {"role": "developer", "content": "Three"}],
    )
    listed = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
    assert [item.content[0].text for item in listed] == ["One", "Hello", "Two", "Three"]
    assert [item.role for item in listed] == ["user", "assistant", "user", "developer"]
    newest = await client.responses.input_items.list(second.id, limit=1)
    assert newest.data[0].content[0].text == "Three"
    assert newest.has_more


async def test_responses_that_are_not_kept(api: Api, client: openai.AsyncOpenAI):
    response = await client.responses.create(model="m", input="Hi", store=False)
    assert response.store is False
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            await call(response.id)
    with pytest.raises(openai.NotFoundError) as missing:
        await client.responses.create(model="m", input="Hi", previous_response_id=response.id)
    assert missing.value.code == "previous_response_not_found"
    assert missing.value.param == "previous_response_id"


async def test_a_stream_is_cancelled_by_its_id(api: Api, client: openai.AsyncOpenAI):
    api.generator.script = Script(one_delta(api.tokens("Hel"), FinishReason.NONE), hangs=True)
    events = []
    cancelling = None
    async for event in await client.responses.create(model="m", input="Hi", stream=True):
        events.append(event)
        if event.type == "response.output_text.delta":
            running = await client.responses.retrieve(events[0].response.id)
            assert running.status == "in_progress"
            cancelling = asyncio.create_task(client.responses.cancel(running.id))
    assert cancelling is not None
    cancelled = await cancelling
    assert cancelled.status == "cancelled"
    assert cancelled.output_text == "Hel"
    assert events[-1].type == "response.incomplete"
    assert events[-1].response == cancelled
    assert api.generator.running == 0
    again = await client.responses.cancel(cancelled.id)
    assert again == cancelled == await client.responses.retrieve(cancelled.id)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_waits_is_cancelled_by_the_id_of_its_request(
    api: Api, client: openai.AsyncOpenAI, stream: bool
):
    api.generator.script = Script([], hangs=True)
    headers = {"x-request-id": "mine"}
    asking = asyncio.create_task(
        client.responses.create(model="m", input="Hi", stream=stream, extra_headers=headers, store=False)
    )
    while not api.generator.running:
        await asyncio.sleep(0.01)
    assert (await client.responses.cancel("resp_mine")).status == "cancelled"
    found = await asking
    response = [event async for event in found][-1].response if stream else found
    assert (response.status, response.output) == ("cancelled", [])


async def test_two_requests_with_one_id_are_two_responses(client: openai.AsyncOpenAI):
    headers = {"x-request-id": "mine"}
    first, second = [
        await client.responses.create(model="m", input=text, extra_headers=headers) for text in ("one", "two")
    ]
    assert first.id != second.id
    items = await client.responses.input_items.list(first.id)
    assert [part.text for item in items.data for part in item.content] == ["one"]


async def test_a_response_whose_client_leaves_is_not_kept(api: Api, client: openai.AsyncOpenAI):
    api.generator.script = Script(one_delta(api.tokens("Hel"), FinishReason.NONE), hangs=True)
    async with await client.responses.create(model="m", input="Hi", stream=True) as stream:
        created = await anext(aiter(stream))
        assert (await client.responses.retrieve(created.response.id)).status == "in_progress"
    await asyncio.wait_for(api.generator.left.wait(), 60)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(created.response.id)


async def test_a_response_that_has_ended_is_not_cancelled(api: Api, client: openai.AsyncOpenAI):
    response = await client.responses.create(model="m", input="Hi")
    with pytest.raises(openai.BadRequestError, match="incomplete cannot be cancelled"):
        await client.responses.cancel(response.id)


async def test_an_error_before_the_first_token_is_an_http_error(api: Api, client: openai.AsyncOpenAI):
    api.generator.script = Script([], error=Failed("x"))
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model="m", input="Hi", stream=stream)


@pytest.mark.parametrize("error", [Failed("x"), RuntimeError("a mistake of ours")])
async def test_an_error_after_that_is_the_response_s_own(api: Api, client: openai.AsyncOpenAI, error: Exception):
    api.generator.script = Script(one_delta(api.tokens("Hel"), FinishReason.NONE), error=error)
    events = [event async for event in await client.responses.create(model="m", input="Hi", stream=True)]
    assert events[-1].type == "response.failed"
    failed = events[-1].response
    assert failed.error.code == "server_error"
    assert failed.output_text == "Hel"
    assert "mistake" not in failed.error.message
    assert "request failed" in [line["event"] for line in api.logs]
    assert (await client.responses.retrieve(failed.id)).status == "failed"
    metrics = (await api.admin.get("/metrics")).text
    assert 'baton_requests_total{endpoint="responses",status="500"} 1.0' in metrics


class AwayStore:
    """A ResponseStore that does not answer, like Redis when it is gone."""

    lease_s = 10.0

    async def put(self, tenant: str, response_id: str, packed: bytes) -> bool:
        return False

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        raise StoreUnavailable

    async def delete(self, tenant: str, response_id: str) -> bool:
        raise StoreUnavailable

    async def update(self, tenant: str, response_id: str, packed: bytes, anew: bool) -> bytes | None:
        raise StoreUnavailable

    async def renew(self, tenant: str, response_id: str) -> Renewal:
        raise StoreUnavailable

    async def claim(self, tenant: str, response_id: str) -> bool:
        raise StoreUnavailable

    async def ask_for_end(self, tenant: str, response_id: str) -> None:
        raise StoreUnavailable

    async def follow(self) -> None:
        raise AssertionError("nobody follows a store in here")


async def test_without_an_answer_of_the_store_responses_are_answered_and_not_kept():
    async with running_api(response_store=AwayStore()) as api:
        answer = await api.http.post("/v1/responses", json={"input": "Hi"})
        assert (answer.status_code, answer.json()["store"]) == (200, False)
        answer = await api.http.post("/v1/responses", json={"input": "Hi", "previous_response_id": "resp_1"})
        assert answer.status_code == 503
        assert answer.json()["error"]["param"] == "previous_response_id"
        assert answer.headers["retry-after"]
        assert (await api.http.get("/v1/responses/resp_1")).status_code == 503
        assert (await api.http.delete("/v1/responses/resp_1")).status_code == 503


async def test_where_nothing_is_kept_a_client_that_wants_it_is_told():
    async with running_api(response_store=None) as api:
        assert (await api.http.post("/v1/responses", json={"input": "Hi"})).json()["store"] is False
        answer = await api.http.post("/v1/responses", json={"input": "Hi", "store": True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "store")
        assert (await api.http.get("/v1/responses/resp_1")).status_code == 404


async def test_a_kept_response_that_no_gateway_wrote_is_not_found():
    store = MemoryResponseStore(60, time.monotonic)
    async with running_api(response_store=store) as api:
        for number, packed in enumerate((b"", b"{}\n[]", b'{"output": [{}]}\n[]', b'{"output": []}\n5')):
            await store.put("default", f"resp_{number}", packed)
            body = {"input": "Hi", "previous_response_id": f"resp_{number}"}
            assert (await api.http.post("/v1/responses", json=body)).status_code == 404
