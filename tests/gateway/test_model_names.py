"""Names of models, and aliases of them: over HTTP, by both vendors' clients, and over gRPC."""

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import grpc
import httpx2
import openai
import pytest
import pytest_asyncio

from protos import inference_pb2, inference_pb2_grpc
from tests.gateway.running_api import Api, running_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES = [{"role": "user", "content": "Hi"}]
NAMES = "qwen,org/qwen-3"
ALIASES = ["claude-*=qwen", "gpt-?[34]=org/qwen-3", "a=b=qwen"]
TAKEN = ["qwen", "org/qwen-3", "claude-haiku-4-5", "claude-", "gpt-o3", "a=b"]
ADAPTER = "org/adapter"
# What generates or embeds, by path; some answers do not name their model.
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/chat/completions/batch": {"messages": [MESSAGES, MESSAGES]},
    "/v1/completions": {"prompt": ["Hi", "Ho"], "n": 2},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {}},
    "/v1/responses": {"input": "Hi", "store": False},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/v1/embeddings": {"input": ["Hi", "Ho"]},
    "/pooling": {"input": "Hi"},
    "/rerank": {"query": "Hi", "documents": ["Ho", "Hi"]},
    "/v1/score": {"text_1": "Hi", "text_2": "Ho"},
    "/v2/chat": {"messages": MESSAGES},
    "/v2/embed": {"texts": ["Hi"], "input_type": "search_query"},
}
NAMELESS = ("/v2/chat", "/v2/embed")
REFUSED = ["Qwen", "claude", "my-claude-3", "gpt-o5", "qwen,org/qwen-3", ""]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api(names=NAMES, aliases=ALIASES) as running:
        running.generator.script.as_asked = True
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def adapted() -> AsyncIterator[Api]:
    async with running_api(names=NAMES, aliases=[*ALIASES, f"tuned-*={ADAPTER}"], adapters=[ADAPTER]) as running:
        running.generator.script.as_asked = True
        yield running


@pytest.mark.parametrize("name", TAKEN)
async def test_a_name_and_what_an_alias_stands_for_are_the_model(api: Api, name: str):
    for path, body in REQUESTS.items():
        answer = await api.http.post(path, json={"model": name, **body})
        assert (answer.status_code, answer.json().get("model", "qwen")) == (200, "qwen"), answer.text
        assert ("model" in answer.json()) == (path not in NAMELESS)
    for path in ("/v1/chat/completions/render", "/v1/messages/render", "/v1/responses/render"):
        answer = await api.http.post(path, json={"model": name, **REQUESTS[path.removesuffix("/render")]})
        assert (answer.status_code, answer.json()["model"]) == (200, "qwen")
    (prompt,) = (await api.http.post("/v1/completions/render", json={"model": name, "prompt": "Hi"})).json()
    assert prompt["model"] == "qwen"
    assert (await api.http.post("/tokenize", json={"model": name, "prompt": "Hi"})).status_code == 200


@pytest.mark.parametrize("name", REFUSED)
async def test_any_other_name_is_refused(api: Api, name: str):
    for path, body in REQUESTS.items():
        refused = await api.http.post(path, json={"model": name, **body})
        assert refused.status_code == 404
        assert "this server serves 'qwen', 'org/qwen-3'" in refused.text
    if name:
        assert (await api.http.get(f"/v1/models/{name}")).status_code == 404


async def test_models_are_listed_for_both_vendors_clients(api: Api):
    async with openai.AsyncOpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0) as client:
        listed = [model async for model in client.models.list()]
        assert [(model.id, model.object, model.owned_by) for model in listed] == [
            ("qwen", "model", "baton"),
            ("org/qwen-3", "model", "baton"),
        ]
        assert (await client.models.retrieve("claude-haiku-4-5")).id == "qwen"
    async with anthropic.AsyncAnthropic(base_url=api.base_url, api_key="none", max_retries=0) as client:
        page = await client.models.list()
        assert (page.has_more, page.first_id, page.last_id) == (False, "qwen", "org/qwen-3")
        models = [model async for model in client.models.list(limit=1)]
        assert [(model.id, model.type, model.display_name) for model in models] == [
            ("qwen", "model", "qwen"),
            ("org/qwen-3", "model", "org/qwen-3"),
        ]
        assert models[0].created_at.timestamp() == listed[0].created
        assert models[0].max_input_tokens == 256
        assert (await client.models.retrieve("gpt-o3")).id == "org/qwen-3"
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("other")


async def test_grpc_has_the_same_names(api: Api):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await api.start_grpc()}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        models = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert [model.id for model in models] == ["qwen", "org/qwen-3"]
        for name in ("", *TAKEN):
            assert (await stub.Tokenize(inference_pb2.TokenizeRequest(model=name, text="Hi"))).token_ids
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Tokenize(inference_pb2.TokenizeRequest(model="other", text="Hi"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("method", ["HEAD", "GET"])
async def test_who_looks_whether_there_is_a_server_finds_one(api: Api, method: str):
    answer: httpx2.Response = await api.http.request(method, "/")
    assert (answer.status_code, answer.text) == (200, "" if method == "HEAD" else '{"status":"ok"}')
    metrics = (await api.admin.get("/metrics")).text
    assert 'endpoint="root"' in metrics


@pytest.mark.parametrize("path", REQUESTS)
async def test_an_adapter_is_the_capsules_and_the_answers_of_those_who_ask_for_it(adapted: Api, path: str):
    for name, model, adapter in ((ADAPTER, ADAPTER, ADAPTER), ("tuned-1", ADAPTER, ADAPTER), ("a=b", "qwen", "")):
        answer = await adapted.http.post(path, json={"model": name, **REQUESTS[path]})
        assert (answer.status_code, answer.json().get("model", model)) == (200, model)
        assert {capsule.adapter for capsule in adapted.generator.requests[-1].capsules} == {adapter}
    unnamed = await adapted.http.post(path, json=REQUESTS[path])
    assert (unnamed.status_code, unnamed.json().get("model", "qwen")) == (200, "qwen")
    assert {capsule.adapter for capsule in adapted.generator.requests[-1].capsules} == {""}


async def test_an_adapter_is_listed_below_its_model(adapted: Api):
    listed = (await adapted.http.get("/v1/models")).json()["data"]
    assert [(model["id"], model["root"], model["parent"]) for model in listed] == [
        ("qwen", "qwen", None),
        ("org/qwen-3", "qwen", None),
        (ADAPTER, "qwen", "qwen"),
    ]
    assert (await adapted.http.get("/v1/models/tuned-1")).json() == listed[-1]


async def test_an_adapter_is_asked_for_over_grpc(adapted: Api):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await adapted.start_grpc()}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        inputs = [inference_pb2.EmbedInput(text="Hi")]
        for name, adapter in ((ADAPTER, ADAPTER), ("org/qwen-3", ""), ("", "")):
            assert [answer async for answer in stub.Generate(inference_pb2.GenerateRequest(model=name, text="Hi"))]
            assert (await stub.Embed(inference_pb2.EmbedRequest(model=name, inputs=inputs))).embeddings
            generated, embedded = adapted.generator.requests[-2:]
            assert {capsule.adapter for each in (generated, embedded) for capsule in each.capsules} == {adapter}
