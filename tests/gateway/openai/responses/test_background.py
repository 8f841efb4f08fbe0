"""The official client: responses in the background, which go on without it, are polled, followed and cancelled."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types.responses import Response

from services.gateway.api.generation import Failed, Overloaded, Stopping
from services.gateway.api.side_thread import SideThread
from services.gateway.openai.responses.background_kept import BackgroundResponses
from services.gateway.openai.responses.held import HeldAnswers
from services.gateway.openai.responses.kept_response import UNENDED, KeptResponse
from services.gateway.openai.responses.store import MemoryResponseStore
from services.protocol.outcomes import FinishReason
from tests.failures import FAILURES, NAMES, failing, first
from tests.gateway.openai.responses.test_official_client import AwayStore, prompt_of, say
from tests.gateway.openai.test_bad_input import assert_refused
from tests.gateway.running_api import Api, running_api
from tests.gateway.scripted_generator import Script, one_delta

TEXT = "Hello, 🙂 world"
LOGPROBS = "message.output_text.logprobs"


@pytest.fixture
def store() -> MemoryResponseStore:
    return MemoryResponseStore(60, time.monotonic)


@pytest_asyncio.fixture
async def api(store: MemoryResponseStore) -> AsyncIterator[Api]:
    async with running_api(response_store=store) as running:
        yield running


@pytest_asyncio.fixture
async def client(api: Api) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def ended(client: openai.AsyncOpenAI, response_id: str) -> Response:
    """The response when it has ended, as one polls for it."""
    async with asyncio.timeout(60):
        while (response := await client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
    return response


async def events_of(client: openai.AsyncOpenAI, response_id: str, **more: Any) -> list[Any]:
    return [event async for event in await client.responses.retrieve(response_id, stream=True, **more)]


async def test_a_response_in_the_background_is_queued_and_polled_until_it_is_complete(
    api: Api, client: openai.AsyncOpenAI
):
    say(api, TEXT)
    api.generator.script.pause_s = 0.01
    queued = await client.responses.create(model="m", input="Hi", background=True)
    assert (queued.status, queued.background, queued.output, queued.completed_at) == ("queued", True, [], None)
    done = await ended(client, queued.id)
    Response.model_validate(done.model_dump())
    assert (done.status, done.output_text, done.background) == ("completed", TEXT, True)
    assert done.usage is not None
    assert done.usage.output_tokens == len(api.tokens(TEXT)) + 1
    assert done.completed_at is not None
    turn = await client.responses.create(model="m", input="Go on", previous_response_id=done.id)
    assert turn.status == "completed"
    assert f"<|im_start|>assistant\n{TEXT}<|im_end|>" in prompt_of(api)


async def test_it_is_queued_until_its_first_token_and_then_in_progress(api: Api, client: openai.AsyncOpenAI):
    gate = asyncio.Event()
    api.generator.script = Script(one_delta(api.tokens("Hel"), FinishReason.NONE), hangs=True, gate=gate)
    queued = await client.responses.create(model="m", input="Hi", background=True)
    assert queued.status == "queued"
    seen = {(await client.responses.retrieve(queued.id)).status}
    gate.set()
    async with asyncio.timeout(60):
        while "in_progress" not in seen:
            seen.add((await client.responses.retrieve(queued.id)).status)
    assert seen == {"queued", "in_progress"}
    await client.responses.cancel(queued.id)


@pytest.mark.parametrize("stream", [False, True])
async def test_it_goes_on_when_its_client_leaves(api: Api, stream: bool):
    say(api, TEXT)
    api.generator.script.pause_s = 0.02
    body = {"model": "m", "input": "Hi", "background": True, "stream": stream}
    async with openai.AsyncOpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.responses.create(**body)
        response_id = (await anext(aiter(answer))).response.id if stream else answer.id
        if stream:
            await answer.close()
    async with openai.AsyncOpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0) as client:
        done = await ended(client, response_id)
        assert (done.status, done.output_text) == ("completed", TEXT)


async def test_every_stream_of_it_has_the_same_events_while_it_runs_and_when_it_is_kept(
    api: Api, client: openai.AsyncOpenAI
):
    say(api, TEXT)
    api.generator.script.as_asked = True
    api.generator.script.pause_s = 0.01
    stream = await client.responses.create(
        model="m", input="Hi", background=True, stream=True, include=[LOGPROBS], top_logprobs=1
    )
    first: list[Any] = []
    joined: list[asyncio.Task[list[Any]]] = []
    async for event in stream:
        first.append(event)
        if event.type == "response.output_text.delta" and not joined:  # another client joins
            joined.append(asyncio.create_task(events_of(client, first[0].response.id)))
    assert [event.type for event in first[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.response.status for event in first[:3]] == ["queued", "queued", "in_progress"]
    assert [event.sequence_number for event in first] == list(range(len(first)))
    assert "".join(event.delta for event in first if event.type == "response.output_text.delta") == TEXT
    assert any(event.logprobs for event in first if event.type == "response.output_text.delta")
    assert first[-1].type == "response.completed"
    (joining,) = joined
    assert await joining == first
    response_id = first[0].response.id
    assert await events_of(client, response_id) == first
    assert await events_of(client, response_id, starting_after=5) == first[6:]
    assert await events_of(client, response_id, starting_after=len(first) - 1) == []
    assert first[-1].response == await client.responses.retrieve(response_id)


async def test_a_stream_that_broke_is_taken_up_where_it_ended(api: Api, client: openai.AsyncOpenAI):
    say(api, TEXT)
    api.generator.script.pause_s = 0.02
    seen = []
    async with await client.responses.create(model="m", input="Hi", background=True, stream=True) as stream:
        async for event in stream:
            seen.append(event)
            if len(seen) == 7:
                break
    seen += await events_of(client, seen[0].response.id, starting_after=seen[-1].sequence_number)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == TEXT
    assert seen[-1].type == "response.completed"


@pytest.mark.parametrize("text", ["", "Hel"])
async def test_it_is_cancelled_while_it_waits_and_while_it_speaks(api: Api, client: openai.AsyncOpenAI, text: str):
    deltas = one_delta(api.tokens(text), FinishReason.NONE) if text else []
    api.generator.script = Script(deltas, hangs=True)
    queued = await client.responses.create(model="m", input="Hi", background=True)
    following = asyncio.create_task(events_of(client, queued.id))
    while text and (await client.responses.retrieve(queued.id)).status == "queued":
        await asyncio.sleep(0.01)
    cancelled = await client.responses.cancel(queued.id)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", text)
    assert api.generator.running == 0
    assert (await following)[-1].response == cancelled
    assert await client.responses.cancel(queued.id) == cancelled == await client.responses.retrieve(queued.id)
    assert await events_of(client, queued.id) == await following


async def test_what_is_wrong_with_a_request_is_its_own_error_and_nothing_is_kept(api: Api, client: openai.AsyncOpenAI):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client.responses.create(model="m", input="word " * 300, background=True, stream=stream)
    api.generator.error = Overloaded("x")
    with pytest.raises(openai.RateLimitError):
        await client.responses.create(model="m", input="Hi", background=True, extra_headers={"x-request-id": "mine"})
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_mine")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Failed("x"), "failed"),
        (RuntimeError("a mistake of ours"), "failed to answer"),
        (Stopping("the gateway ends"), "restarting"),
    ],
)
async def test_what_goes_wrong_later_is_the_response_s_own_error(
    api: Api, client: openai.AsyncOpenAI, error: Exception, words: str
):
    api.generator.script = Script(one_delta(api.tokens("Hel"), FinishReason.NONE), error=error)
    queued = await client.responses.create(model="m", input="Hi", background=True)
    failed = await ended(client, queued.id)
    assert (failed.status, failed.output_text) == ("failed", "Hel")
    assert failed.error is not None
    assert words in failed.error.message
    assert "mistake" not in failed.error.message
    assert (await events_of(client, queued.id))[-1].type == "response.failed"
    assert "request failed" in [line["event"] for line in api.logs]


async def test_its_request_is_counted_when_it_has_ended(api: Api, client: openai.AsyncOpenAI):
    api.generator.script = Script(one_delta(api.tokens("Hel"), FinishReason.NONE), hangs=True)
    queued = await client.responses.create(model="m", input="Hi", background=True)
    while (await client.responses.retrieve(queued.id)).status == "queued":
        await asyncio.sleep(0.01)
    assert (await api.http.get("/load")).json()["server_load"] >= 1
    assert "request" not in [line["event"] for line in api.logs]
    await client.responses.cancel(queued.id)
    async with asyncio.timeout(60):
        while not (lines := [line for line in api.logs if line["event"] == "request"]):
            await asyncio.sleep(0.01)
    assert (lines[0]["endpoint"], lines[0]["status"], lines[0]["generated_tokens"]) == ("responses", 200, 2)


async def test_a_response_that_has_not_ended_is_neither_continued_nor_deleted(api: Api, client: openai.AsyncOpenAI):
    api.generator.script = Script([], hangs=True)
    queued = await client.responses.create(model="m", input="Hi", background=True)
    with pytest.raises(openai.BadRequestError, match="has not ended") as refused:
        await client.responses.create(model="m", input="Hi", previous_response_id=queued.id)
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        await client.responses.delete(queued.id)
    assert (await client.responses.input_items.list(queued.id)).data
    await client.responses.cancel(queued.id)
    await client.responses.delete(queued.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(queued.id)


async def test_only_background_responses_are_streamed_again(api: Api, client: openai.AsyncOpenAI):
    whole = await client.responses.create(model="m", input="Hi")
    with pytest.raises(openai.BadRequestError, match="'background'"):
        await events_of(client, whole.id)
    with pytest.raises(openai.NotFoundError):
        await events_of(client, "resp_none")
    assert_refused(await api.http.get(f"/v1/responses/{whole.id}?stream=true&starting_after=x"), "starting_after")


async def test_nothing_runs_in_the_background_where_it_could_not_be_kept(api: Api, client: openai.AsyncOpenAI):
    large = "x" * 600_000  # twice: in each turn
    api.generator.max_model_len = 1 << 21
    before = await client.responses.create(model="m", input=large)
    with pytest.raises(openai.BadRequestError, match="conversation") as refused:
        await client.responses.create(model="m", input=large, previous_response_id=before.id, background=True)
    assert refused.value.param == "background"
    body = {"input": "Hi", "background": True}
    async with running_api(response_store=None) as forgetful:
        assert_refused(await forgetful.http.post("/v1/responses", json=body), "background", "unsupported_parameter")
    async with running_api(response_store=AwayStore()) as forgetful:
        answer = await forgetful.http.post("/v1/responses", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (503, "background")
        assert forgetful.generator.running == 0


async def test_another_gateway_that_shares_the_store_cancels_and_follows_it(
    store: MemoryResponseStore, client: openai.AsyncOpenAI, api: Api
):
    api.generator.script = Script(one_delta(api.tokens("Hel"), FinishReason.NONE), hangs=True)
    queued = await client.responses.create(model="m", input="Hi", background=True)
    async with (
        running_api(response_store=store) as other,
        openai.AsyncOpenAI(base_url=f"{other.base_url}/v1", api_key="none", max_retries=0) as elsewhere,
    ):
        following = asyncio.create_task(events_of(elsewhere, queued.id))
        while (await client.responses.retrieve(queued.id)).status == "queued":
            await asyncio.sleep(0.01)
        cancelled = await elsewhere.responses.cancel(queued.id)
        assert (cancelled.status, cancelled.output_text) == ("cancelled", "Hel")
        assert api.generator.running == 0
        assert (await following)[-1].response == cancelled == await client.responses.retrieve(queued.id)


async def test_the_response_of_a_gateway_that_died_has_failed(
    store: MemoryResponseStore, client: openai.AsyncOpenAI, api: Api
):
    """Its record says that it runs, and nobody has the lease on it."""
    api.generator.script = Script([], hangs=True)
    queued = await client.responses.create(model="m", input="Hi", background=True)
    packed = await store.get("default", queued.id)
    assert packed is not None
    left = KeptResponse.unpack(packed, queued.id)
    assert left.pieces == UNENDED
    other = replace(left, response=left.response.replace(queued.id.encode(), b"resp_left"))
    await store.put("default", "resp_left", other.pack("resp_left"))
    failed = await client.responses.retrieve("resp_left")
    assert (failed.status, failed.output) == ("failed", [])
    assert failed.error is not None
    assert "gateway" in failed.error.message
    events = await events_of(client, "resp_left", starting_after=57)
    assert [(event.type, event.sequence_number) for event in events] == [("response.failed", 58)]
    with pytest.raises(openai.BadRequestError, match="failed cannot be cancelled"):
        await client.responses.cancel("resp_left")
    await client.responses.delete("resp_left")
    await client.responses.cancel(queued.id)


@pytest.mark.few(1)
@pytest.mark.parametrize("failure", FAILURES, ids=NAMES)
async def test_a_renewal_of_the_lease_that_fails_is_not_the_last(failure: Exception):
    store, side, ended = MemoryResponseStore(60, time.monotonic, lease_s=1), SideThread(), asyncio.Event()
    async with BackgroundResponses(store, side, HeldAnswers()).leased("a", "resp_1", (), ended.set):
        renew = "services.gateway.openai.responses.store.MemoryResponseStore.renew"
        await store.ask_for_end("a", "resp_1")
        with failing(renew, failure, first(1)) as failed:
            async with asyncio.timeout(60):
                await ended.wait()
        assert len(failed) == 1
