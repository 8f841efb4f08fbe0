"""A large request, and a long conversation, hold no other client up."""

import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
import pytest_asyncio

from services.gateway.openai.responses.store import MemoryResponseStore
from tests.gateway.openai.test_loop_pauses import LONGEST, longest_turn
from tests.gateway.running_api import Api, running_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = {"role": "user", "content": "Hi"}
PART = {"type": "input_text", "text": "x"}
MANY: dict[str, Any] = {
    "items": [HELLO] * 2048,
    "too many items": [HELLO] * 16_384,
    "wrong items": [5] * 16_384,
    "parts": [{"role": "user", "content": [PART] * 20_000}],
    "fields": [{**HELLO, **{str(number): 1 for number in range(70_000)}}],
    "ignored fields": [{**HELLO, **{str(number): 1 for number in range(20)}}] * 2000,
    "long text": "word " * 150_000,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api(response_store=MemoryResponseStore(60, time.monotonic)) as running:
        running.generator.max_model_len = 1 << 20
        yield running


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", MANY)
async def test_a_large_request_does_not_hold_the_loop(api: Api, kind: str):
    longest, status = await longest_turn(api, "/v1/responses", orjson.dumps({"input": MANY[kind]}))
    assert status == (400 if kind in ("too many items", "wrong items", "fields") else 200)
    assert longest < LONGEST


async def test_a_long_conversation_does_not_hold_the_loop(api: Api):
    kept = (await api.http.post("/v1/responses", json={"input": [HELLO] * 2000})).json()
    assert kept["store"] is True
    body = orjson.dumps({"input": "Hi", "previous_response_id": kept["id"]})
    longest, status = await longest_turn(api, "/v1/responses", body)
    assert status == 200
    assert longest < LONGEST
