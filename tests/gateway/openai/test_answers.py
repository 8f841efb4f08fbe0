"""Answers: text, finish reasons, usage and logprobs of both endpoints, whole and streamed."""

import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from services.gateway.api.generation import (
    Delta,
    Expired,
    Failed,
    GenerationError,
    Overloaded,
    Refusal,
    TooLarge,
    Unavailable,
    Unsupported,
)
from services.protocol.frames import TokenLogprobs
from services.protocol.model_files.info import GenerationDefaults
from services.protocol.outcomes import FinishReason
from tests.gateway.running_api import MODEL, Api, events, running_api
from tests.gateway.scripted_generator import Script, delta_per_token, one_delta

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEFAULTS = GenerationDefaults(eos_token_ids=(1,), temperature=0.6, top_p=0.9, top_k=20)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Api]:
    async with running_api(defaults=DEFAULTS) as api:
        yield api


@pytest.fixture
def api(running: Api) -> Api:
    running.generator.script = Script(one_delta(running.tokens("Hello")))
    running.generator.error = None
    running.generator.is_ready = True
    running.generator.max_model_len = 256
    running.generator.requests.clear()
    return running


def text_of(response: httpx2.Response) -> str:
    """The text of a stream of either endpoint."""
    choices = [event["choices"][0] for event in events(response)[:-1] if event["choices"]]
    return "".join(choice["delta"].get("content") or "" if "delta" in choice else choice["text"] for choice in choices)


async def test_chat(api: Api):
    tokens = api.tokens("Hello, world!")
    api.generator.script = Script(delta_per_token(tokens, cached_tokens=3))
    body = (await api.chat()).json()
    prompt = api.generator.requests[0].capsules[0]
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "m"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world!", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert body["usage"] == {
        "prompt_tokens": prompt.num_prompt,
        "completion_tokens": len(tokens),
        "total_tokens": prompt.num_prompt + len(tokens),
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def test_streamed_text_is_the_whole_text(api: Api):
    text = "größer 日本 🙂 end"
    for per_delta in (1, 3, 100):
        tokens = api.tokens(text)
        deltas = [
            Delta(tokens[at : at + per_delta], None, FinishReason.NONE, 0) for at in range(0, len(tokens), per_delta)
        ]
        deltas[-1].finish = FinishReason.LENGTH
        api.generator.script = Script(deltas)
        for send in (api.chat, api.complete):
            response = await send(stream=True)
            assert response.headers["content-type"].startswith("text/event-stream")
            assert events(response)[-1] == "[DONE]"
            assert text_of(response) == text
            whole = (await send()).json()["choices"][0]
            assert (whole["text"] if "text" in whole else whole["message"]["content"]) == text


async def test_chunks_of_a_chat(api: Api):
    api.generator.script = Script(delta_per_token(api.tokens("Hello")))
    chunks = events(await api.chat(stream=True, stream_options={"include_usage": True}))
    assert chunks.pop() == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(api.tokens("Hello"))


async def test_a_delta_of_several_tokens_is_one_chunk(api: Api):
    api.generator.script = Script(one_delta(api.tokens("Several tokens at once")))
    chunks = events(await api.complete(stream=True))
    assert len(chunks) == 2
    assert "usage" not in chunks[0]


async def test_end_token_counts_but_is_no_text(api: Api):
    tokens = [*api.tokens("Hi"), *api.tokens("x")]
    api.generator.script = Script(one_delta(tokens, FinishReason.STOP))
    body = (await api.complete(stop_token_ids=[tokens[-1]])).json()
    assert body["choices"][0]["text"] == "Hi"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len(tokens)


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_the_request_at_the_workers(api: Api, stream: bool):
    tokens = api.tokens("The quick brown fox jumps")
    api.generator.script = Script(delta_per_token(tokens), hangs=True)
    api.generator.left.clear()
    response = await api.complete(
        stop=["k bro"], stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
    )
    text = text_of(response) if stream else response.json()["choices"][0]["text"]
    assert text == "The quic"
    usage = (events(response)[-2] if stream else response.json())["usage"]
    assert usage["completion_tokens"] < len(tokens)
    assert api.generator.left.is_set()


async def test_sampling_defaults_are_the_models(api: Api):
    await api.chat()
    await api.complete()
    chat, completion = (request.capsules[0].sampling for request in api.generator.requests)
    assert (chat.temperature, chat.top_p, chat.top_k, chat.min_p) == (0.6, 0.9, 20, 0.0)
    assert chat.max_tokens == 256 - api.generator.requests[0].capsules[0].num_prompt
    assert completion.max_tokens == 16
    assert chat.seed != completion.seed


async def test_sampling_is_what_the_client_says(api: Api):
    wanted = {"temperature": 0, "top_p": 0.5, "top_k": 0, "min_p": 0.1, "seed": -1, "min_tokens": 2, "ignore_eos": True}
    await api.complete(**wanted, max_tokens=7, stop_token_ids=[5], logprobs=2)
    sampling = api.generator.requests[0].capsules[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, -1, 0.1)
    assert (sampling.seed, sampling.min_tokens, sampling.ignore_eos) == (2**64 - 1, 2, True)
    assert (sampling.max_tokens, sampling.stop_token_ids, sampling.num_logprobs) == (7, (5,), 2)


async def test_prompts(api: Api):
    """Text gets the tokenizer's BOS, token ids are taken as they are, a chat has the template's tokens only."""
    await api.complete(prompt="Hi")
    await api.complete(prompt=[5, 6, 7])
    await api.complete(prompt=[[5, 6, 7]])
    await api.chat(
        messages=[{"role": "developer", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}]
    )
    text, ids, nested, chat = (request.capsules[0].token_ids.tolist() for request in api.generator.requests)
    assert text == [api.tokenizer.backend.token_to_id("<|bos|>"), *api.tokens("Hi")]
    assert ids == nested == [5, 6, 7]
    assert chat == api.tokens("<|im_start|>system\nA\nB<|im_end|>\n<|im_start|>assistant\n")


async def test_last_message_is_continued(api: Api):
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one, "}]
    await api.chat(messages=messages, continue_final_message=True)
    text = "<|im_start|>user\nCount<|im_end|>\n<|im_start|>assistant\none, "
    assert api.generator.requests[0].capsules[0].token_ids.tolist() == api.tokens(text)


async def test_assistant_without_content(api: Api):
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "y"},
    ]
    assert (await api.chat(messages=messages)).status_code == 200


def logprobs_of(tokens: Sequence[int]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(-0.5 - index, ((token, -0.5 - index), (7, float("-inf")))) for index, token in enumerate(tokens)
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_a_chat(api: Api, stream: bool):
    tokens = api.tokens("a🙂")
    api.generator.script = Script(delta_per_token(tokens, logprobs=logprobs_of(tokens)))
    response = await api.chat(logprobs=True, top_logprobs=2, stream=stream)
    content: list[dict[str, Any]] = []
    for body in events(response)[:-1] if stream else [response.json()]:
        content += (body["choices"][0]["logprobs"] or {"content": []})["content"]
    assert [entry["logprob"] for entry in content] == [-0.5 - index for index in range(len(tokens))]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "a🙂"
    first = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert content[0]["top_logprobs"][0] == first
    assert content[0]["top_logprobs"][1]["logprob"] == -9999.0  # JSON has no infinity


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_a_completion(api: Api, stream: bool):
    tokens = api.tokens("ab c")
    api.generator.script = Script(delta_per_token(tokens, logprobs=logprobs_of(tokens)))
    response = await api.complete(logprobs=2, stream=stream)
    merged: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for body in events(response)[:-1] if stream else [response.json()]:
        for key in merged:
            merged[key] += body["choices"][0]["logprobs"][key]
    assert "".join(merged["tokens"]) == "ab c"
    assert merged["token_logprobs"] == [-0.5 - index for index in range(len(tokens))]
    assert all(token in top for token, top in zip(merged["tokens"], merged["top_logprobs"], strict=True))
    assert merged["text_offset"] == [len("".join(merged["tokens"][:index])) for index in range(len(tokens))]


ERRORS: list[tuple[GenerationError, int, str]] = [
    (Unavailable("secret 10.0.0.1", retry_after_s=3), 503, "service_unavailable"),
    (Overloaded("secret 10.0.0.1", 3, Refusal.SLO), 429, "server_overloaded"),
    (TooLarge("secret 10.0.0.1"), 400, "context_length_exceeded"),
    (Unsupported("secret 10.0.0.1", restricted=True), 400, "no_token_left"),
    (Unsupported("secret 10.0.0.1", restricted=False), 501, "unsupported_request"),
    (Expired("secret 10.0.0.1"), 504, "timeout"),
    (Failed("secret 10.0.0.1"), 500, "internal_error"),
]


@pytest.mark.parametrize(("error", "status", "code"), ERRORS, ids=[code for _, _, code in ERRORS])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("entered", [False, True])
async def test_error_before_the_first_token_is_a_status(
    api: Api, error: GenerationError, status: int, code: str, stream: bool, entered: bool
):
    """A stream gets its status too, since its 200 waits for the first token."""
    if entered:
        api.generator.script = Script([], error=error)
    else:
        api.generator.error = error
    response = await api.chat(stream=stream)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert "secret" not in response.text
    assert response.headers.get("retry-after") == ("3" if status in (429, 503) else None)
    assert response.headers.get("x-should-retry") == ("false" if status == 501 else None)  # official clients heed it
    assert (response.json()["error"]["type"] == "invalid_request_error") == (status < 429)


@pytest.mark.parametrize("error", [Failed("secret"), ValueError("secret")])
async def test_error_after_the_200_is_the_last_event(api: Api, error: Exception):
    deltas = delta_per_token(api.tokens("Hello"), FinishReason.NONE)
    api.generator.script = Script(deltas, error=error)
    for send in (api.chat, api.complete):
        response = await send(stream=True)
        assert response.status_code == 200
        last = events(response)[-1]
        assert set(last) == {"error"}
        assert set(last["error"]) == {"message", "type", "param", "code"}
        assert "[DONE]" not in response.text
        assert "secret" not in response.text


async def test_fault_of_ours_is_a_plain_500(api: Api):
    api.generator.script = Script([], error=ValueError("secret"))
    response = await api.chat()
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text
    assert any(line.get("exception") for line in api.logs)  # for us, with its traceback


async def test_request_id_is_taken_or_made(api: Api):
    body = {"model": "m", "prompt": "x"}
    taken = await api.http.post("/v1/completions", json=body, headers={"x-request-id": "abc-1"})
    assert taken.headers["x-request-id"] == "abc-1"
    assert taken.json()["id"] == "cmpl-abc-1"
    assert api.generator.requests[0].request_id == "abc-1"
    for odd in ("a b", "x" * 500, "<script>", ""):
        made = await api.http.post("/v1/completions", json=body, headers={"x-request-id": odd})
        assert re.fullmatch("[0-9a-f]{32}", made.headers["x-request-id"])


async def test_one_log_line_for_each_request(api: Api):
    api.logs.clear()
    api.generator.script = Script(delta_per_token(api.tokens("Hi"), cached_tokens=2))
    await api.http.post("/v1/completions", json={"model": "m", "prompt": [5, 6, 7]}, headers={"x-request-id": "abc"})
    await api.complete(temperature=5)
    await api.http.get("/health")  # no line: probes come every second
    answered, refused = api.logs
    expected = {
        "event": "request",
        "request_id": "abc",
        "endpoint": "completions",
        "status": 200,
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "generated_tokens": len(api.tokens("Hi")),
        "finish_reason": "length",
    }
    assert {key: answered[key] for key in expected} == expected
    assert 0 < answered["ttft_s"] <= answered["duration_s"]
    assert refused["status"] == 400


async def test_model_list(api: Api):
    (model,) = (await api.http.get("/v1/models")).json()["data"]
    assert model["id"] == model["root"] == "m"
    assert model["object"] == "model"
    assert model["max_model_len"] == 256
    assert model["created"] > 0
    assert (await api.http.get("/v1/models/m")).json() == model


async def test_probes(api: Api):
    assert (await api.http.get("/health")).status_code == 200
    assert (await api.http.get("/ready")).status_code == 200
    api.generator.is_ready = False
    response = await api.http.get("/ready")
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert (await api.http.get("/health")).status_code == 200
    assert (await api.admin.get("/debug/ledger")).json() == {"rows": []}


async def test_before_any_worker_answered(api: Api):
    api.generator.max_model_len = None
    response = await api.chat()
    assert response.status_code == 503
    assert response.headers["retry-after"]


async def test_metrics_count_requests_and_tokens(api: Api):
    async def values() -> dict[str, float]:
        lines = (await api.admin.get("/metrics")).text.splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(number) for name, _, number in pairs}

    names = {
        'baton_requests_total{endpoint="completions",status="200"}': 1,
        'baton_requests_total{endpoint="completions",status="400"}': 1,
        "baton_generated_tokens_total": len(api.tokens("Hello")),
        "baton_prompt_tokens_total": 3,
        "baton_cached_tokens_total": 2,
        "baton_ttft_seconds_count": 1,
        "baton_itl_seconds_count": len(api.tokens("Hello")) - 1,
        "baton_e2e_seconds_count": 1,
    }
    before = await values()
    api.generator.script = Script(delta_per_token(api.tokens("Hello"), cached_tokens=2))
    await api.complete(prompt=[5, 6, 7])
    await api.complete(prompt=[])
    after = await values()
    assert {name: after[name] - before.get(name, 0) for name in names} == names
    assert after["baton_requests_in_flight"] == 0  # this one is no client's


async def test_model_without_chat_template():
    async with running_api(template=None) as api:
        response = await api.chat()
        assert response.status_code == 400
        assert "no chat template" in response.json()["error"]["message"]


async def test_template_that_refuses_the_messages():
    async with running_api(template="{{ raise_exception('roles must alternate') }}") as api:
        response = await api.chat()
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"
        assert "roles must alternate" in response.json()["error"]["message"]


async def test_refusals_are_counted_by_their_cause(api: Api):
    async def refusals() -> float:
        lines = (await api.admin.get("/metrics")).text.splitlines()
        name = 'baton_admission_refusals_total{cause="share"} '
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    before = await refusals()
    api.generator.error = Overloaded("late", 3, Refusal.SHARE)
    await api.complete()
    assert await refusals() == before + 1


@pytest.mark.parametrize(("header", "slo_s"), [({}, None), ({"x-slo-ttft-ms": "250"}, 0.25)])
async def test_a_client_says_by_when_it_wants_its_first_token(api: Api, header: dict[str, str], slo_s: float | None):
    response = await api.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hi"}, headers=header)
    assert response.status_code == 200
    assert api.generator.requests[-1].ttft_slo_s == slo_s


@pytest.mark.parametrize("value", ["soon", "-1", "1.5", "9" * 10, "\u0665"])
async def test_a_limit_that_is_no_number_is_refused(api: Api, value: str):
    headers = {b"x-slo-ttft-ms": value.encode()}
    response = await api.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hi"}, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-slo-ttft-ms"


async def test_usage_takes_the_cached_tokens_of_the_last_delta(api: Api):
    """An attempt after the first token may have to compute what the one before it had found in a cache."""
    first, last = delta_per_token(api.tokens("Hi there")[:2])
    first.cached_tokens, last.cached_tokens = 2, 1
    api.generator.script = Script([first, last])
    usage = (await api.complete()).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
