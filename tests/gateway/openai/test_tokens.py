"""Tokens of texts and chats, and texts of tokens; the small pages that vLLM's tools ask for."""

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from tests.gateway.running_api import Api, running_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES = [{"role": "user", "content": "größer 日本"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api() as running:
        yield running


async def post(api: Api, path: str, **fields: Any) -> httpx2.Response:
    return await api.http.post(path, json=fields)


async def test_the_tokens_of_a_chat_are_those_of_its_prompt(api: Api):
    api.generator.requests.clear()
    await api.chat(messages=MESSAGES)
    prompt = api.generator.requests[0].capsules[0].token_ids.tolist()
    body = (await post(api, "/tokenize", messages=MESSAGES, return_token_strs=True)).json()
    assert body["tokens"] == prompt
    assert body["count"] == len(prompt) == len(body["token_strs"])
    assert body["max_model_len"] == 256
    text = (await post(api, "/detokenize", tokens=prompt)).json()["prompt"]
    assert "größer 日本" in text
    assert "<|im_start|>user" in text
    assert len(api.generator.requests) == 1


async def test_the_tokens_of_a_text_with_and_without_special_ones(api: Api):
    plain = (await post(api, "/tokenize", model="m", prompt="Hello", add_special_tokens=False)).json()
    assert plain["tokens"] == api.tokens("Hello")
    assert plain["token_strs"] is None
    with_bos = (await post(api, "/tokenize", prompt="Hello")).json()["tokens"]
    assert with_bos[1:] == plain["tokens"]
    long = (await post(api, "/tokenize", prompt="a " * 100)).json()
    assert long["count"] > 100


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {"prompt": [1, 2]}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "return_token_strs": 5}, "return_token_strs"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{}]}, "tools[0].type"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": [5, 10**6]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_what_is_wrong_is_named(api: Api, path: str, fields: dict[str, Any], param: str):
    response = await post(api, path, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_another_model_and_no_json(api: Api):
    for path, fields in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
        assert (await post(api, path, model="other", **fields)).status_code == 404
        broken = await api.http.post(path, content=b"{", headers={"content-type": "application/json"})
        assert broken.status_code == 400
        assert (await post(api, path, nobody=1, **fields)).headers["x-baton-ignored-fields"] == "nobody"


async def test_small_pages(api: Api):
    assert (await api.http.get("/version")).json()["version"]
    assert (await api.http.get("/load")).json() == {"server_load": 0}
    assert (await api.http.get("/ping")).status_code == 200
