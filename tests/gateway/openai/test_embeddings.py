"""POST /v1/embeddings: what clients send, what workers are asked, and what clients get."""

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import pytest_asyncio

from services.config import Pooling
from services.gateway.api.dialects.embedding_inputs import MAX_INPUTS, EmbeddingRequest
from services.gateway.api.generation import Delta, Expired, Overloaded, Unsupported
from services.gateway.openai.embeddings import vector_bytes
from services.gateway.openai.neutral import EMBEDDINGS_NEUTRAL
from services.protocol.outcomes import FinishReason
from services.protocol.sampling import SamplingParams
from tests.gateway.running_api import MODEL, Api, running_api
from tests.gateway.scripted_generator import Script

VECTOR = [3.0, 4.0, 0.1, -12.0]  # as pooled


def deltas(*vectors: list[float], cached: int = 0) -> Script:
    """Embeddings of so many inputs, the last one first."""
    made = [
        Delta([], None, FinishReason.LENGTH, cached, choice, embedding=np.array(vector, np.float32))
        for choice, vector in enumerate(vectors)
    ]
    return Script(made[::-1], for_all=False)


def unit(vector: list[float]) -> list[float]:
    return [float(value) for value in np.array(vector) / np.linalg.norm(vector)]


@pytest_asyncio.fixture
async def api() -> AsyncIterator[Api]:
    async with running_api() as running:
        running.generator.script = deltas(VECTOR)
        yield running


async def embed(api: Api, input: Any = "Hi", **fields: Any) -> httpx2.Response:
    return await api.http.post("/v1/embeddings", json={"input": input, **fields})


async def test_the_official_client_gets_a_vector_for_each_input_in_order(api: Api):
    """It asks for base64 unless told otherwise, and both forms are the same numbers."""
    vectors = [VECTOR, [1.0, 0.0, 0.0, 0.0], [0.0, 0.3, 0.0, -0.4]]
    async with openai.AsyncOpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0) as client:
        api.generator.script = deltas(*vectors)
        packed = await client.embeddings.create(model=MODEL, input=["a", "bc", "a"])
        api.generator.script = deltas(*vectors)
        plain = await client.embeddings.create(model=MODEL, input=["a", "bc", "a"], encoding_format="float")
    assert [item.index for item in packed.data] == [0, 1, 2]
    for one, other in zip(plain.data, packed.data, strict=True):
        assert np.array(one.embedding, np.float32).tolist() == other.embedding
    for item, vector in zip(packed.data, vectors, strict=True):
        assert item.embedding == pytest.approx(unit(vector), abs=1e-6)
    assert (packed.model, packed.object, packed.data[0].object) == (MODEL, "list", "embedding")
    prompts = [capsule.token_ids.tolist() for capsule in api.generator.requests[0].capsules]
    assert prompts == [[bos(api), *api.tokens("a")], [bos(api), *api.tokens("bc")], [bos(api), *api.tokens("a")]]
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == sum(map(len, prompts))


def bos(api: Api) -> int:
    token: int = api.tokenizer.encode("", add_special_tokens=True).tolist()[0]
    return token


async def test_base64_is_little_endian_float32(api: Api):
    (item,) = (await embed(api, encoding_format="base64", normalize=False)).json()["data"]
    assert np.frombuffer(base64.b64decode(item["embedding"]), "<f4").tolist() == np.array(VECTOR, np.float32).tolist()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, unit(VECTOR)),
        ({"normalize": False}, VECTOR),
        ({"dimensions": 2}, [0.6, 0.8]),
        ({"dimensions": 2, "normalize": False}, [3.0, 4.0]),
        ({"dimensions": 4.0}, unit(VECTOR)),
    ],
)
async def test_vectors_are_shortened_then_normalized(api: Api, fields: dict[str, Any], expected: list[float]):
    (item,) = (await embed(api, **fields)).json()["data"]
    assert item["embedding"] == pytest.approx(expected, abs=1e-6)


async def test_a_vector_of_zeros_stays_one(api: Api):
    api.generator.script = deltas([0.0] * 4)
    assert (await embed(api)).json()["data"][0]["embedding"] == [0.0] * 4


@pytest.mark.parametrize(
    ("input", "number"),
    [("Hi", 1), (["Hi", "there"], 2), ([5, 6, 7], 1), ([[5, 6, 7], [8]], 2), (["Hi", [5]], 2), (["Hi"] * 100, 100)],
)
async def test_every_form_of_input_is_taken(api: Api, input: Any, number: int):
    api.generator.script = deltas(*[VECTOR] * number)
    response = await embed(api, input)
    assert len(response.json()["data"]) == number
    capsules = api.generator.requests[0].capsules
    assert [capsule.sampling for capsule in capsules] == [SamplingParams(max_tokens=0)] * number
    if isinstance(input, list) and isinstance(input[-1], list):
        assert capsules[-1].token_ids.tolist() == input[-1]


async def test_the_request_or_the_option_says_how_to_pool(api: Api):
    await embed(api)
    for pooling in Pooling:
        api.generator.script = deltas(VECTOR)
        await embed(api, pooling=pooling.value)
    asked = [request.capsules[0].pooling for request in api.generator.requests]
    assert asked == [Pooling.LAST, *Pooling]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 3}, [9, 8, 7]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [6, 5, 4]),
        ({"truncate_prompt_tokens": 256}, [9, 8, 7, 6, 5, 4]),
        ({"truncate_prompt_tokens": -1}, [9, 8, 7, 6, 5]),
    ],
)
async def test_token_ids_are_truncated(api: Api, fields: dict[str, Any], expected: list[int]):
    api.generator.max_model_len = 5 if -1 in fields.values() else 256
    assert (await embed(api, [9, 8, 7, 6, 5, 4], **fields)).status_code == 200
    assert api.generator.requests[0].capsules[0].token_ids.tolist() == expected


@pytest.mark.parametrize("side", ["right", "left"])
async def test_special_tokens_stay_where_a_text_is_truncated(api: Api, side: str):
    text = "Some text of more than a few tokens"
    await embed(api, text, truncate_prompt_tokens=4, truncation_side=side)
    kept = api.tokens(text)[:3] if side == "right" else api.tokens(text)[-3:]
    assert api.generator.requests[0].capsules[0].token_ids.tolist() == [bos(api), *kept]
    api.generator.script = deltas(VECTOR)
    await embed(api, text, truncate_prompt_tokens=4, truncation_side=side, add_special_tokens=False)
    kept = api.tokens(text)[:4] if side == "right" else api.tokens(text)[-4:]
    assert api.generator.requests[1].capsules[0].token_ids.tolist() == kept


async def test_a_prompt_may_fill_the_context(api: Api):
    api.generator.max_model_len = 8
    assert (await embed(api, [5] * 8)).status_code == 200
    assert (await embed(api, [5] * 9)).json()["error"]["code"] == "context_length_exceeded"


BAD: list[tuple[dict[str, Any], str, str | None]] = [
    ({}, "input", "missing_required_parameter"),
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": ""}, "input", "empty_string"),
    ({"input": []}, "input", "empty_array"),
    ({"input": [[]]}, "input", "empty_array"),
    ({"input": ["a", ""]}, "input", "empty_string"),
    ({"input": 5}, "input", None),
    ({"input": {"text": "a"}}, "input", None),
    ({"input": [-1]}, "input", "invalid_value"),
    ({"input": [10**6]}, "input", "invalid_value"),
    ({"input": [2**40]}, "input", "invalid_value"),
    ({"input": [1.5]}, "input", "invalid_type"),
    ({"input": [True]}, "input", "invalid_type"),
    ({"input": ["a", 5]}, "input", "invalid_type"),
    ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", "array_above_max_length"),
    ({"input": "a" * 100_000}, "input", "context_length_exceeded"),
    ({"input": "a", "dimensions": 0}, "dimensions", "integer_below_min_value"),
    ({"input": "a", "dimensions": 5}, "dimensions", "integer_above_max_value"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format", "invalid_value"),
    ({"input": "a", "pooling": "max"}, "pooling", "invalid_value"),
    ({"input": "a", "normalize": "yes"}, "normalize", "invalid_type"),
    ({"input": "a", "truncate_prompt_tokens": 100_000}, "truncate_prompt_tokens", "integer_above_max_value"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "invalid_value"),
    ({"input": "a", "truncation_side": "left"}, "truncation_side", None),
    ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages", "unsupported_parameter"),
    ({"input": "a", "embed_dtype": "fp8_e4m3"}, "embed_dtype", "invalid_value"),
    ({"input": "a", "endianness": "middle"}, "endianness", "invalid_value"),
    ({"input": "a", "user": 5}, "user", "invalid_type"),
    ({"input": "a", "cache_salt": ""}, "cache_salt", None),
    ({"input": "a", "cache_salt": "a b"}, "cache_salt", None),
    ({"input": "a", "priority": 2**31}, "priority", "integer_above_max_value"),
    ({"input": "a", "priority": "high"}, "priority", "invalid_type"),
    ({"input": "a", "request_id": "x" * 129}, "request_id", None),
]


@pytest.mark.parametrize(("body", "param", "code"), BAD, ids=lambda value: str(value)[:60])
async def test_bad_input_names_its_field_and_reaches_no_worker(
    api: Api, body: dict[str, Any], param: str, code: str | None
):
    response = await api.http.post("/v1/embeddings", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert code is None or error["code"] == code
    assert api.generator.requests == []


async def test_another_model_is_not_served(api: Api):
    response = await embed(api, model="other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_values_that_ask_for_nothing_pass(api: Api):
    fields = {name: values[0] for name, values in EMBEDDINGS_NEUTRAL.items() if values}
    assert (await embed(api, **fields, user="someone")).status_code == 200
    api.generator.script = deltas(VECTOR)
    nothing = dict.fromkeys({*EmbeddingRequest.model_fields, *EMBEDDINGS_NEUTRAL} - {"input"})
    assert (await embed(api, **nothing)).status_code == 200


async def test_unknown_fields_are_ignored_and_named(api: Api):
    assert (await embed(api, colour="red")).headers["x-baton-ignored-fields"] == "colour"


async def test_salt_and_priority_reach_every_capsule(api: Api):
    api.generator.script = deltas(VECTOR, VECTOR)
    await embed(api, [[5, 6], [7]], cache_salt="tenant-1", priority=-5)
    capsules = api.generator.requests[0].capsules
    assert [(capsule.cache_salt, capsule.priority) for capsule in capsules] == [("tenant-1", -5)] * 2
    api.generator.script = deltas(VECTOR)
    await embed(api)
    assert [(capsule.cache_salt, capsule.priority) for capsule in api.generator.requests[1].capsules] == [("", 0)]


async def test_a_request_may_name_itself_and_its_header_comes_first(api: Api):
    assert (await embed(api, request_id="mine")).headers["x-request-id"] == "mine"
    api.generator.script = deltas(VECTOR)
    body = {"input": "a", "request_id": "mine"}
    response = await api.http.post("/v1/embeddings", json=body, headers={"x-request-id": "theirs"})
    assert response.headers["x-request-id"] == "theirs"
    assert [request.request_id for request in api.generator.requests] == ["mine", "theirs"]


async def test_a_fleet_that_embeds_nothing_says_so(api: Api):
    api.generator.embedding_size = 0
    response = await embed(api)
    assert response.status_code == 503
    assert "prefill workers" in response.json()["error"]["message"]
    assert response.headers["retry-after"]


async def test_a_fleet_that_will_not_embed_either_says_so_for_good(api: Api):
    api.generator.embedding_size, api.generator.why_no_embeddings = 0, Unsupported("none does", asked="embeddings")
    response = await embed(api)
    assert response.status_code == 501
    assert response.json()["error"]["message"] == "The workers of this server do not support embeddings."
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(("error", "status"), [(Expired("late"), 504), (Overloaded("busy"), 429)])
async def test_errors_of_the_dispatch_side_are_translated(api: Api, error: Any, status: int):
    api.generator.error = error
    assert (await embed(api)).status_code == status


@pytest.mark.parametrize("values", [None, [float("nan")] * 4])
async def test_what_is_no_vector_is_an_error_and_no_answer(api: Api, values: list[float] | None):
    embedding = None if values is None else np.array(values, np.float32)
    api.generator.script = Script([Delta([], None, FinishReason.LENGTH, 0, embedding=embedding)], for_all=False)
    assert (await embed(api)).status_code == 500


async def test_a_request_is_recorded_and_counted(api: Api):
    api.generator.script = deltas(VECTOR, VECTOR, cached=2)
    assert (await embed(api, [[5, 6, 7], [5, 6]])).headers["server-timing"]
    (recent,) = (await api.admin.get("/debug/requests")).json()["requests"]
    assert (recent["endpoint"], recent["status"], recent["in_flight"]) == ("embeddings", 200, False)
    assert (recent["prompt_tokens"], recent["cached_tokens"], recent["generated_tokens"]) == (5, 4, None)
    metrics = (await api.admin.get("/metrics")).text
    assert 'baton_requests_total{endpoint="embeddings",status="200"} 1.0' in metrics
    assert "baton_prompt_tokens_total 5.0" in metrics
    assert "baton_cached_tokens_total 4.0" in metrics
    assert "baton_ttft_seconds_count 0.0" in metrics, "it has no tokens"


@pytest.mark.parametrize("endianness", [None, "native", "little", "big"])
@pytest.mark.parametrize("dtype", [None, "float32", "float16", "bfloat16"])
async def test_bytes_are_of_the_type_and_order_that_were_asked_for(api: Api, dtype: str | None, endianness: str | None):
    fields = {"encoding_format": "base64", "embed_dtype": dtype, "endianness": endianness}
    api.generator.script = deltas([0.5] * 4)
    (entry,) = (await embed(api, "Hi", **fields)).json()["data"]
    order, raw = ">" if endianness == "big" else "<", base64.b64decode(entry["embedding"])
    if dtype == "bfloat16":
        numbers = (np.frombuffer(raw, f"{order}u2").astype(np.uint32) << 16).view(np.float32)
    else:
        numbers = np.frombuffer(raw, f"{order}f{2 if dtype == 'float16' else 4}").astype(np.float32)
    assert np.allclose(numbers, [0.5] * 4)


def test_bfloat16_is_rounded_to_the_nearest():
    numbers = np.array([1.0, -2.5, 1.00390625, 1.01171875, 0.1], np.float32)
    bits = np.frombuffer(vector_bytes(numbers, "bfloat16", big_endian=False), "<u2")
    assert (bits.astype(np.uint32) << 16).view(np.float32).tolist() == [
        1.0,
        -2.5,
        1.0,
        1.015625,
        0.10009765625,
    ]


async def test_pooling_is_the_same_in_vllm_s_form(api: Api):
    """Form and names as vLLM's PoolingResponse has them."""
    api.generator.script = deltas(VECTOR, [0.0, 0.3, 0.0, -0.4])
    fields = {"model": MODEL, "input": ["a", [5, 6]], "task": "embed", "pooling": "mean", "request_id": "mine"}
    pooled = (await api.http.post("/pooling", json=fields)).json()
    api.generator.script = deltas(VECTOR, [0.0, 0.3, 0.0, -0.4])
    embedded = (await embed(api, **{name: fields[name] for name in ("input", "pooling")})).json()
    assert [(each["index"], each["object"]) for each in pooled["data"]] == [(0, "pooling"), (1, "pooling")]
    assert [each["data"] for each in pooled["data"]] == [each["embedding"] for each in embedded["data"]]
    assert (pooled["id"], pooled["object"], pooled["model"]) == ("pool-mine", "list", MODEL)
    assert pooled["usage"] == embedded["usage"]
    first, second = ([each.token_ids.tolist() for each in request.capsules] for request in api.generator.requests[-2:])
    assert first == second
    api.generator.script = deltas(VECTOR)
    packed = (await api.http.post("/pooling", json={"input": "a", "encoding_format": "base64"})).json()["data"]
    assert np.frombuffer(base64.b64decode(packed[0]["data"]), "<f4").tolist() == pytest.approx(unit(VECTOR))


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"task": "token_embed"}, "task"), ({"messages": []}, "messages"), ({"softmax": True}, "softmax")],
)
async def test_pooling_refuses_by_name_what_is_no_embedding(api: Api, fields: dict[str, Any], param: str):
    answer = await api.http.post("/pooling", json={"input": "a", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_bytes_come_plain_and_a_header_says_which_are_whose(api: Api, path: str):
    """Names and forms as vLLM has them in `metadata`."""
    api.generator.script = deltas(VECTOR, [0.0, 0.5, 0.0, -0.5])
    fields = {"input": ["a", "bc"], "normalize": False, "embed_dtype": "float16", "endianness": "big"}
    answer = await api.http.post(path, json={**fields, "encoding_format": "bytes", "request_id": "mine"})
    assert answer.headers["content-type"] == "application/octet-stream"
    metadata = json.loads(answer.headers["metadata"])
    assert [metadata["id"], metadata["model"]] == ["mine", MODEL]
    assert metadata["usage"]["prompt_tokens"] == metadata["usage"]["total_tokens"] > 0
    vectors = []
    for number, entry in enumerate(metadata["data"]):
        assert (entry["index"], entry["embed_dtype"], entry["endianness"]) == (number, "float16", "big")
        part = answer.content[entry["start"] : entry["end"]]
        vectors.append(np.frombuffer(part, ">f2").reshape(entry["shape"]).tolist())
    assert vectors == np.array([VECTOR, [0.0, 0.5, 0.0, -0.5]], np.float16).tolist()
    api.generator.script = deltas(VECTOR, [0.0, 0.5, 0.0, -0.5])
    only = await api.http.post(path, json={**fields, "encoding_format": "bytes_only"})
    assert only.content == answer.content
    assert "metadata" not in only.headers


async def test_as_many_inputs_have_bytes_as_a_header_can_list(api: Api):
    api.generator.script = deltas(*[VECTOR] * 256)
    assert len((await embed(api, ["a"] * 256, encoding_format="bytes")).content) == 256 * 16
    refused = await embed(api, ["a"] * 257, encoding_format="bytes")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "encoding_format")
    api.generator.script = deltas(*[VECTOR] * 257)
    assert len((await embed(api, ["a"] * 257, encoding_format="bytes_only")).content) == 257 * 16
    api.generator.script = deltas(VECTOR)
    assert len((await embed(api, [5] * 257, encoding_format="bytes", truncate_prompt_tokens=9)).content) == 16


async def test_a_model_that_makes_embeddings_alone_generates_nothing():
    async with running_api(generates=False) as api:
        chat, text = {"messages": [{"role": "user", "content": "Hi"}]}, {"prompt": "Hi"}
        responses: dict[str, Any] = {"input": "Hi", "store": False}
        bodies: dict[str, dict[str, Any]] = {
            "chat/completions": chat,
            "completions": text,
            "responses": responses,
            "messages": {**chat, "max_tokens": 5},
        }
        for path, body in bodies.items():
            answer = await api.http.post(f"/v1/{path}", json={"model": MODEL, **body})
            assert answer.status_code == 400, path
            assert "This model makes embeddings and generates nothing" in answer.json()["error"]["message"]
        assert api.generator.requests == []
        api.generator.script = deltas(VECTOR)
        assert (await embed(api)).status_code == 200


async def test_the_model_says_whether_vectors_have_the_length_1_where_the_request_does_not():
    async with running_api(normalizes=False) as api:
        for fields, expected in (({}, VECTOR), ({"normalize": True}, unit(VECTOR)), ({"normalize": False}, VECTOR)):
            api.generator.script = deltas(VECTOR)
            (item,) = (await embed(api, **fields)).json()["data"]
            assert item["embedding"] == pytest.approx(expected, abs=1e-6)
        api.generator.script = deltas(VECTOR, [6.0, 8.0, 0.2, -24.0])
        scored = (await api.http.post("/v1/score", json={"text_1": "a", "text_2": "b"})).json()["data"]
        assert scored[0]["score"] == pytest.approx(1.0, abs=1e-6)
