"""Several choices of one request, and logprobs of its prompt, on the dispatch side."""

import asyncio

import numpy as np
import pytest

from kvtransfer.ids import WorkerId
from services.gateway.api.generation import (
    Delta,
    RunningRequest,
)
from services.protocol.frames import Frame, PackedLogprobs
from services.protocol.messages import HandTo
from services.protocol.outcomes import FailureCode, FinishReason
from tests.gateway.dispatch_stack import (
    DECODE,
    PROMPT,
    decode_worker,
    eventually,
    first,
    prefill_worker,
    read_all,
    request,
    running,
)
from tests.gateway.scripted_worker import (
    continuation,
    row_frame,
    tokens_of,
)

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


async def read_choices(generation: RunningRequest, num_choices: int) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in range(num_choices)]
    going_on = set(range(num_choices))
    async with asyncio.timeout(120):
        while going_on:
            delta = await generation.next()
            assert delta.choice in going_on
            tokens[delta.choice] += delta.tokens
            if delta.finish:
                going_on.remove(delta.choice)
    return tokens


async def test_choices_are_sent_as_one_and_come_apart_after_the_first_token():
    """One ends at its first token, one is ended by its client, one goes through decode."""
    prefill, decode = prefill_worker(), decode_worker()
    tokens = continuation(PROMPT, 4)
    async with running(prefill, decode) as stack, stack.dispatcher.generate(request(4, seeds=(7, 8, 9))) as generation:
        at_prefill, at_decode = await prefill.submit(), await decode.submit()
        assert (at_prefill.handle, at_prefill.seeds, at_prefill.handoff) == (1, (7, 8, 9), HandTo(WorkerId(DECODE)))
        assert (at_decode.handle, at_decode.seeds) == (1, (7, 8, 9))
        prefill.say(row_frame(2, len(PROMPT), tokens[:1], finish=STOP, cached=4))
        assert await first(generation) == Delta(tokens[:1], None, STOP, 4, choice=0)
        await decode.aborted(2)
        prefill.say(row_frame(3, len(PROMPT), tokens[:1], cached=4))
        assert (await first(generation)).choice == 1
        generation.end(1)
        await prefill.aborted(3)
        await decode.aborted(3)
        decode.say(row_frame(4, len(PROMPT), tokens, finish=LENGTH))
        delta = await first(generation)
        assert (delta.choice, delta.tokens, delta.finish) == (2, tokens, LENGTH)
        assert stack.rows == []
        assert (stack.counts.attempts, stack.counts.handoffs) == (1, {"completed": 1})
        assert stack.counts.cached == [(0, 4)]
        assert (prefill.aborts, decode.aborts) == ([3], [2, 3])


async def test_choices_go_on_one_by_one_after_their_handoff_failed():
    prefill, decode = prefill_worker(), decode_worker()
    tokens = continuation(PROMPT, 4)
    async with running(prefill, decode) as stack, stack.dispatcher.generate(request(4, seeds=(7, 8))) as generation:
        submit = await decode.submit()
        prefill.say(row_frame(2, len(PROMPT), tokens[:1]))
        await eventually(lambda: stack.rows[0]["tokens_delivered"] == 1)
        reading = asyncio.create_task(read_choices(generation, 2))
        decode.fail(submit, FailureCode.HANDOFF)
        again = [await decode.submit(2), await decode.submit(3)]
        assert sorted((tokens_of(one.capsule), one.capsule.sampling.seed, one.seeds) for one in again) == [
            (PROMPT, 8, ()),
            (PROMPT + tokens[:1], 7, ()),
        ]
        assert all(one.handoff is None for one in again), "the pair is left alone"
        for one in again:
            done = len(one.capsule.token_ids) - len(PROMPT)
            decode.say_tokens(one, tokens[done:], finish=LENGTH)
        assert await reading == [tokens, tokens]
        assert 1 in prefill.aborts
        assert stack.counts.attempts == 3
        assert stack.counts.handoffs == {"failed_handoff": 1}


async def test_a_client_that_leaves_ends_the_prompt_and_all_its_choices():
    prefill, decode = prefill_worker(), decode_worker()
    async with running(prefill, decode) as stack:
        async with stack.dispatcher.generate(request(seeds=(7, 8))):
            await decode.submit()
        for worker in (prefill, decode):
            await worker.aborted(1)
            assert worker.aborts == [2, 3, 1]
        assert stack.counts.handoffs == {"abandoned": 1}


async def test_choices_that_do_not_fit_together_are_tried_alone():
    decode = decode_worker()
    tokens = continuation(PROMPT, 2)
    async with running(decode) as stack, stack.dispatcher.generate(request(2, seeds=(7, 8))) as generation:
        reading = asyncio.create_task(read_choices(generation, 2))
        decode.fail(await decode.submit(), FailureCode.TOO_LARGE)
        for number in (2, 3):
            submit = await decode.submit(number)
            assert submit.seeds == ()
            decode.say_tokens(submit, tokens, finish=LENGTH)
        assert await reading == [tokens, tokens]


async def test_more_choices_than_a_worker_has_slots_go_in_parts():
    """A scripted worker has eight slots: one for the prompt, seven for choices."""
    decode = decode_worker()
    async with running(decode) as stack, stack.dispatcher.generate(request(seeds=tuple(range(9)))):
        both = await decode.submit(1), await decode.submit(2)
        assert [submit.seeds for submit in both] == [tuple(range(7)), (7, 8)]
        assert [submit.handle for submit in both] == [1, 9]


def scores(prompt: list[int]) -> PackedLogprobs:
    count = len(prompt) - 1
    return PackedLogprobs(
        np.array([0], np.int32), -np.arange(count, dtype=np.float32), np.zeros(0, np.int32), np.zeros(0, np.float32)
    )


def scores_frame(handle: int, prompt: list[int]) -> Frame:
    """Logprobs of a prompt's tokens from the second on."""
    frame = row_frame(handle, 1, prompt[1:])
    frame.logprobs = scores(prompt)
    return frame


@pytest.mark.parametrize("seeds", [(7,), (7, 8)])
async def test_a_prompt_s_logprobs_come_before_any_token(seeds: tuple[int, ...]):
    """A group gets them under the prompt's handle, for each choice."""
    prefill, decode = prefill_worker(), decode_worker()
    tokens = continuation(PROMPT, 2)
    wanted = request(2, seeds=seeds, num_prompt_logprobs=0)
    async with running(prefill, decode) as stack, stack.dispatcher.generate(wanted) as generation:
        submit = await prefill.submit()
        handles = range(submit.handle + bool(submit.seeds), submit.last_handle + 1)
        for handle in handles:
            prefill.say(row_frame(handle, len(PROMPT), tokens[:1]))
        reading = asyncio.create_task(generation.next())
        await eventually(lambda: all(row["tokens_delivered"] for row in stack.rows))
        await asyncio.sleep(0.02)
        assert not reading.done()
        prefill.say(scores_frame(submit.handle, PROMPT))
        for handle in handles:
            prefill.say(row_frame(handle, len(PROMPT), tokens[:1]))
        deltas = [await reading] + [await first(generation) for _ in seeds[1:]]
        for handle in handles:  # not before: its stream may be quicker
            decode.say(row_frame(handle, len(PROMPT), tokens, finish=LENGTH))
        for delta in deltas:
            assert delta.prompt_logprobs is not None
            assert [score.sampled for score in delta.prompt_logprobs] == [-float(at) for at in range(len(PROMPT) - 1)]


async def test_decode_ahead_of_the_prompt_s_logprobs_waits_for_them():
    """The prefill worker's stream may be the slower one by any time."""
    prefill, decode = prefill_worker(), decode_worker()
    tokens = continuation(PROMPT, 3)
    wanted = request(3, num_prompt_logprobs=0)
    async with running(prefill, decode) as stack, stack.dispatcher.generate(wanted) as generation:
        reading = asyncio.create_task(read_all(generation))
        at_decode, at_prefill = await decode.submit(), await prefill.submit()
        decode.say_tokens(at_decode, tokens[:2])
        decode.say_tokens(at_decode, tokens[2:], after=2, finish=LENGTH)
        await asyncio.sleep(0.05)
        assert not reading.done()
        prefill.say(scores_frame(at_prefill.handle, PROMPT))
        prefill.say_tokens(at_prefill, tokens[:1])
        assert (await reading)[0] == tokens
        assert stack.counts.attempts == 1
        assert stack.counts.handoffs == {"completed": 1}


async def test_an_answer_that_ends_before_its_prompt_s_logprobs_came_begins_anew():
    decode = decode_worker()
    tokens = continuation(PROMPT, 2)
    async with running(decode) as stack, stack.dispatcher.generate(request(2, num_prompt_logprobs=0)) as generation:
        reading = asyncio.create_task(read_all(generation))
        decode.say_tokens(await decode.submit(), tokens, finish=LENGTH)
        again = await decode.submit(2)
        decode.say(scores_frame(again.handle, PROMPT))
        decode.say_tokens(again, tokens, finish=LENGTH)
        assert (await reading)[0] == tokens
        assert stack.counts.attempts == 2
