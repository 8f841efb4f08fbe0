"""Several names of one model, and aliases of them: over HTTP, by both vendors' clients, and over gRPC."""

from collections.abc import AsyncIterator

import anthropic
import grpc
import httpx2
import openai
import pytest
import pytest_asyncio

from protos import inference_pb2, inference_pb2_grpc
from services.gateway.api.served_model import ModelNames
from tests.gateway.running_api import Api, running_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES = [{"role": "user", "content": "Hi"}]
NAMES = ModelNames.of("qwen,org/qwen-3", ["claude-*=qwen", "gpt-?[34]=org/qwen-3", "a=b=qwen"])
TAKEN = ["qwen", "org/qwen-3", "claude-haiku-4-5", "claude-", "gpt-o3", "a=b"]
REFUSED = ["Qwen", "claude", "my-claude-3", "gpt-o5", "qwen,org/qwen-3", ""]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api(names=NAMES) as running:
        yield running


@pytest.mark.parametrize("name", TAKEN)
async def test_a_name_and_what_an_alias_stands_for_are_the_model(api: Api, name: str):
    chat = {"model": name, "messages": MESSAGES, "max_tokens": 9}
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/chat/completions/render"):
        answer = await api.http.post(path, json=chat)
        assert (answer.status_code, answer.json()["model"]) == (200, "qwen")
    response = await api.http.post("/v1/responses", json={"model": name, "input": "Hi", "store": False})
    assert (response.status_code, response.json()["model"]) == (200, "qwen")
    assert (await api.http.post("/tokenize", json={"model": name, "prompt": "Hi"})).status_code == 200


@pytest.mark.parametrize("name", REFUSED)
async def test_any_other_name_is_refused(api: Api, name: str):
    for path in ("/v1/chat/completions", "/v1/messages"):
        refused = await api.http.post(path, json={"model": name, "messages": MESSAGES, "max_tokens": 9})
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
