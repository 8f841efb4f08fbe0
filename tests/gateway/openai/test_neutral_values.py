"""Clients that send defaults are served: null for every optional field, and values that ask for nothing."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.gateway.api.dialects.completions import CompletionRequest
from services.gateway.api.requests.chat import ChatRequest
from services.gateway.openai.neutral import CHAT_NEUTRAL, COMPLETIONS_NEUTRAL, RESPONSES_NEUTRAL
from services.gateway.openai.responses.request import ResponsesRequest
from tests.gateway.running_api import Api, running_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

NEUTRAL: dict[str, Any] = {
    "temperature": 1,
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "logit_bias": {},
    "stop": [],
    "stop_token_ids": [],
    "min_tokens": 0,
    "ignore_eos": False,
    "stream": False,
    "user": "someone",
    "use_beam_search": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "bad_words": [],
    "priority": 0,
    "echo": False,
    "response_format": {"type": "text"},
}
NEUTRAL_CHAT = {
    "logprobs": False,
    "top_logprobs": 0,
    "store": False,
    "service_tier": "auto",
    "metadata": {"task": "x"},
    "parallel_tool_calls": True,
    "tool_choice": "none",
    "modalities": ["text"],
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
    "include_reasoning": True,
    "verbosity": "medium",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "max_tokens": 5,
    "max_completion_tokens": 5,
}
NEUTRAL_COMPLETION = {"best_of": 1, "suffix": "", "add_special_tokens": True, "max_tokens": 5, "logprobs": 0}

NEUTRAL_RESPONSE: dict[str, Any] = {
    **{name: value for name, value in NEUTRAL.items() if name not in ("response_format", "echo")},
    "background": False,
    "include": [],
    "max_tool_calls": 5,
    "metadata": {"task": "x"},
    "parallel_tool_calls": True,
    "prompt_cache_key": "x",
    "reasoning": {"effort": None, "summary": "auto"},
    "safety_identifier": "x",
    "service_tier": "auto",
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api() as running:
        yield running


async def test_neutral_values_pass(api: Api):
    assert (await api.chat(**NEUTRAL, **NEUTRAL_CHAT)).status_code == 200
    assert (await api.complete(**NEUTRAL, **NEUTRAL_COMPLETION)).status_code == 200
    response = await api.http.post("/v1/responses", json={"input": "Hi", **NEUTRAL_RESPONSE})
    assert response.status_code == 200, response.text
    assert "x-baton-ignored-fields" not in response.headers


async def test_null_passes_for_every_optional_field(api: Api):
    chat = {*ChatRequest.model_fields, *CHAT_NEUTRAL, "kv_transfer_params"} - {"model", "messages"}
    completion = {*CompletionRequest.model_fields, *COMPLETIONS_NEUTRAL, "vllm_xargs"} - {"model", "prompt"}
    response = await api.chat(**dict.fromkeys(chat))
    assert response.status_code == 200, response.text
    response = await api.complete(**dict.fromkeys(completion))
    assert response.status_code == 200, response.text
    fields = {*ResponsesRequest.model_fields, *RESPONSES_NEUTRAL, "kv_transfer_params"} - {"input"}
    response = await api.http.post("/v1/responses", json={"input": "Hi", **dict.fromkeys(fields)})
    assert response.status_code == 200, response.text


async def test_what_vllm_bench_serve_sends(api: Api):
    """With --ignore-eos and --temperature 0, for its two OpenAI back ends."""
    common = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.0}
    completion = await api.complete(repetition_penalty=1.0, max_tokens=10, logprobs=None, **common)
    assert completion.status_code == 200
    content = [{"type": "text", "text": "Hi"}]
    messages = [{"role": "user", "content": content}]
    chat = await api.chat(messages=messages, max_completion_tokens=10, **common)
    assert chat.status_code == 200
    assert all(request.capsules[0].sampling.ignore_eos for request in api.generator.requests[-2:])


async def test_an_answer_sent_back_is_a_valid_message(api: Api):
    answer = (await api.chat()).json()["choices"][0]["message"]
    # As the official client dumps it, with every field it knows.
    echoed = {**answer, "annotations": None, "audio": None, "function_call": None, "tool_calls": None}
    messages = [{"role": "user", "content": "Hi"}, echoed, {"role": "user", "content": "Go on", "name": None}]
    assert (await api.chat(messages=messages)).status_code == 200
