"""Bad input to the OpenAI API: each gets its status and one envelope that names the field; nothing reaches a worker."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from services.gateway.http import exchange, http_protocol
from tests.gateway.running_api import MAX_BODY_BYTES, Api, running_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

JSON = {"content-type": "application/json"}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api() as running:
        running.generator.max_model_len = 64
        yield running
        assert running.generator.requests == []  # not one of them got any further


def assert_refused(
    response: httpx2.Response, param: str | None, code: str | None = None, status: int = 400, says: str = ""
) -> None:
    """The envelope, whole, and nothing of our insides in it."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    assert says in error["message"]
    assert error["message"].strip()
    for inside in ("Traceback", "pydantic", "orjson", "services", "Error", ".py", "Input should"):
        assert inside not in error["message"]
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model": "m",}',
        b"null",
        b"[]",
        b"5",
        b'"x"',
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b"\xef\xbb\xbf{}",
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_body_that_is_no_json_object(api: Api, path: str, body: bytes):
    assert_refused(await api.http.post(path, content=body, headers=JSON), None)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"model":"m","prompt":"x","seed":' + b"9" * 5000 + b"}",
    ],
)
async def test_json_made_to_be_slow_is_refused(api: Api, body: bytes):
    """`test_loop_pauses.py` looks at the time that bodies take."""
    assert_refused(await api.http.post("/v1/completions", content=body, headers=JSON), None)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_wrong_content_type(api: Api, content_type: str):
    headers = {"content-type": content_type}
    response = await api.http.post("/v1/completions", content=b'{"model":"m","prompt":"x"}', headers=headers)
    assert_refused(response, None, status=415, says="application/json")


async def test_unknown_path_and_method(api: Api):
    assert_refused(await api.http.get("/v1/nothing"), None, status=404)
    assert_refused(await api.http.post("/v1/chat/completions/", json={}), None, status=404)
    wrong_method = await api.http.get("/v1/completions")
    assert_refused(wrong_method, None, status=405, says="POST")
    assert wrong_method.headers["allow"] == "POST"


async def test_body_over_the_limit(api: Api):
    big = json.dumps({"model": "m", "prompt": "x" * MAX_BODY_BYTES}).encode()
    announced = await api.http.post("/v1/completions", content=big, headers=JSON)
    assert_refused(announced, None, status=413, says=str(MAX_BODY_BYTES))

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(big), 65_536):
            yield big[start : start + 65_536]

    assert_refused(await api.http.post("/v1/completions", content=chunks(), headers=JSON), None, status=413)


async def raw_answer(api: Api, *parts: bytes) -> bytes:
    """Returns the answer to these bytes, up to where the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    answer = b""
    with contextlib.suppress(ConnectionError):  # closed while we still write
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        async with asyncio.timeout(120):
            answer = await reader.read()
    writer.close()
    return answer


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        HEAD + b"Content-Length: -1\r\n\r\n{}",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    ],
)
async def test_what_is_no_http_gets_the_envelope_too(api: Api, request_bytes: bytes):
    head, _, body = (await raw_answer(api, request_bytes)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_a_connection_that_says_nothing_or_drips_is_closed(api: Api, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.5)
    assert await raw_answer(api) == b""
    assert await raw_answer(api, *(HEAD[at : at + 1] for at in range(40))) == b""
    answered = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    assert (await raw_answer(api, answered, HEAD)).count(b"HTTP/1.1") == 1  # the second request never gets further


async def test_a_body_that_does_not_come_is_refused(api: Api, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exchange, "BODY_TIMEOUT_S", 0.5)
    answer = await raw_answer(api, HEAD + b"Content-Length: 100\r\n\r\n{")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["code"] == "request_timeout"


# (fields, param, code); sent to both endpoints
BAD_FIELDS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"temperature": -0.1}, "temperature", "decimal_below_min_value"),
    ({"temperature": 2.1}, "temperature", "decimal_above_max_value"),
    ({"temperature": "abc"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"top_p": 0}, "top_p", None),
    ({"top_p": 1.1}, "top_p", "decimal_above_max_value"),
    ({"min_p": -0.1}, "min_p", "decimal_below_min_value"),
    ({"min_p": 1.1}, "min_p", "decimal_above_max_value"),
    ({"top_k": -2}, "top_k", None),
    ({"top_k": 1.5}, "top_k", "invalid_type"),
    ({"top_k": 2**31}, "top_k", "integer_above_max_value"),
    ({"n": 0}, "n", "integer_below_min_value"),
    ({"n": -1}, "n", "integer_below_min_value"),
    ({"n": 129}, "n", "integer_above_max_value"),
    ({"n": 1.5}, "n", "invalid_type"),
    ({"presence_penalty": 3}, "presence_penalty", "decimal_above_max_value"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "decimal_below_min_value"),
    ({"presence_penalty": "0.5"}, "presence_penalty", "invalid_type"),
    ({"repetition_penalty": 0}, "repetition_penalty", "decimal_below_min_value"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty", "decimal_below_min_value"),
    ({"repetition_penalty": 100.1}, "repetition_penalty", "decimal_above_max_value"),
    ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": -1}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
    ({"min_tokens": -1}, "min_tokens", "integer_below_min_value"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", None),
    ({"model": 5}, "model", "invalid_type"),
    ({"stop": ["a"] * 65}, "stop", "array_above_max_length"),
    ({"stop": ""}, "stop", None),
    ({"stop": ["a", ""]}, "stop", None),
    ({"stop": 5}, "stop", None),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "integer_below_min_value"),
    ({"stop_token_ids": [100_000]}, "stop_token_ids", None),
    ({"stream_options": {"include_usage": True}}, "stream_options", None),
    ({"stream_options": {"include_usage": False}}, "stream_options", None),
    ({"stream": False, "stream_options": {}}, "stream_options", None),
    ({"stream": True, "stream_options": {"nobody": 1}}, "stream_options.nobody", "unknown_parameter"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": 1}},
        "stream_options.continuous_usage_stats",
        "invalid_type",
    ),
    ({"stream_interval": 0}, "stream_interval", "integer_below_min_value"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", None),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", None),
    ({"truncation_side": "middle"}, "truncation_side", "invalid_value"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "empty_array"),
    ({"allowed_token_ids": [100_000]}, "allowed_token_ids", None),
    ({"allowed_token_ids": [5, 6], "logit_bias": {"5": -100, "6": -100}}, "allowed_token_ids", "no_token_left"),
    ({"logprob_token_ids": [5]}, "logprob_token_ids", None),
    ({"session_id": "a b"}, "session_id", None),
    ({"request_id": "x" * 129}, "request_id", None),
    ({"priority": 2**31}, "priority", "integer_above_max_value"),
    ({"stream": "foo"}, "stream", "invalid_type"),
    ({"seed": 2**63}, "seed", "integer_above_max_value"),
    ({"seed": -(2**63) - 1}, "seed", None),
    ({"seed": "x"}, "seed", "invalid_type"),
    ({"logit_bias": {"abc": 1}}, "logit_bias", None),
    ({"logit_bias": {"-1": 1}}, "logit_bias", None),
    ({"logit_bias": {"5": 101}}, "logit_bias", None),
    ({"logit_bias": {"5": "1"}}, "logit_bias", None),
    ({"logit_bias": {"100000": 1}}, "logit_bias", None),
    ({"logit_bias": {"99999999999": 1}}, "logit_bias", None),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", None),
    ({"logit_bias": [[5, 1]]}, "logit_bias", None),
    ({"logit_bias": {"77": 1, "077": 2}}, "logit_bias", None),
    ({"bad_words": "word"}, "bad_words", "invalid_type"),
    ({"bad_words": [""]}, "bad_words[0]", None),
    ({"bad_words": ["x"] * 129}, "bad_words", "array_above_max_length"),
    ({"cache_salt": "x" * 129}, "cache_salt", None),
    ({"cache_salt": "a\nb"}, "cache_salt", None),
    ({"cache_salt": "\u00e9"}, "cache_salt", None),
    ({"cache_salt": ""}, "cache_salt", None),
    ({"guided_regex": "(a+)+$"}, "guided_regex", "unsupported_parameter"),
    ({"structured_outputs": {}}, "structured_outputs", None),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", None),
    ({"structured_outputs": {"json": {"type": "strin"}}}, "structured_outputs", "invalid_grammar"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "invalid_grammar"),
    ({"structured_outputs": {"json": {"uniqueItems": True}}}, "structured_outputs", "invalid_grammar"),
    ({"structured_outputs": {"regex": "a(b"}}, "structured_outputs", "invalid_grammar"),
    ({"structured_outputs": {"regex": "a" * 65_537}}, "structured_outputs.regex", None),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", None),
    ({"structured_outputs": {"choice": ["a" * 65_536, "b"]}}, "structured_outputs.choice", None),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs", "invalid_grammar"),
    ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar", "invalid_grammar"),
    (
        {"structured_outputs": {"grammar": "root ::= r1\n" + "\n".join(f'r{rule} ::= "a"' for rule in range(512))}},
        "structured_outputs.grammar",
        "invalid_grammar",
    ),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", None),
    ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag", None),
    ({"structured_outputs": {"structural_tag": " " * 65_537}}, "structured_outputs.structural_tag", None),
    (
        {"structured_outputs": {"structural_tag": {"poem": 1}}},
        "structured_outputs.structural_tag.poem",
        "unknown_parameter",
    ),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs", None),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": "("}}, "structured_outputs", "invalid_grammar"),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " " * 1025}},
        "structured_outputs.whitespace_pattern",
        None,
    ),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "token", "token": 3}}},
        "response_format.format",
        None,
    ),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "a(b"}}},
        "response_format",
        "invalid_grammar",
    ),
    ({"response_format": {"type": "structural_tag"}}, "response_format", None),
    ({"response_format": {"type": "text", "format": {"type": "any_text"}}}, "response_format", None),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs", None),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", None),
    ({"response_format": {"type": "json_schema"}}, "response_format", None),
    ({"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}}, "response_format", None),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "response_format.json_schema.name",
        None,
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strin"}}}},
        "response_format",
        "invalid_grammar",
    ),
    ({"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
    ({"response_format": {"type": "poem"}}, "response_format.type", "invalid_value"),
    ({"kv_transfer_params": {"remote_host": "x"}}, "kv_transfer_params", "unknown_parameter"),
    ({"priority": False}, "priority", "invalid_type"),
    ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD_FIELDS, ids=[json.dumps(case[0])[:60] for case in BAD_FIELDS])
async def test_bad_field(api: Api, fields: dict[str, Any], param: str, code: str | None):
    for send in (api.chat, api.complete):
        assert_refused(await send(**fields), param, code)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
async def test_number_that_is_not_finite(api: Api, field: str, number: bytes):
    body = b'{"model":"m","prompt":"x","' + field.encode() + b'":' + number + b"}"
    assert_refused(await api.http.post("/v1/completions", content=body, headers=JSON), field)


async def test_unknown_model(api: Api):
    for response in (await api.chat(model="other"), await api.complete(model="other")):
        assert_refused(response, "model", "model_not_found", status=404, says="other")
    assert_refused(await api.http.get("/v1/models/other"), "model", "model_not_found", status=404)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


BAD_CHATS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"messages": []}, "messages", "empty_array"),
    ({"messages": 5}, "messages", "invalid_type"),
    ({"messages": [5]}, "messages[0]", "invalid_type"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [*user("x"), {"role": "", "content": "x"}]}, "messages[1].role", "string_below_min_length"),
    ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role", "invalid_type"),
    ({"messages": user(5)}, "messages[0].content", None),
    ({"messages": user([{"type": "smell"}])}, "messages[0].content[0].type", "invalid_value"),
    (
        {"messages": user([{"type": "image_url", "image_url": {"url": "x"}}])},
        "messages[0].content[0].type",
        "invalid_value",
    ),
    ({"messages": user([{"type": "text"}])}, "messages[0].content[0].text", "missing_required_parameter"),
    ({"top_logprobs": 3}, "top_logprobs", None),
    ({"logprobs": False, "top_logprobs": 3}, "top_logprobs", None),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "integer_above_max_value"),
    ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", "integer_below_min_value"),
    ({"top_logprobs": -1}, "top_logprobs", None),
    ({"logprobs": 3}, "logprobs", "invalid_type"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "integer_below_min_value"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens", None),
    ({"tools": [{"type": "function"}], "tool_choice": "auto"}, "tools[0].function", "missing_required_parameter"),
    ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].custom", None),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name", None),
    ({"tools": [TOOL] * 129}, "tools", "array_above_max_length"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": "must"}, "tool_choice", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": 5}, "tool_choice", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls", "invalid_type"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"function_call": {"name": "f"}}, "function_call", "unsupported_parameter"),
    ({"thinking_token_budget": -1}, "thinking_token_budget", "integer_below_min_value"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "integer_above_max_value"),
    ({"documents": ["x"]}, "documents[0]", "invalid_type"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported_parameter"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", None),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs", "invalid_type"),
    ({"continue_final_message": True}, "continue_final_message", None),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD_CHATS, ids=[json.dumps(case[0])[:60] for case in BAD_CHATS])
async def test_bad_chat(api: Api, fields: dict[str, Any], param: str, code: str | None):
    assert_refused(await api.chat(**fields), param, code)


async def test_chat_without_messages(api: Api):
    response = await api.http.post("/v1/chat/completions", json={"model": "m"})
    assert_refused(response, "messages", "missing_required_parameter")


BAD_PROMPTS: list[Any] = [None, "", [], [-1], [100_000], [2**40], [1, "x"], [True], [1.5], [None], {"a": 1}, [[]], [""]]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=json.dumps)
async def test_bad_prompt(api: Api, prompt: Any):
    assert_refused(await api.complete(prompt=prompt), "prompt")


BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"prompt": ["x"] * 1025}, "prompt", "array_above_max_length"),
    ({"prompt": ["x", ""]}, "prompt", "empty_string"),
    ({"prompt": [[1], []]}, "prompt", "empty_array"),
    ({"prompt": ["x", 5]}, "prompt", "invalid_type"),
    ({"prompt": [[1], [100_000]]}, "prompt", None),
    ({"prompt": [-1], "echo": True}, "prompt", None),
    ({"prompt": [2**40], "echo": True}, "prompt", None),
    ({"prompt": ["x", "word " * 100]}, "prompt", "context_length_exceeded"),
    ({"logprobs": 21}, "logprobs", "integer_above_max_value"),
    ({"logprobs": -1}, "logprobs", "integer_below_min_value"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "integer_above_max_value"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "integer_above_max_value"),
    ({"prompt_logprobs": -2}, "prompt_logprobs", "integer_below_min_value"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", None),
    ({"echo": "x"}, "echo", "invalid_type"),
]


@pytest.mark.parametrize(
    ("fields", "param", "code"), BAD_COMPLETIONS, ids=[json.dumps(case[0])[:60] for case in BAD_COMPLETIONS]
)
async def test_bad_completion(api: Api, fields: dict[str, Any], param: str, code: str | None):
    assert_refused(await api.complete(**fields), param, code)


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"best_of": 2}, "'n' choices"),
    ({"suffix": "x"}, "after a prompt"),
    ({"use_beam_search": True}, "without beam search"),
    ({"length_penalty": 2.0}, "beam search"),
    ({"guided_json": {}}, "'structured_outputs'"),
    ({"guided_choice": ["a"]}, "'structured_outputs'"),
]


@pytest.mark.parametrize(("fields", "says"), UNSUPPORTED)
async def test_what_is_not_supported_is_refused_by_name_and_says_what_to_do(
    api: Api, fields: dict[str, Any], says: str
):
    assert_refused(await api.complete(**fields), next(iter(fields)), "unsupported_parameter", says=says)


@pytest.mark.parametrize("length", [64, 65, 10_000])
async def test_prompt_longer_than_the_context(api: Api, length: int):
    """A prompt that fills it leaves no room for a token."""
    response = await api.complete(prompt=[5] * length)
    assert_refused(response, "prompt", "context_length_exceeded", says="64")
    response = await api.chat(messages=user("word " * length))
    assert_refused(response, "messages", "context_length_exceeded", says="64")


async def test_prompt_and_max_tokens_over_the_context(api: Api):
    response = await api.complete(prompt=[5] * 60, max_tokens=5)
    assert_refused(response, "prompt", "context_length_exceeded", says="60 in the prompt, 5 in the completion")


@pytest.mark.parametrize(
    ("biases", "says"),
    [
        ({"5": 1, "abc": 1}, "'abc'"),
        ({"5": 1, "6": 101}, "'6'"),
        ({"77": 1, "077": 2}, "'077'"),
        ({"5": 1, "100000": 1}, "100000"),
        ({"x" * 1000: 1}, "'" + "x" * 32 + "'"),
    ],
)
async def test_a_wrong_bias_is_named_by_its_key(api: Api, biases: dict[str, Any], says: str):
    assert_refused(await api.complete(logit_bias=biases), "logit_bias", says=says)
