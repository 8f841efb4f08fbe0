"""Limits of keys as clients meet them."""

import asyncio
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anthropic
import grpc
import httpx2
import numpy as np
import pytest
from starlette.routing import Route

from protos import inference_pb2, inference_pb2_grpc
from services.config import Right
from services.gateway.api.generation import (
    Delta,
    GenerationError,
    Overloaded,
    Refusal,
    Stopping,
    TooLarge,
    Unavailable,
)
from services.gateway.http.application import Application
from services.gateway.http.operation import ErrorAnswer
from services.gateway.keys.authentication import Keys
from services.gateway.keys.changes import add_key
from services.gateway.keys.file import read_keys
from services.gateway.keys.key_entry import RateLimits
from services.gateway.keys.local_quotas import LocalQuotas
from services.gateway.keys.quota import KeyQuota
from services.gateway.keys.rates import WINDOW_S
from services.protocol.outcomes import FinishReason
from tests.gateway.keys.key_files import bearer
from tests.gateway.running_api import MODEL, Api, running_api
from tests.gateway.scripted_generator import Script

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
MESSAGE = {**CHAT, "max_tokens": 5}
TEXT = {"model": MODEL, "prompt": "Hi"}
RANKED = {"model": MODEL, "query": "Hi", "documents": ["Ho"]}

TOKENS_PER_MINUTE = 240  # so few that none comes back while a slow machine answers

# By path: a body. All of these cost the gateway something.
COUNTED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": {"model": MODEL, "messages": [CHAT["messages"]]},
    "/v1/completions": TEXT,
    "/v1/embeddings": {"model": MODEL, "input": "Hi"},
    "/pooling": {"model": MODEL, "input": "Hi"},
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), RANKED),
    **{path: {"model": MODEL, "text_1": "Hi", "text_2": "Ho"} for path in ("/v1/score", "/score")},
    "/v1/messages": MESSAGE,
    "/v2/chat": CHAT,
    "/v2/embed": {"model": MODEL, "texts": ["Hi"]},
    "/v1/messages/count_tokens": CHAT,
    "/v1/messages/render": MESSAGE,
    "/v1/responses/render": {"model": MODEL, "input": "Hi"},
    "/v1/responses": {"model": MODEL, "input": "Hi", "store": False},
    "/v1/chat/completions/render": CHAT,
    "/v1/completions/render": TEXT,
    "/inference/v1/generate": {"model": MODEL, "token_ids": [5, 6], "sampling_params": {"max_tokens": 5}},
    "/tokenize": TEXT,
    "/detokenize": {"model": MODEL, "tokens": [5, 6]},
}
NOT_COUNTED = {"/v1/responses/{response_id}/cancel"}  # ends work, and has no body


class Limited:
    """A gateway with keys of one limit each, and the causes of refusals that it counted."""

    def __init__(self, path: Path) -> None:
        def key(**limits: int) -> str:
            return add_key(path, "acme", [Right.API], 0, RateLimits(**limits))[1]

        self.by_requests = key(requests_per_minute=2)
        self.by_messages = key(requests_per_minute=1)
        self.by_calls = key(requests_per_minute=1)
        self.by_both = key(requests_per_minute=1, tokens_per_minute=6000)
        self.by_few_tokens = key(tokens_per_minute=2)
        self.by_tokens = key(tokens_per_minute=60)
        self.by_number = key(max_concurrent=1)
        self.by_path = {
            path: key(requests_per_minute=2, tokens_per_minute=TOKENS_PER_MINUTE) for path in (*COUNTED, "grpc")
        }
        self.free = key()
        self.refused: list[Refusal] = []
        store = LocalQuotas()
        self.keys = Keys((), read_keys(path), lambda id, limits: KeyQuota(id, limits, store, self.refused.append))


@pytest.fixture
async def limited(tmp_path: Path) -> AsyncIterator[tuple[Api, Limited]]:
    found = Limited(tmp_path / "keys.json")
    async with running_api(keys=found.keys) as api:
        yield api, found


async def post(api: Api, key: str, path: str = "/v1/chat/completions", **fields: object) -> httpx2.Response:
    body = {**(MESSAGE if "messages" in path else CHAT), **fields}
    return await api.http.post(path, json=body, headers=bearer(key))


async def test_answers_say_what_is_left_and_the_next_request_is_refused(limited: tuple[Api, Limited]):
    api, keys = limited
    first, second, third = [await post(api, keys.by_requests, stream=stream) for stream in (False, True, False)]
    assert [each.status_code for each in (first, second, third)] == [200, 200, 429]
    shown = [each.headers["x-ratelimit-remaining-requests"] for each in (first, second, third)]
    assert shown == ["1", "0", "0"]
    assert {each.headers["x-ratelimit-limit-requests"] for each in (first, second, third)} == {"2"}
    assert first.headers["x-ratelimit-reset-requests"] in ("30s", "29s")
    assert "x-ratelimit-limit-tokens" not in first.headers
    assert third.json()["error"]["code"] == "rate_limit_exceeded"
    assert 0 < int(third.headers["retry-after"]) <= 30
    assert 0 < int(third.headers["retry-after-ms"]) <= 30_000
    assert keys.refused == [Refusal.KEY_REQUESTS]
    assert len(api.generator.requests) == 2, "refused before any work"
    free = await post(api, keys.free)
    assert free.status_code == 200
    assert not [name for name in free.headers if name.startswith("x-ratelimit")]


async def test_a_refused_request_costs_no_tokenizing(limited: tuple[Api, Limited]):
    """What is wrong with a request that only tokens show, or a grammar, is not found where its key is closed."""
    api, keys = limited
    wrong: tuple[dict[str, object], ...] = (
        {"messages": [{"role": "user", "content": "much " * 5000}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/$defs/no"}}}},
    )
    for key, kind in ((keys.by_messages, "requests"), (keys.by_few_tokens, "tokens")):
        assert [(await chat(api, key, fields)).status_code for fields in wrong] == [400, 400]
        body = {"model": MODEL, "prompt": [5]}
        assert (await api.http.post("/v1/completions", json=body, headers=bearer(key))).status_code == 200
        tokenized = await prompt_tokens(api)
        for fields in ({}, *wrong):
            answer = await chat(api, key, fields)
            assert (answer.status_code, answer.json()["error"]["type"]) == (429, kind)
            ErrorAnswer.model_validate(answer.json())
            assert answer.headers[f"x-ratelimit-remaining-{kind}"] == "0"
            assert 0 < int(answer.headers["retry-after"]) <= 60
        assert await prompt_tokens(api) == tokenized


async def chat(api: Api, key: str, fields: dict[str, object]) -> httpx2.Response:
    return await api.http.post("/v1/chat/completions", json=CHAT | fields, headers=bearer(key))


async def prompt_tokens(api: Api) -> float:
    lines = (await api.admin.get("/metrics")).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("baton_prompt_tokens_total "))


async def test_the_official_client_of_messages_is_told_what_is_left(limited: tuple[Api, Limited]):
    """Names and forms as https://platform.claude.com/docs/en/api/rate-limits has them."""
    api, keys = limited
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    async with anthropic.AsyncAnthropic(base_url=api.base_url, api_key=keys.by_both, max_retries=0) as client:
        began = datetime.now(UTC)
        first = await client.messages.with_raw_response.create(**asked)
        with pytest.raises(anthropic.RateLimitError) as caught:
            await client.messages.create(**asked)
        ended = datetime.now(UTC)
    usage = (await first.parse()).usage
    left = {name.removeprefix("anthropic-ratelimit-"): value for name, value in first.headers.items() if "rate" in name}
    assert left.keys() == {
        f"{unit}-{what}" for unit in ("requests", "tokens") for what in ("limit", "remaining", "reset")
    }
    assert (left["requests-limit"], left["requests-remaining"]) == ("1", "0")
    assert (left["tokens-limit"], left["tokens-remaining"]) == ("6000", str(6000 - usage.input_tokens))
    for unit, full_s in (("requests", 60), ("tokens", usage.input_tokens / 100)):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", left[f"{unit}-reset"])
        reset = datetime.fromisoformat(left[f"{unit}-reset"])
        assert began <= reset - timedelta(seconds=full_s) <= ended + timedelta(seconds=1)
    refused = caught.value
    assert refused.body == {
        "type": "error",
        "error": {
            "type": "rate_limit_error",
            "message": "Rate limit reached: this key may have 1 requests per minute.",
        },
        "request_id": refused.request_id,
    }
    assert 0 < int(refused.response.headers["retry-after"]) <= 60
    assert refused.response.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert not [name for name in refused.response.headers if name.startswith("x-ratelimit")]


async def test_messages_and_calls_are_refused_in_their_own_forms(limited: tuple[Api, Limited]):
    api, keys = limited
    answers = [await post(api, keys.by_messages, "/v1/messages") for _ in range(2)]
    assert [each.status_code for each in answers] == [200, 429]
    assert answers[1].json()["error"]["type"] == "rate_limit_error"
    port = await api.start_grpc()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        metadata = (("authorization", f"Bearer {keys.by_calls}"),)

        async def call() -> dict[str, str]:
            running = stub.Generate(inference_pb2.GenerateRequest(text="Hi"), metadata=metadata)
            async for _ in running:
                pass
            return dict(await running.trailing_metadata())

        assert (await call())["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 0 < int(dict(caught.value.trailing_metadata())["retry-after"]) <= WINDOW_S


async def test_tokens_of_prompts_and_answers_count(limited: tuple[Api, Limited]):
    api, keys = limited
    statuses = []
    for _ in range(8):
        statuses.append((answer := await post(api, keys.by_tokens)).status_code)
        await asyncio.sleep(0)  # until the answer is settled
    usage = (await post(api, keys.free)).json()["usage"]
    assert answer.json()["error"]["type"] == "tokens"
    expected = next(n for n in range(9) if (n + 1) * usage["prompt_tokens"] + n * usage["completion_tokens"] > 60)
    assert statuses == [200] * expected + [429] * (8 - expected)


async def test_a_prompt_above_the_limit_is_told_so(limited: tuple[Api, Limited]):
    api, keys = limited
    answer = await post(api, keys.by_tokens, messages=[{"role": "user", "content": "much " * 30}])
    assert answer.status_code == 429
    assert "can never be let in" in answer.json()["error"]["message"]


async def test_a_client_that_leaves_makes_room(limited: tuple[Api, Limited]):
    api, keys = limited
    api.generator.script = Script([], hangs=True)
    leaving = asyncio.create_task(post(api, keys.by_number))
    while not api.generator.running:
        await asyncio.sleep(0.01)
    leaving.cancel()
    await asyncio.wait_for(api.generator.left.wait(), 120)
    running = asyncio.create_task(post(api, keys.by_number))
    while len(api.generator.requests) < 2:
        await asyncio.sleep(0.01)
        assert not running.done(), running.result().text
    assert (await post(api, keys.by_number)).json()["error"]["message"].endswith("1 requests at once.")
    running.cancel()


@pytest.mark.parametrize("path", COUNTED)
async def test_whatever_costs_the_gateway_work_counts(limited: tuple[Api, Limited], path: str):
    api, keys = limited
    if path in ("/v1/embeddings", "/pooling", "/v2/embed"):
        vector = np.ones(4, np.float32)
        api.generator.script = Script([Delta([], None, FinishReason.LENGTH, 0, embedding=vector)])
    if path.endswith(("/rerank", "/score")):
        both = [Delta([], None, FinishReason.LENGTH, 0, choice, embedding=np.ones(4, np.float32)) for choice in (0, 1)]
        api.generator.script = Script(both, for_all=False)
    names = ("x-ratelimit-{what}-{unit}", "anthropic-ratelimit-{unit}-{what}")
    name = names["messages" in path]
    left = []
    for status in (200, 200, 429):
        answer = await api.http.post(path, json=COUNTED[path], headers=bearer(keys.by_path[path]))
        assert answer.status_code == status, answer.text
        left.append([int(answer.headers[name.format(what="remaining", unit=unit)]) for unit in ("requests", "tokens")])
    assert [requests for requests, _ in left] == [1, 0, 0]
    assert TOKENS_PER_MINUTE > left[0][1] > left[1][1], "tokens, too"
    assert 0 < int(answer.headers["retry-after"]) <= 60


async def test_every_route_that_takes_a_body_counts(limited: tuple[Api, Limited]):
    app, _ = limited[0].applications
    assert isinstance(app, Application)
    posts = {each.path for each in app.router.routes if isinstance(each, Route) and "POST" in (each.methods or ())}
    assert posts == COUNTED.keys() | NOT_COUNTED


async def test_calls_that_tokenize_count(limited: tuple[Api, Limited]):
    api, keys = limited
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await api.start_grpc()}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def call() -> str:
            metadata = (("authorization", f"Bearer {keys.by_path['grpc']}"),)
            running = stub.Tokenize(inference_pb2.TokenizeRequest(text="Hi"), metadata=metadata)
            await running
            return str(dict(await running.trailing_metadata())["x-ratelimit-remaining-requests"])

        assert [await call(), await call()] == ["1", "0"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_requests_that_only_tokenize_are_refused_before_any_work(limited: tuple[Api, Limited]):
    api, keys = limited
    long = {"model": MODEL, "prompt": "much " * 20_000}
    for path in ("/tokenize", "/v1/completions/render"):
        key = bearer(keys.by_path[path])
        assert [(await api.http.post(path, json=TEXT, headers=key)).status_code for _ in range(2)] == [200, 200]
        assert (await api.http.post(path, json=long, headers=key)).status_code == 429


BEFORE_WORK = [
    Overloaded("the first token is expected in 9 s", 1, Refusal.SLO),
    Overloaded("the first token is expected in 9 s", 1, Refusal.DEADLINE),
    Overloaded("others wait", 1, Refusal.SHARE),
    Overloaded("in flight"),
    Unavailable("nobody"),
    Stopping("the gateway ends"),
    TooLarge("for all"),
]


@pytest.mark.few(8)
@pytest.mark.parametrize("error", BEFORE_WORK, ids=lambda error: f"{type(error).__name__} {error}")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/completions", "/v1/responses"])
async def test_a_request_that_is_refused_before_work_does_not_count(
    limited: tuple[Api, Limited], error: GenerationError, path: str
):
    """Neither as a request, nor with the tokens of its prompt; the answer says what is left without it."""
    api, keys = limited
    body = {"/v1/completions": {"prompt": "Hi"}, "/v1/responses": {"input": "Hi"}}.get(path, MESSAGE)
    for number in range(1, 4):
        api.generator.error = error
        refused = await api.http.post(path, json={"model": MODEL, **body}, headers=bearer(keys.by_both))
        assert refused.status_code in (400, 429, 503, 529), refused.text
        assert refused.json()["error"].get("code") != "rate_limit_exceeded"
        left = [
            value
            for name, value in refused.headers.items()
            if name.endswith(("remaining-requests", "requests-remaining"))
        ]
        assert left == ["1"], number
    api.generator.error = None
    assert [(await post(api, keys.by_both)).status_code for _ in range(2)] == [200, 429]
