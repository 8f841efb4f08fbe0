"""Token ids in, token ids out: vLLM's /inference/v1/generate."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.protocol.outcomes import FinishReason
from tests.gateway.running_api import Api, events, running_api
from tests.gateway.scripted_generator import Script, delta_per_token, one_delta

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api() as running:
        yield running


async def generate(api: Api, token_ids: Any = (7, 8, 9), sampling_params: Any = None, **fields: Any) -> Any:
    ids = list(token_ids) if isinstance(token_ids, tuple) else token_ids
    body = {"token_ids": ids, "sampling_params": sampling_params or {}, **fields}
    return await api.http.post("/inference/v1/generate", json=body)


async def test_token_ids_come_whole_and_streamed(api: Api):
    tokens = [*api.tokens("größer 🙂"), 1]
    api.generator.script = Script(delta_per_token(tokens, FinishReason.STOP, cached_tokens=2))
    body = (await generate(api, sampling_params={"n": 2})).json()
    assert [choice["token_ids"] for choice in body["choices"]] == [tokens, tokens]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
    assert body["usage"]["prompt_tokens"] == 3
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await generate(api, stream=True, stream_options=options, request_id="mine")
    *chunks, last, done = events(response)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[token] for token in tokens]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [*range(1, len(tokens) + 1)]
    assert (last["choices"], last["request_id"]) == ([], "mine")
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert api.generator.requests[-1].capsules[0].token_ids.tolist() == [7, 8, 9]
    assert api.generator.requests[-1].capsules[0].sampling.max_tokens == 256 - 3


async def test_what_render_shows_can_be_sent_and_is_the_same_request(api: Api):
    api.generator.script = Script(one_delta(api.tokens("Hello")))
    asked = {
        "temperature": 0.5,
        "seed": 3,
        "stop": ["x"],
        "logit_bias": {"5": 2},
        "max_tokens": 5,
        "logprobs": 1,
        "structured_outputs": {"choice": ["a", "b"]},
        "cache_salt": "s",
        "priority": 4,
    }
    assert (await api.complete(**asked)).status_code == 200
    rendered = await api.http.post("/v1/completions/render", json={"model": "m", "prompt": "Hi", **asked})
    (shown,) = rendered.json()
    answer = await generate(api, **shown, cache_salt="s", priority=4)
    assert answer.status_code == 200, answer.text
    assert "x-baton-ignored-fields" not in answer.headers
    mine, theirs = (request.capsules[0] for request in api.generator.requests[-2:])
    assert mine.token_ids.tolist() == theirs.token_ids.tolist()
    assert (mine.sampling, mine.cache_salt, mine.priority) == (theirs.sampling, theirs.cache_salt, theirs.priority)


async def test_logprobs_are_those_of_chats(api: Api):
    api.generator.script = Script(one_delta(api.tokens("Hello")), as_asked=True)
    body = (await generate(api, sampling_params={"logprobs": 2, "prompt_logprobs": 1})).json()
    entries = body["choices"][0]["logprobs"]["content"]
    assert len(entries) == len(body["choices"][0]["token_ids"])
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert len(body["prompt_logprobs"]) == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": "Hi"}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [[1], [2]]}, "token_ids"),
        ({"token_ids": [1, "x"]}, "token_ids"),
        ({"token_ids": [100_000]}, "token_ids"),
        ({"token_ids": [5] * 5000}, "token_ids"),
        ({"sampling_params": 5}, "sampling_params"),
        ({"sampling_params": {"temperature": 3}}, "sampling_params.temperature"),
        ({"sampling_params": {"logprobs": 21}}, "sampling_params.logprobs"),
        ({"sampling_params": {"structured_outputs": {"regex": "a(b"}}}, "sampling_params.structured_outputs"),
        ({"sampling_params": {"min_tokens": 9, "max_tokens": 8}}, "sampling_params.min_tokens"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True}, "sampling_params.prompt_logprobs"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"model": "other"}, "model"),
        ({"stream_options": {}}, "stream_options"),
    ],
)
async def test_bad_fields_are_named_as_they_are_called_here(api: Api, fields: dict[str, Any], param: str):
    answer = await generate(api, **fields)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"].startswith(param)
    assert "prompt'" not in answer.json()["error"]["message"]


async def test_what_is_missing_or_unknown_is_named(api: Api):
    for missing in ("token_ids", "sampling_params"):
        whole: dict[str, Any] = {"token_ids": [1], "sampling_params": {}}
        body = {name: value for name, value in whole.items() if name != missing}
        answer = await api.http.post("/inference/v1/generate", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, missing)
    api.generator.script = Script(one_delta(api.tokens("Hello")))
    answer = await generate(api, sampling_params={"output_kind": 2}, temperature=1)
    assert answer.headers["x-baton-ignored-fields"] == "temperature, sampling_params.output_kind"
