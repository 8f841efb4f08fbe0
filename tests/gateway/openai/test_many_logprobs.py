"""Alternatives up to the whole vocabulary: who may ask for how many (--max-logprobs), and what the answers hold."""

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import numpy as np
import pytest

from services.gateway.api.answers.choice import Update
from services.gateway.api.generation import Delta
from services.gateway.openai.answer import takes_long
from services.protocol.alternatives import alternatives_of
from services.protocol.frames import TokenLogprobs
from services.protocol.outcomes import FinishReason
from services.protocol.sampling import FEW_ALTERNATIVES, MAX_ALTERNATIVES
from tests.gateway.running_api import Api, events, running_api
from tests.gateway.scripted_generator import Script, one_delta


@pytest.fixture
async def generous() -> AsyncIterator[Api]:
    async with running_api(max_logprobs=-1) as running:
        yield running


def scored(vocab: int, token: int) -> TokenLogprobs:
    """All of the vocabulary, from its end."""
    ids, values = np.arange(vocab, dtype=np.int32)[::-1], -np.arange(vocab, dtype=np.float32)
    return TokenLogprobs(float(token + 1 - vocab), alternatives_of(ids, values), vocab - token)


def script(api: Api, num_prompt: int = 1) -> None:
    entry = scored(api.tokenizer.vocab_size, 9)
    api.generator.script = Script([Delta([9], [entry], FinishReason.LENGTH, 0, 0, [entry] * (num_prompt - 1))])


async def generate(api: Api, **sampling: Any) -> httpx2.Response:
    return await api.http.post("/inference/v1/generate", json={"token_ids": [5, 6], "sampling_params": sampling})


def assert_above(response: httpx2.Response, param: str, limit: int) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, "integer_above_max_value")
    assert f"at most {limit} " in error["message"]
    assert f"'{param}'" in error["message"]


@pytest.mark.parametrize("limit", [0, 5, 200])
async def test_the_option_bounds_what_a_request_may_ask_for(limit: int):
    async with running_api(max_logprobs=limit) as api:
        api.generator.script = Script(one_delta([9]), as_asked=True)
        ok = [
            await api.chat(logprobs=True, top_logprobs=limit, prompt_logprobs=limit, max_tokens=1),
            await api.complete(logprobs=limit, prompt_logprobs=limit),
            await generate(api, logprobs=limit, prompt_logprobs=limit, max_tokens=1),
        ]
        assert [answer.status_code for answer in ok] == [200] * 3, [answer.text for answer in ok]
        for asked in (limit + 1, -1):
            assert_above(await api.chat(logprobs=True, top_logprobs=asked), "top_logprobs", limit)
            assert_above(await api.chat(prompt_logprobs=asked), "prompt_logprobs", limit)
            assert_above(await api.complete(prompt_logprobs=asked), "prompt_logprobs", limit)
            assert_above(await generate(api, logprobs=asked), "sampling_params.logprobs", limit)
        assert_above(await api.complete(logprobs=limit + 1), "logprobs", limit)


async def test_without_a_limit_the_vocabulary_is_one(generous: Api):
    vocab = generous.tokenizer.vocab_size
    assert vocab > FEW_ALTERNATIVES
    assert_above(await generous.complete(logprobs=vocab + 1), "logprobs", vocab)
    assert (await generous.complete(logprobs=vocab)).status_code == 200


async def test_minus_one_is_the_whole_vocabulary(generous: Api):
    vocab = generous.tokenizer.vocab_size
    script(generous, num_prompt=2)
    assert (await generate(generous, logprobs=-1, prompt_logprobs=-1, max_tokens=1)).status_code == 200
    assert (await generous.chat(logprobs=True, top_logprobs=-1, max_tokens=1)).status_code == 200
    asked = [request.capsules[0].sampling for request in generous.generator.requests]
    assert [(each.num_logprobs, each.num_prompt_logprobs) for each in asked] == [(vocab, vocab), (vocab, None)]


async def test_completions_ask_for_it_by_its_size_as_in_vllm(generous: Api):
    refused = await generous.complete(logprobs=-1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "integer_below_min_value")


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_hold_all_of_it(generous: Api, stream: bool):
    vocab = generous.tokenizer.vocab_size
    script(generous)
    chat = await generous.chat(logprobs=True, top_logprobs=-1, max_tokens=1, stream=stream)
    complete = await generous.complete(logprobs=vocab, max_tokens=1, stream=stream, return_tokens_as_token_ids=True)
    for response in chat, complete:
        assert response.status_code == 200, response.text
    bodies = [events(response)[:-1] if stream else [response.json()] for response in (chat, complete)]
    of_chat, of_completion = ([body["choices"][0] for body in each if body["choices"]] for each in bodies)
    (entry,) = [entry for choice in of_chat if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-float(place) for place in range(vocab)]
    assert entry["top_logprobs"][vocab - 1 - 9]["token"] == entry["token"]
    (top,) = [top for choice in of_completion if choice["logprobs"] for top in choice["logprobs"]["top_logprobs"]]
    assert top == {f"token_id:{vocab - 1 - place}": -float(place) for place in range(vocab)}


async def test_a_prompt_s_logprobs_of_all_tokens_have_their_ranks(generous: Api):
    vocab = generous.tokenizer.vocab_size
    script(generous, num_prompt=2)
    body = (await generous.complete(prompt=[5, 9], prompt_logprobs=-1, max_tokens=1, logprobs=0)).json()
    first, second = body["choices"][0]["prompt_logprobs"]
    assert first is None
    assert {int(token): entry["rank"] for token, entry in second.items()} == {
        token: vocab - token for token in range(vocab)
    }
    assert second["9"]["decoded_token"] == generous.tokenizer.token_bytes(9).decode()


async def test_an_echo_is_as_wide_as_its_own_field_says(generous: Api):
    script(generous, num_prompt=2)
    body = (await generous.complete(prompt=[5, 9], echo=True, logprobs=2, prompt_logprobs=-1, max_tokens=1)).json()
    (choice,) = body["choices"]
    assert len(choice["prompt_logprobs"][1]) == generous.tokenizer.vocab_size
    assert len(choice["logprobs"]["top_logprobs"][1]) == 3  # the token itself, and two


async def test_the_alternatives_of_a_whole_answer_are_bounded(generous: Api):
    """Where tokens have many; few of each are as many as the context gives."""
    vocab = generous.tokenizer.vocab_size
    generous.generator.max_model_len = 100_000
    fits, least_too_many = MAX_ALTERNATIVES // vocab, MAX_ALTERNATIVES // vocab + 1
    refusals = [
        (await generous.complete(prompt=[5], logprobs=vocab, max_tokens=least_too_many), "logprobs"),
        (await generous.chat(logprobs=True, top_logprobs=-1), "top_logprobs"),
        (await generous.complete(prompt=[5] * least_too_many, prompt_logprobs=-1, max_tokens=1), "prompt_logprobs"),
        (await generous.complete(prompt=[5], logprobs=vocab, max_tokens=fits // 2 + 1, n=2), "logprobs"),
        (await generate(generous, logprobs=-1), "sampling_params.logprobs"),
    ]
    for refused, param in refusals:
        assert_above(refused, param, MAX_ALTERNATIVES)
    assert not generous.generator.requests
    script(generous)
    assert (await generous.complete(prompt=[5], logprobs=vocab, max_tokens=fits)).status_code == 200
    many_tokens = await generous.complete(prompt=[5], logprobs=FEW_ALTERNATIVES, max_tokens=90_000, n=4)
    assert many_tokens.status_code == 200


def test_the_json_of_one_token_with_many_alternatives_is_made_beside_the_event_loop():
    few, many = scored(FEW_ALTERNATIVES, 9), scored(FEW_ALTERNATIVES + 1, 9)
    assert not takes_long(Update(0, "x", [9, 9], [None, few], None, prompt_logprobs=[(9, few)]))
    assert takes_long(Update(0, "x", [9, 9], [None, many], None))
    assert takes_long(Update(0, "x", [9], None, None, prompt_logprobs=[(9, few), (9, many)]))
