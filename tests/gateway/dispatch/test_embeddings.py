"""Embeddings on the dispatch side: prefill workers make them, and another one where the first fails."""

import asyncio
from functools import partial

import numpy as np
import pytest

from services.config import HandoffMode, Pooling, WorkerRole
from services.gateway.api.generation import Expired, Failed, Unavailable, Unsupported
from services.gateway.dispatch.retries import MAX_ATTEMPTS
from services.protocol.messages import Submit
from services.protocol.outcomes import FailureCode, FinishReason
from tests.gateway.dispatch_stack import (
    PATIENT_DEADLINES_S,
    PROMPT,
    decode_worker,
    embedding_request,
    eventually,
    first,
    prefill_worker,
    running,
)
from tests.gateway.scripted_worker import ScriptedWorker, empty_frame, serving, tokens_of, worker_hello

SIZE = 3
OTHER_PREFILL = 0xF2


def embedding_worker() -> ScriptedWorker:
    return prefill_worker(embedding_size=SIZE)


def other_embedding_worker() -> ScriptedWorker:
    return ScriptedWorker(worker_hello(WorkerRole.PREFILL, OTHER_PREFILL, embedding_size=SIZE))


@pytest.mark.parametrize("handoff", HandoffMode)
async def test_a_prefill_worker_alone_embeds(handoff: HandoffMode):
    prefill, decode = embedding_worker(), decode_worker()
    async with running(prefill, decode, handoff=handoff) as stack:
        assert await stack.dispatcher.until_embedding_size_known() == SIZE
        async with stack.dispatcher.generate(embedding_request(PROMPT, pooling=Pooling.MEAN)) as generation:
            submit = await prefill.submit()
            assert (submit.handoff, submit.seeds, submit.capsule.pooling) == (None, (), Pooling.MEAN)
            assert tokens_of(submit.capsule) == PROMPT
            prefill.say_embedding(submit, [1, 2, 3], cached=4)
            delta = await first(generation)
            assert delta.embedding is not None
            assert delta.embedding.tolist() == [1, 2, 3]
            assert (delta.tokens, delta.finish, delta.cached_tokens) == ([], FinishReason.LENGTH, 4)
        assert stack.rows == []
        assert stack.counts.ends == {"finished": 1}
        assert stack.counts.plans == {"embedding": 1}
        assert not stack.counts.handoffs
        assert not prefill.aborts
        assert not decode.submits


async def test_inputs_are_choices_of_their_own():
    prefill = embedding_worker()
    async with running(prefill) as stack:
        prompts = [[1, 2, 3], [4, 5], [6]]
        async with stack.dispatcher.generate(embedding_request(*prompts)) as generation:
            submits = [await prefill.submit(number) for number in (1, 2, 3)]
            assert [tokens_of(submit.capsule) for submit in submits] == prompts
            for submit in submits[::-1]:
                prefill.say_embedding(submit, [submit.handle, 0, 0])
            found = {delta.choice: delta for delta in [await first(generation) for _ in prompts]}
            assert [float(found[choice].embedding[0]) for choice in range(3)] == [s.handle for s in submits]  # type: ignore[index]


async def test_a_worker_that_is_lost_has_the_prompt_embedded_elsewhere():
    here, there = embedding_worker(), other_embedding_worker()
    async with running(here, there) as stack, stack.dispatcher.generate(embedding_request(PROMPT)) as generation:
        reading = asyncio.create_task(first(generation))  # which starts new attempts
        await eventually(lambda: bool(here.submits or there.submits))
        lost, left = (here, there) if here.submits else (there, here)
        lost.refuses = "gone"
        lost.break_stream()
        again = await left.submit()
        assert tokens_of(again.capsule) == PROMPT
        left.say_embedding(again, [4, 5, 6])
        delta = await reading
        assert delta.embedding is not None
        assert delta.embedding.tolist() == [4, 5, 6]


async def test_after_failures_in_a_row_the_request_fails():
    prefill = embedding_worker()
    async with running(prefill) as stack, stack.dispatcher.generate(embedding_request(PROMPT)) as generation:
        reading = asyncio.create_task(first(generation))
        for number in range(1, MAX_ATTEMPTS + 1):
            prefill.fail(await prefill.submit(number), FailureCode.HANDOFF)
        with pytest.raises(Failed):
            await reading


async def test_what_a_worker_refuses_is_tried_nowhere_else():
    prefill, other = embedding_worker(), other_embedding_worker()
    async with running(prefill, other) as stack, stack.dispatcher.generate(embedding_request(PROMPT)) as generation:
        reading = asyncio.create_task(first(generation))
        await eventually(lambda: bool(prefill.submits or other.submits))
        asked = prefill if prefill.submits else other
        asked.fail(await asked.submit(), FailureCode.UNSUPPORTED)
        with pytest.raises(Unsupported) as refused:
            await reading
        assert not refused.value.restricted
        assert len(prefill.submits) + len(other.submits) == 1


async def test_a_token_is_no_embedding():
    """A worker that samples one has not understood the request: the attempt fails, and the next one is made."""
    prefill = embedding_worker()
    async with running(prefill) as stack, stack.dispatcher.generate(embedding_request(PROMPT)) as generation:
        reading = asyncio.create_task(first(generation))
        prefill.say_tokens(await prefill.submit(), [7], finish=FinishReason.LENGTH, cached=0)
        prefill.say_embedding(await prefill.submit(2), [1, 1, 1])
        assert (await reading).tokens == []


async def test_an_embedding_is_no_token():
    """Of an attempt that generates, or of one that has ended, an embedding changes nothing."""
    prefill = embedding_worker()
    async with running(prefill) as stack:
        async with stack.dispatcher.generate(embedding_request(PROMPT)):
            over: Submit = await prefill.submit()
        await prefill.aborted(over.handle)
        async with stack.dispatcher.generate(embedding_request(PROMPT)) as generation:
            prefill.say_embedding(over, [9, 9, 9])
            prefill.say_embedding(await prefill.submit(2), [1, 2, 3])
            delta = await first(generation)
            assert np.array_equal(delta.embedding, np.array([1, 2, 3], np.float32))  # type: ignore[arg-type]


async def test_a_fleet_whose_prefill_workers_do_not_embed_has_nothing_to_wait_for():
    """Those of an older version."""
    async with running(prefill_worker(), decode_worker(), no_worker_wait_s=3600) as stack:
        with pytest.raises(Unsupported):
            await stack.dispatcher.until_embedding_size_known()
        with pytest.raises(Unsupported):
            async with stack.dispatcher.generate(embedding_request(PROMPT)):
                pass
        assert stack.rows == []


async def test_decode_workers_alone_leave_the_embedding_to_a_worker_that_does_not_come():
    async with running(decode_worker(), no_worker_wait_s=0.05) as stack:
        with pytest.raises(Unavailable):
            await stack.dispatcher.until_embedding_size_known()


async def test_a_worker_that_comes_in_time_is_waited_for():
    async with running(decode_worker()) as stack, serving(embedding_worker()) as prefill:
        asked = asyncio.create_task(stack.dispatcher.until_embedding_size_known())
        stack.dispatcher.set_addresses([*[worker.address for worker in stack.workers], prefill.address])
        assert await asked == SIZE


async def test_a_deadline_ends_the_work():
    prefill = embedding_worker()
    async with running(prefill) as stack:
        for timeout_s in PATIENT_DEADLINES_S:
            async with stack.dispatcher.generate(embedding_request(PROMPT, timeout_s=timeout_s)) as generation:
                with pytest.raises(Expired):
                    await first(generation)
                if prefill.submits:  # it had come to the worker by then
                    await prefill.aborted(prefill.submits[-1].handle)
                    return
    raise AssertionError("it came to no worker")


def was_sent(workers: list[ScriptedWorker], times: int) -> bool:
    return sum(len(worker.submits) for worker in workers) == times


async def test_a_prompt_that_ends_workers_is_computed_apart_and_then_fails():
    """Three prefill workers in a row end with it; the requests beside it are served."""
    workers = [
        ScriptedWorker(worker_hello(WorkerRole.PREFILL, 0xF0 + number, embedding_size=SIZE)) for number in range(4)
    ]
    async with running(*workers) as stack, stack.dispatcher.generate(embedding_request(PROMPT)) as generation:
        reading = asyncio.create_task(first(generation))
        for deaths in range(1, 4):
            await eventually(partial(was_sent, workers, deaths))
            lost = next(worker for worker in workers if worker.submits and not worker.refuses)
            lost.refuses = "gone"
            lost.break_stream()
            await stack.connected(4 - deaths)
            for worker in workers:
                if not worker.refuses:
                    worker.say(empty_frame())  # it lives
        with pytest.raises(Failed, match="3 workers in a row"):
            await reading
