"""Real clients: the official one, and ones that leave."""

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Iterator

import openai
import pytest
import pytest_asyncio

from services.gateway.api.generation import Delta
from services.protocol.frames import TokenLogprobs
from services.protocol.outcomes import FinishReason
from tests.gateway.running_api import Api, post_bytes, running_api
from tests.gateway.scripted_generator import Script, delta_per_token, one_delta


@pytest_asyncio.fixture
async def api() -> AsyncIterator[Api]:
    async with running_api() as running:
        yield running


@pytest_asyncio.fixture
async def client(api: Api) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_official_client_streams_a_chat(api: Api, client: openai.AsyncOpenAI):
    api.generator.script = Script(delta_per_token(api.tokens("Hello, 🙂 world"), FinishReason.LENGTH, cached_tokens=4))
    stream = await client.chat.completions.create(
        model="m",
        messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=20,
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello, 🙂 world"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 4


async def test_official_client_reads_logprobs_of_a_completion(api: Api, client: openai.AsyncOpenAI):
    tokens = api.tokens("ab")
    entries = [TokenLogprobs(-0.25, ((token, -0.25), (9, -3.0))) for token in tokens]
    api.generator.script = Script(delta_per_token(tokens, logprobs=entries))
    completion = await client.completions.create(model="m", prompt="x", logprobs=2, max_tokens=2, seed=1)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [-0.25, -0.25]
    assert logprobs.tokens == ["a", "b"]


async def test_official_client_raises_its_own_errors(api: Api, client: openai.AsyncOpenAI):
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="m", messages=[], temperature=3)
    assert bad.value.param in ("messages", "temperature")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
async def test_client_that_leaves_ends_its_request(api: Api, stream: bool, started: bool):
    """While it waits for its first token, and in the middle."""
    deltas = one_delta(api.tokens("x"), FinishReason.NONE) if started else []
    api.generator.script = Script(deltas, hangs=True)
    _, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(post_bytes("/v1/completions", {"prompt": "x", "stream": stream}))
    while not api.generator.running:
        await asyncio.sleep(0.01)
    writer.close()
    await asyncio.wait_for(api.generator.left.wait(), 60)
    assert api.generator.running == 0
    metrics = ""
    while 'status="499"' not in metrics:
        metrics = (await api.admin.get("/metrics")).text


async def test_client_that_leaves_while_tokens_flow(api: Api):
    api.generator.script = Script(itertools.repeat(Delta(api.tokens("x"), None, FinishReason.NONE, 0)), pause_s=0.001)
    async with api.http.stream(
        "POST", "/v1/completions", json={"model": "m", "prompt": "x", "stream": True}
    ) as response:
        async for _ in response.aiter_lines():
            break
    await asyncio.wait_for(api.generator.left.wait(), 60)
    assert api.generator.running == 0


async def test_client_that_does_not_read_holds_only_its_own_stream_up(api: Api):
    """The gateway stops asking for tokens instead of piling them up."""
    taken = 0

    def endless() -> Iterator[Delta]:
        nonlocal taken
        while True:
            taken += 1
            yield Delta(tokens, None, FinishReason.NONE, 0)

    tokens = api.tokens("word " * 200)
    api.generator.script = Script(endless())
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        client.connect(("127.0.0.1", api.port))
        client.sendall(post_bytes("/v1/completions", {"prompt": "x", "stream": True}))
        before = -1
        while taken != before or not taken:
            before = taken
            await asyncio.sleep(0.2)
            assert (await api.http.get("/health")).status_code == 200
    await asyncio.wait_for(api.generator.left.wait(), 60)
