"""What a request needs and which workers know it: where it goes, where it waits, and where it is refused."""

import asyncio
from dataclasses import replace

import pytest

from services.config import HandoffMode
from services.gateway.api.errors import from_generation_error
from services.gateway.api.generation import GenerationRequest, Unavailable, Unsupported
from services.protocol.capabilities import ALLOWED_TOKEN_IDS, CACHE_SALT, CAPABILITIES, GRAMMAR, in_words
from services.protocol.frames import Load
from services.protocol.messages import WorkerNews
from tests.gateway.dispatch_stack import (
    OTHER_DECODE,
    PROMPT,
    Stack,
    decode_worker,
    embedding_request,
    eventually,
    prefill_worker,
    request,
    running,
)
from tests.gateway.scripted_worker import empty_frame

SALTED = frozenset({CACHE_SALT})
NOBODY = "127.0.0.1:1"


def salted() -> GenerationRequest:
    plain = request()
    return replace(plain, capsules=tuple(replace(capsule, cache_salt="s") for capsule in plain.capsules))


def pair() -> GenerationRequest:
    plain = embedding_request(PROMPT)
    return replace(plain, capsules=tuple(replace(capsule, second_text=4) for capsule in plain.capsules))


async def generate(stack: Stack, wanted: GenerationRequest) -> None:
    async with stack.dispatcher.generate(wanted):
        pass


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (salted(), "do not support caches kept apart, by 'cache_salt' or for the tenants of keys."),
        (request(grammar="x"), "do not support answers that must have a form."),
        (
            request(allowed_token_ids=(1,), grammar="x"),
            "do not support 'allowed_token_ids', answers that must have a form.",
        ),
        (embedding_request(PROMPT), "do not support embeddings."),
        (pair(), "do not support embeddings, pairs of texts whose tokens have types."),
    ],
)
async def test_what_no_worker_knows_is_refused_in_words_and_not_waited_for(wanted: GenerationRequest, words: str):
    async with running(prefill_worker(), decode_worker(), no_worker_wait_s=3600) as stack:
        with pytest.raises(Unsupported) as refused:
            await generate(stack, wanted)
        assert stack.rows == []
    answer = from_generation_error(refused.value, "prompt")
    assert answer.status == 501
    assert answer.message.endswith(words)
    assert answer.headers["x-should-retry"] == "false"


async def test_while_a_worker_is_not_there_it_may_be_one_that_knows():
    async with running(decode_worker(), addresses=(NOBODY,), no_worker_wait_s=0.05) as stack:
        with pytest.raises(Unavailable):
            await generate(stack, salted())


async def test_a_worker_of_the_other_role_says_nothing_of_what_is_to_come():
    async with running(prefill_worker(), no_worker_wait_s=0.05) as stack:
        with pytest.raises(Unavailable):
            await generate(stack, salted())
    async with running(decode_worker(), no_worker_wait_s=0.05) as stack:
        with pytest.raises(Unavailable):
            await generate(stack, embedding_request(PROMPT))


async def test_workers_that_drain_may_have_followers_that_know():
    decode = decode_worker()
    async with running(decode, no_worker_wait_s=0.05) as stack:
        decode.say(empty_frame(load=Load(available_blocks=64, draining=True)))
        await eventually(lambda: stack.live[0]["draining"])
        with pytest.raises(Unavailable):
            await generate(stack, salted())


async def test_what_a_worker_knew_that_is_gone_is_waited_for():
    old, new = decode_worker(), decode_worker(OTHER_DECODE, knows=SALTED)
    async with running(old, new, handoff=HandoffMode.NEVER, no_worker_wait_s=0.05) as stack:
        await generate(stack, salted())
        new.refuses = "gone"
        new.break_stream()
        await stack.connected(1)
        stack.dispatcher.set_addresses([old.address])  # nobody else is to come, as far as is known
        with pytest.raises(Unavailable):
            await generate(stack, salted())
        await generate(stack, request())


async def test_a_request_that_waits_is_served_after_news():
    decode = decode_worker()
    async with running(decode, addresses=(NOBODY,), handoff=HandoffMode.NEVER) as stack:
        waiting = asyncio.create_task(generate(stack, salted()))
        await eventually(lambda: [row["phase"] for row in stack.rows] == ["waiting"])
        decode.say(WorkerNews(frozenset({CACHE_SALT, ALLOWED_TOKEN_IDS})))
        assert (await decode.submit()).capsule.cache_salt == "s"
        await waiting
        assert stack.live[0]["knows"] == [ALLOWED_TOKEN_IDS, CACHE_SALT]


async def test_news_take_away_what_a_worker_knew():
    decode, other = decode_worker(knows=SALTED), decode_worker(OTHER_DECODE, knows=SALTED)
    async with running(decode, other, handoff=HandoffMode.NEVER) as stack:
        decode.say(WorkerNews(frozenset()))
        await eventually(lambda: sorted(len(worker["knows"]) for worker in stack.live) == [0, 1])
        for _ in range(4):
            await generate(stack, salted())
        await eventually(lambda: len(other.submits) == 4)
        assert not decode.submits


async def test_news_tell_the_size_of_embeddings():
    prefill = prefill_worker()
    async with running(prefill, addresses=(NOBODY,)) as stack:
        asked = asyncio.create_task(stack.dispatcher.until_embedding_size_known())
        await asyncio.sleep(0)
        prefill.say(WorkerNews(frozenset({"embeddings"}), embedding_size=5))
        assert await asked == 5


def test_a_capsule_needs_what_it_asks_for():
    capsule, form = request().capsules[0], request(grammar="x", logprob_token_ids=(3,), num_logprobs=1).capsules[0]
    assert capsule.needs == frozenset()
    assert form.needs == {GRAMMAR, "logprob_token_ids"}
    assert embedding_request(PROMPT).capsules[0].needs == {"embeddings"}
    assert pair().capsules[0].needs == {"embeddings", "token_types"}


def test_every_capability_has_words_and_a_name_of_its_own():
    names = [each.name for each in CAPABILITIES]
    assert len(set(names)) == len(names)
    assert all(in_words(frozenset({name})) for name in names)
