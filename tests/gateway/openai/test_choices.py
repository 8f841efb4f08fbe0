"""Answers of more than one choice, and what an answer shows of its prompt."""

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from services.gateway.api.generation import Delta
from services.gateway.api.requests.sampling import seed_of_choice
from services.protocol.frames import TokenLogprobs
from services.protocol.outcomes import FinishReason
from tests.gateway.running_api import Api, events, running_api
from tests.gateway.scripted_generator import Script, delta_per_token, one_delta

pytestmark = pytest.mark.asyncio(loop_scope="module")

LENGTH, NONE = FinishReason.LENGTH, FinishReason.NONE


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Api]:
    async with running_api() as running:
        yield running


@pytest.fixture
def api(shared: Api) -> Api:
    shared.generator.requests.clear()
    shared.generator.ended.clear()
    return shared


def streamed(response: httpx2.Response) -> dict[int, str]:
    """The text of each choice; every one has one finish reason, its last word."""
    texts: dict[int, str] = {}
    finished: list[int] = []
    for body in events(response)[:-1]:
        for choice in body["choices"]:
            index = choice["index"]
            assert index not in finished
            text = choice["text"] if "text" in choice else choice["delta"]["content"]
            texts[index] = texts.get(index, "") + text
            if choice["finish_reason"]:
                finished.append(index)
    assert sorted(finished) == sorted(texts)
    return texts


async def test_choices_of_a_stream_are_interleaved_and_whole(api: Api):
    """Through the official client."""
    words = [api.tokens("one two"), api.tokens("three")]
    deltas = [
        Delta(words[1], None, NONE, 0, choice=1),
        Delta(words[0][:1], None, NONE, 0, choice=0),
        Delta([], None, LENGTH, 0, choice=1),
        Delta(words[0][1:], None, LENGTH, 0, choice=0),
    ]
    api.generator.script = Script(deltas, for_all=False)
    texts, roles, usage = {0: "", 1: ""}, [], None
    async with AsyncOpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Hi"}],
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                roles += [choice.index] if choice.delta.role else []
    assert texts == {0: "one two", 1: "three"}
    assert sorted(roles) == [0, 1]
    assert usage is not None
    assert usage.completion_tokens == len(words[0]) + len(words[1])
    assert usage.prompt_tokens == len(api.generator.requests[0].capsules[0].token_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_meets_its_stop_string_ends_alone(api: Api, stream: bool):
    stopped, other = api.tokens("a STOP b"), api.tokens("abc")
    deltas = [Delta([token], None, NONE, 0, choice=0) for token in stopped]
    deltas += [Delta([token], None, NONE, 0, choice=1) for token in other]
    api.generator.script = Script([*deltas, Delta([], None, LENGTH, 0, choice=1)], for_all=False)
    response = await api.complete(n=2, stop="STOP", stream=stream)
    if stream:
        assert streamed(response) == {0: "a ", 1: "abc"}
    else:
        found = [(choice["text"], choice["finish_reason"]) for choice in response.json()["choices"]]
        assert found == [("a ", "stop"), ("abc", "length")]
    assert api.generator.ended == [0]


async def test_every_choice_has_its_own_seed_and_all_else_in_common(api: Api):
    await api.complete(n=3, seed=5, temperature=0.5)
    (request,) = api.generator.requests
    assert request.num_choices == 3
    assert [capsule.sampling.seed for capsule in request.capsules] == [5, seed_of_choice(5, 1), seed_of_choice(5, 2)]
    assert len({capsule.sampling.seed for capsule in request.capsules}) == 3
    assert {capsule.sampling.temperature for capsule in request.capsules} == {0.5}
    assert seed_of_choice(5, 1) not in (seed_of_choice(4, 1), seed_of_choice(6, 0))


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_are_answered_in_order(api: Api, stream: bool):
    """Two choices for each of three prompts; a prompt counts once in the usage."""
    api.generator.script = Script(delta_per_token(api.tokens("Hello"), cached_tokens=2))
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = await api.complete(prompt=[[5, 6, 7], [8], [9, 9]], n=2, stream=stream, **options)
    prompts = [capsule.token_ids.tolist() for capsule in api.generator.requests[0].capsules]
    assert prompts == [[5, 6, 7], [5, 6, 7], [8], [8], [9, 9], [9, 9]]
    if stream:
        assert streamed(response) == dict.fromkeys(range(6), "Hello")
        usage = events(response)[-2]["usage"]
    else:
        assert [choice["index"] for choice in response.json()["choices"]] == list(range(6))
        usage = response.json()["usage"]
    assert usage["prompt_tokens"] == 6
    assert usage["completion_tokens"] == 6 * len(api.tokens("Hello"))
    assert usage["prompt_tokens_details"] == {"cached_tokens": 6}


async def test_too_many_choices_in_all(api: Api):
    response = await api.complete(prompt=["x"] * 1024, n=2)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_shows_the_prompt_before_each_choice(api: Api, stream: bool):
    api.generator.script = Script(one_delta(api.tokens(" there")))
    response = await api.complete(prompt="Hello", echo=True, n=2, stream=stream)
    texts = streamed(response) if stream else {choice["index"]: choice["text"] for choice in response.json()["choices"]}
    assert texts == {0: "Hello there", 1: "Hello there"}
    ids = api.tokens("Hello")
    assert (await api.complete(prompt=ids, echo=True)).json()["choices"][0]["text"] == "Hello there"


def prompt_scores(prompt: list[int]) -> list[TokenLogprobs]:
    """Each token but the first has three alternatives, the token itself the second of them."""
    return [
        TokenLogprobs(-1.0 - index, ((1, -0.5), (token, -1.0 - index), (2, -9.0)))
        for index, token in enumerate(prompt[1:])
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_covers_the_prompt(api: Api, stream: bool):
    """As evaluation harnesses ask for it: the first token has none, the others have as many as the answer's."""
    prompt, tokens = api.tokens("Hello there"), api.tokens("!")
    assert len(prompt) > 2
    delta = Delta(tokens, [TokenLogprobs(-0.25, ())] * len(tokens), LENGTH, 0, 0, prompt_scores(prompt))
    api.generator.script = Script([delta])
    response = await api.complete(prompt=prompt, echo=True, logprobs=2, max_tokens=1, stream=stream)
    assert api.generator.requests[0].capsules[0].sampling.num_prompt_logprobs == 2
    (choice,) = (events(response)[0] if stream else response.json())["choices"]
    assert choice["text"] == "Hello there!"
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == "Hello there!"
    assert found["token_logprobs"] == [None, *(-1.0 - at for at in range(len(prompt) - 1)), *[-0.25] * len(tokens)]
    assert found["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in found["top_logprobs"][1 : len(prompt)])
    assert found["text_offset"] == [len("".join(found["tokens"][:at])) for at in range(len(found["tokens"]))]
    assert choice.get("prompt_logprobs") is None


@pytest.mark.parametrize("rank", [54, None])
async def test_prompt_logprobs_have_the_form_of_vllm(api: Api, rank: int | None):
    """A token that is none of the alternatives has the rank that the worker counted; older ones count none."""
    prompt = api.tokens("Hello, oh")
    assert len(prompt) > 3
    far_behind = TokenLogprobs(float("-inf"), ((1, -0.5),), rank)
    scores = [*prompt_scores(prompt[:-1]), far_behind]
    api.generator.script = Script([Delta(api.tokens("x"), None, LENGTH, 0, 0, scores)])
    (choice,) = (await api.complete(prompt=prompt, prompt_logprobs=2)).json()["choices"]
    first, *others, last = choice["prompt_logprobs"]
    assert first is None
    for token, entry in zip(prompt[1:-1], others, strict=True):
        assert set(entry) == {"1", str(token)}
        assert (entry["1"]["rank"], entry[str(token)]["rank"]) == (1, 2)
        assert entry[str(token)]["decoded_token"] == api.tokenizer.token_bytes(token).decode()
    text_of_last = api.tokenizer.token_bytes(prompt[-1]).decode()
    assert last[str(prompt[-1])] == {"logprob": -9999.0, "rank": rank, "decoded_token": text_of_last}
    assert choice["logprobs"] is None
    assert choice["text"] == "x"


REACHING: dict[str, Any] = {
    "presence_penalty": -0.5,
    "frequency_penalty": 2,
    "repetition_penalty": 1.25,
    "logit_bias": {"5": -100, "7": 1.5},
}


async def test_penalties_and_bias_reach_the_capsule(api: Api):
    for send in (api.chat, api.complete):
        assert (await send(**REACHING)).status_code == 200
        sampling = api.generator.requests[-1].capsules[0].sampling
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (-0.5, 2.0)
        assert (sampling.repetition_penalty, sampling.logit_bias) == (1.25, ((5, -100.0), (7, 1.5)))


async def test_a_bad_word_is_banned_at_the_start_and_after_a_space(api: Api):
    await api.complete(bad_words=["there", "x"])
    banned = api.generator.requests[0].capsules[0].sampling.bad_words
    assert [api.tokenizer.backend.decode(list(word)) for word in banned] == ["there", " there", "x", " x"]
