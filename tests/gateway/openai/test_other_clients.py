"""Habits of other clients: fields that nobody knows, numbers with a point, zipped bodies, scripts of web pages."""

import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.gateway.running_api import MAX_BODY_BYTES, Api, running_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = "https://chat.example.com"
IGNORED = "x-baton-ignored-fields"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api(allowed_origins=(PAGE,)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict() -> AsyncIterator[Api]:
    async with running_api(strict_fields=True) as running:
        yield running


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"nobody": 1}, "nobody"),
    ({"nobody": None, "temperature": 0}, "nobody"),
    (
        {"messages": [{"role": "user", "content": "Hi", "provider_specific_fields": {}}]},
        "messages[0].provider_specific_fields",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}]}]},
        "messages[0].content[0].cache_control",
    ),
]


@pytest.mark.parametrize(("fields", "path"), UNKNOWN, ids=[path for _, path in UNKNOWN])
async def test_fields_that_nobody_knows_are_named_and_do_nothing(
    api: Api, strict: Api, fields: dict[str, Any], path: str
):
    for stream in (False, True):
        response = await api.chat(**fields, stream=stream)
        assert response.status_code == 200
        assert response.headers[IGNORED] == path
    refused = await strict.chat(**fields)
    assert refused.status_code == 400
    assert (refused.json()["error"]["param"], refused.json()["error"]["code"]) == (path, "unknown_parameter")


async def test_ignored_fields_are_counted_and_odd_names_are_not_shown(api: Api):
    async def counted() -> float:
        lines = (await api.admin.get("/metrics")).text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("baton_ignored_fields_total "))

    before = await counted()
    response = await api.chat(**{"x" * 100_000: 1, "a\r\nset-cookie: b": 1, "fine": 1})
    assert response.headers[IGNORED] == "fine, ..."
    await api.http.post("/tokenize", json={"prompt": "Hi", "nobody": 1})  # it generates nothing
    assert await counted() == before + 4
    assert IGNORED not in (await api.chat()).headers


async def test_hostile_names_are_cut_where_they_are_refused(strict: Api):
    response = await strict.complete(**{"x" * 100_000: 1})
    assert len(response.content) < 1000
    assert response.status_code == 400


async def test_fields_of_our_own_protocols_are_refused_without_being_strict(api: Api):
    response = await api.chat(kv_transfer_params={"remote_host": "x"})
    assert response.json()["error"]["code"] == "unknown_parameter"


async def test_a_request_without_a_model_is_for_the_one_that_is_served(api: Api):
    for fields in ({}, {"model": None}):
        response = await api.http.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})
        assert response.json()["model"] == "m"


async def test_whole_numbers_may_have_a_point(api: Api):
    api.generator.requests.clear()
    assert (await api.chat(max_tokens=5.0, n=2.0, seed=7.0, top_k=3.0, min_tokens=0.0)).status_code == 200
    (asked,) = api.generator.requests
    sampling = asked.capsules[0].sampling
    assert (len(asked.capsules), sampling.max_tokens, sampling.seed, sampling.top_k) == (2, 5, 7, 3)
    assert (await api.chat(max_tokens=5.5)).status_code == 400


async def test_up_to_64_stop_strings(api: Api):
    assert (await api.chat(stop=[f"stop {number}" for number in range(64)])).status_code == 200


async def test_the_template_decides_which_roles_there_are(api: Api):
    assert (await api.chat(messages=[*MESSAGES, {"role": "critic", "content": "Hm."}])).status_code == 200
    async with running_api(template="{{ raise_exception('no ' + messages[0].role) }}") as picky:
        response = await picky.chat(messages=[{"role": "critic", "content": "Hm."}])
        assert response.status_code == 400
        assert "no critic" in response.json()["error"]["message"]


async def test_stream_options_belong_to_streams(api: Api):
    """As OpenAI and vLLM have it, whatever they ask for; null is none."""
    assert (await api.chat(stream_options=None)).status_code == 200
    for options in ({}, {"include_usage": False}, {"include_usage": True}):
        assert (await api.chat(stream_options=options)).status_code == 400
        assert (await api.chat(stream_options=options, stream=True)).status_code == 200


async def test_a_token_id_out_of_the_vocabulary_is_named(api: Api):
    response = await api.complete(prompt=[5, 123_456, 6])
    assert "token id 123456 is out of the vocabulary" in response.json()["error"]["message"]


def zipped(fields: dict[str, Any], encoding: str = "gzip") -> dict[str, Any]:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return {"content": gzip.compress(json.dumps(fields).encode()), "headers": headers}


async def test_a_zipped_body_is_read_within_the_limit_of_bodies(api: Api):
    asked = {"model": "m", "messages": MESSAGES}
    post = api.http.post
    assert (await post("/v1/chat/completions", **zipped(asked))).status_code == 200
    bomb = zipped({**asked, "user": "x" * (MAX_BODY_BYTES + 1)})
    assert len(bomb["content"]) < MAX_BODY_BYTES / 100
    assert (await post("/v1/chat/completions", **bomb)).status_code == 413
    assert (await post("/v1/chat/completions", **zipped(asked, "br"))).status_code == 415
    for broken in (zipped(asked)["content"][:-5], b"no gzip"):
        response = await post("/v1/chat/completions", content=broken, headers=zipped(asked)["headers"])
        assert response.status_code == 400
        assert "Content-Encoding" in response.json()["error"]["message"]


async def test_scripts_of_allowed_pages_may_use_the_api(api: Api, strict: Api):
    asked = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    allowed = await api.http.options("/v1/chat/completions", headers=asked)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, PAGE)
    elsewhere = await api.http.options("/v1/chat/completions", headers={**asked, "origin": "https://elsewhere"})
    assert "access-control-allow-origin" not in elsewhere.headers
    for stream in (False, True):
        body = {"model": "m", "messages": MESSAGES, "stream": stream}
        answer = await api.http.post("/v1/chat/completions", json=body, headers={"origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    without = await strict.http.post("/v1/chat/completions", json={"messages": MESSAGES}, headers={"origin": PAGE})
    assert "access-control-allow-origin" not in without.headers
