"""Fields of vLLM beside OpenAI's: what answers show beside the text, and how prompts are made."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from services.gateway.api.generation import Delta
from services.gateway.text.chat_template import ChatTemplate
from services.protocol.frames import TokenLogprobs
from services.protocol.outcomes import FinishReason
from tests.gateway.running_api import Api, events, running_api
from tests.gateway.scripted_generator import Script, delta_per_token, one_delta
from tests.gateway.tokenizer_files import CHATML

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Api]:
    async with running_api() as api:
        yield api


@pytest.fixture
def api(running: Api) -> Api:
    running.generator.script = Script(one_delta(running.tokens("Hello")))
    running.generator.requests.clear()
    return running


def choices_of(chunks: list[Any]) -> list[dict[str, Any]]:
    return [chunk["choices"][0] for chunk in chunks if chunk != "[DONE]" and chunk["choices"]]


ENDS: list[tuple[dict[str, Any], FinishReason, object]] = [
    ({"stop": ["ne t"]}, FinishReason.LENGTH, "ne t"),
    ({"stop_token_ids": [9]}, FinishReason.STOP, 9),
    ({}, FinishReason.STOP, None),  # the model's own end
    ({}, FinishReason.LENGTH, None),
]


@pytest.mark.parametrize(("fields", "finish", "reason"), ENDS)
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_reason_is_what_ended_the_choice(
    api: Api, fields: dict[str, Any], finish: FinishReason, reason: object, stream: bool
):
    api.generator.script = Script(delta_per_token([*api.tokens("one two"), 9], finish))
    for send in (api.chat, api.complete):
        response = await send(**fields, stream=stream)
        last = choices_of(events(response))[-1] if stream else response.json()["choices"][0]
        assert last["stop_reason"] == reason
        assert last["finish_reason"] == ("length" if reason is None and finish is FinishReason.LENGTH else "stop")


async def test_a_stop_is_text_where_asked_for(api: Api):
    api.generator.script = Script(one_delta(api.tokens("one STOP two")))
    text = (await api.complete(stop=["STOP"], include_stop_str_in_output=True)).json()["choices"][0]["text"]
    assert text == "one STOP"
    ends = api.tokens("!")
    api.generator.script = Script(one_delta([*api.tokens("one"), *ends], FinishReason.STOP))
    for include, expected in ((True, "one!"), (False, "one")):
        fields = {"stop_token_ids": ends, "include_stop_str_in_output": include}
        assert (await api.complete(**fields)).json()["choices"][0]["text"] == expected


async def test_answers_name_the_system_and_have_no_prompt_logprobs(api: Api):
    chat, completion = (await api.chat()).json(), (await api.complete()).json()
    assert chat["prompt_logprobs"] is None
    assert completion["choices"][0]["prompt_logprobs"] is None
    (streamed, *_) = events(await api.chat(stream=True))
    assert chat["system_fingerprint"] == completion["system_fingerprint"] == streamed["system_fingerprint"]
    assert chat["system_fingerprint"].startswith("fp_")


async def test_every_chunk_has_the_usage_so_far_where_asked_for(api: Api):
    tokens = api.tokens("one two three")
    api.generator.script = Script(delta_per_token(tokens, cached_tokens=1))
    options = {"include_usage": True, "continuous_usage_stats": True}
    for send, first in ((api.chat, 0), (api.complete, 1)):  # a chat's first chunk has the role and no text
        chunks = [chunk for chunk in events(await send(stream=True, stream_options=options)) if chunk != "[DONE]"]
        usages = [chunk["usage"] for chunk in chunks]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == [*range(first, len(tokens) + 1), len(tokens)]  # the last chunk has no choices
        assert {usage["prompt_tokens"] for usage in usages} == {usages[-1]["prompt_tokens"]}
        assert all(usage["prompt_tokens_details"] == {"cached_tokens": 1} for usage in usages)


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_of_prompt_and_answer(api: Api, stream: bool):
    tokens = api.tokens("größer 🙂")  # some tokens complete no character
    api.generator.script = Script(delta_per_token(tokens))
    for send in (api.chat, api.complete):
        response = await send(stream=stream, return_token_ids=True)
        prompt = api.generator.requests[-1].capsules[0].token_ids.tolist()
        chunks = [chunk for chunk in events(response) if chunk != "[DONE]"] if stream else [response.json()]
        found = [token for chunk in choices_of(chunks) for token in chunk.get("token_ids", [])]
        assert found == tokens
        places = [place for chunk in chunks for place in (chunk, *chunk["choices"])]
        assert [place["prompt_token_ids"] for place in places if "prompt_token_ids" in place] == [prompt]


async def test_tokens_are_named_by_their_ids_where_asked_for(api: Api):
    tokens = api.tokens("ab")
    logprobs = [TokenLogprobs(-0.5, ((token, -0.5), (7, -2.0))) for token in tokens]
    api.generator.script = Script(delta_per_token(tokens, logprobs=logprobs))
    found = (await api.complete(logprobs=2, return_tokens_as_token_ids=True)).json()["choices"][0]["logprobs"]
    assert found["tokens"] == [f"token_id:{token}" for token in tokens]
    assert all("token_id:7" in top for top in found["top_logprobs"])
    assert found["text_offset"][0] == 0
    chat = await api.chat(logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True)
    content = chat.json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == found["tokens"]


async def test_chunks_wait_for_as_many_tokens_as_asked_for(api: Api):
    tokens = api.tokens("one two three four five six")
    api.generator.script = Script(delta_per_token(tokens))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await api.complete(stream=True, stream_interval=3, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-2]]
    assert counts == [1, *range(4, len(tokens), 3), len(tokens)]
    assert "".join(choice["text"] for choice in choices_of(chunks)) == "one two three four five six"


async def test_an_echo_of_ids_is_what_the_tokens_say(api: Api):
    special = api.tokenizer.backend.token_to_id("<|eos|>")
    prompt, scores = [special, *api.tokens("Hi")], [TokenLogprobs(-1.0, ())] * len(api.tokens("Hi"))
    api.generator.script = Script(
        [Delta(api.tokens("!"), [TokenLogprobs(-1.0, ())], FinishReason.LENGTH, 0, 0, scores)]
    )
    for fields, text in (({}, "<|eos|>Hi!"), ({"skip_special_tokens": True}, "Hi!")):
        (choice,) = (await api.complete(prompt=prompt, echo=True, logprobs=0, max_tokens=1, **fields)).json()["choices"]
        assert choice["text"] == text
        *_, last = choice["logprobs"]["text_offset"]
        assert text[last:] == "!"


async def test_offsets_of_an_echoed_text_leave_out_what_the_tokenizer_adds(api: Api):
    ids = (await api.http.post("/tokenize", json={"prompt": "Hi"})).json()["tokens"]
    assert ids[0] in api.tokenizer.special_ids
    scores = [TokenLogprobs(-1.0, ())] * (len(ids) - 1)
    api.generator.script = Script(
        [Delta(api.tokens("!"), [TokenLogprobs(-1.0, ())], FinishReason.LENGTH, 0, 0, scores)]
    )
    (choice,) = (await api.complete(prompt="Hi", echo=True, logprobs=0, max_tokens=1)).json()["choices"]
    assert choice["text"] == "Hi!"
    assert choice["logprobs"]["text_offset"][:2] == [0, 0]
    assert choice["text"][choice["logprobs"]["text_offset"][-1] :] == "!"


async def test_an_answer_with_no_tokens_scores_the_prompt(api: Api):
    prompt = api.tokens("Hello there")
    scores = [TokenLogprobs(-1.0, ())] * (len(prompt) - 1)
    delta = Delta(api.tokens("x"), [TokenLogprobs(-1.0, ())], FinishReason.LENGTH, 0, 0, scores)
    api.generator.script = Script([delta])
    body = (await api.complete(prompt=prompt, echo=True, logprobs=0, max_tokens=0)).json()
    (choice,) = body["choices"]
    assert choice["text"] == "Hello there"
    assert choice["logprobs"]["token_logprobs"] == [None, *[-1.0] * (len(prompt) - 1)]
    assert (body["usage"]["completion_tokens"], choice["finish_reason"]) == (0, "length")


async def test_a_chat_s_prompt_is_scored(api: Api):
    length = len(
        (await api.http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]})).json()["tokens"]
    )
    scores = [TokenLogprobs(-1.0, ((5, -0.5),))] * (length - 1)
    api.generator.script = Script([Delta(api.tokens("x"), None, FinishReason.LENGTH, 0, 0, scores)])
    body = (await api.chat(prompt_logprobs=1, max_completion_tokens=0)).json()
    assert body["choices"][0]["message"]["content"] == ""
    assert body["prompt_logprobs"][0] is None
    assert len(body["prompt_logprobs"]) == length
    assert body["prompt_logprobs"][1]["5"]["rank"] == 1


async def test_an_echo_of_a_chat_is_the_message_that_is_continued(api: Api):
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one, "}]
    for fields, text in (({"echo": True}, "one, Hello"), ({}, "Hello")):
        response = await api.chat(messages=messages, continue_final_message=True, **fields)
        assert response.json()["choices"][0]["message"]["content"] == text


TRUNCATED: list[tuple[dict[str, Any], list[int]]] = [
    ({"truncate_prompt_tokens": 2}, [8, 9]),
    ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, [8, 9]),
    ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [5, 6]),
    ({"truncate_prompt_tokens": 9}, [5, 6, 7, 8, 9]),
    ({"truncation_side": "left"}, [5, 6, 7, 8, 9]),
]


@pytest.mark.parametrize(("fields", "kept"), TRUNCATED)
async def test_prompts_are_cut(api: Api, fields: dict[str, Any], kept: list[int]):
    await api.complete(prompt=[5, 6, 7, 8, 9], **fields)
    assert api.generator.requests[0].capsules[0].token_ids.tolist() == kept


async def test_prompts_are_cut_to_what_fits(api: Api):
    response = await api.complete(prompt=[5] * 1000, truncate_prompt_tokens=-1, max_tokens=6)
    assert response.json()["usage"]["prompt_tokens"] == 250
    assert (await api.chat(messages=[{"role": "user", "content": "x " * 900}], truncate_prompt_tokens=-1)).is_success
    (whole,) = (await api.complete(prompt="one two", truncate_prompt_tokens=1, echo=True)).json()["choices"]
    assert whole["text"] == "oHello"


async def test_salt_session_and_priority_go_with_the_request(api: Api):
    await api.chat(cache_salt="a", session_id="s", priority=-5)
    (request,) = api.generator.requests
    assert request.session == ("default", "s")
    assert [(capsule.cache_salt, capsule.priority) for capsule in request.capsules] == [("a", -5)]


async def test_a_request_s_own_id_counts_where_no_header_has_one(api: Api):
    response = await api.complete(request_id="mine")
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["id"] == "cmpl-mine"
    body = {"prompt": "x", "request_id": "mine"}
    response = await api.http.post("/v1/completions", json=body, headers={"x-request-id": "header"})
    assert response.json()["id"] == "cmpl-header"


async def test_documents_go_to_the_template():
    template = "{% for document in documents or [] %}[{{ document.title }}]{% endfor %}{{ messages[0].content }}"
    async with running_api(template=template) as api:
        await api.chat(documents=[{"title": "A"}, {"title": "B"}])
        await api.chat()
        first, second = (request.capsules[0].token_ids.tolist() for request in api.generator.requests)
        assert (first, second) == (api.tokens("[A][B]Hi"), api.tokens("Hi"))


async def test_a_request_s_template_is_refused_unless_the_server_trusts_it(api: Api):
    response = await api.chat(chat_template="{{ messages[0].content }}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "chat_template"
    assert "--trust-request-chat-template" in response.json()["error"]["message"]


async def test_a_trusted_template_of_a_request_makes_its_prompt():
    async with running_api(trusts_templates=True) as api:
        await api.chat(chat_template="<{{ messages[0].content }}>")
        assert api.generator.requests[0].capsules[0].token_ids.tolist() == api.tokens("<Hi>")
        response = await api.chat(chat_template="{% if %}")
        assert response.status_code == 400
        assert "line 1" in response.json()["error"]["message"]
        await api.chat()
        chatml = ChatTemplate(CHATML, {}).render([{"role": "user", "content": "Hi"}])
        assert api.generator.requests[-1].capsules[0].token_ids.tolist() == api.tokens(chatml)


async def test_named_logprobs_and_allowed_tokens_reach_the_capsule(api: Api):
    await api.complete(allowed_token_ids=[5, 6], logprob_token_ids=[6, 7, 8], logprobs=1)
    sampling = api.generator.requests[0].capsules[0].sampling
    assert (sampling.allowed_token_ids, sampling.logprob_token_ids) == ((5, 6), (6, 7, 8))
    assert sampling.num_logprobs == 3


async def test_the_token_itself_comes_first_and_is_among_named_alternatives(api: Api):
    token, named = 9, TokenLogprobs(-0.5, ((6, -1.0), (7, -2.0)))
    (delta,) = one_delta([token])
    api.generator.script = Script([replace(delta, logprobs=[named])])
    names = [api.tokenizer.token_bytes(each).decode() for each in (token, 6, 7)]
    body = (await api.chat(logprobs=True, logprob_token_ids=[6, 7])).json()
    (entry,) = body["choices"][0]["logprobs"]["content"]
    assert [top["token"] for top in entry["top_logprobs"]] == names
    (entry,) = (await api.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]["content"]
    assert [top["token"] for top in entry["top_logprobs"]] == names[1:]
    body = (await api.complete(logprobs=2, logprob_token_ids=[6, 7])).json()
    assert list(body["choices"][0]["logprobs"]["top_logprobs"][0]) == names
