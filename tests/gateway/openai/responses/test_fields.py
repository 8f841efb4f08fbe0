"""vLLM's fields in requests for responses."""

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from tests.gateway.running_api import Api, running_api
from tests.gateway.scripted_generator import Script, delta_per_token

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api() as running:
        running.generator.script = Script(delta_per_token(running.tokens("one STOP two")))
        yield running


async def respond(api: Api, **fields: Any) -> httpx2.Response:
    return await api.http.post("/v1/responses", json={"input": "Hi", **fields})


async def test_salt_session_and_priority_go_with_the_request(api: Api):
    await respond(api, cache_salt="a", session_id="s", priority=-5)
    request = api.generator.requests[-1]
    assert request.session_id == "s"
    assert [(capsule.cache_salt, capsule.priority) for capsule in request.capsules] == [("a", -5)]


async def test_a_request_may_name_itself(api: Api):
    response = await respond(api, request_id="mine")
    assert response.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_string_is_shown_where_asked_for(api: Api, stream: bool):
    response = await respond(api, stop="STOP", include_stop_str_in_output=True, stream_interval=3, stream=stream)
    assert response.status_code == 200, response.text
    assert '"one STOP"' in response.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}, "stream_options"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
async def test_what_a_response_has_no_place_for_is_refused(api: Api, fields: dict[str, Any], param: str):
    response = await respond(api, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
