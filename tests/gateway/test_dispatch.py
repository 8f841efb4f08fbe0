"""The dispatch side against real peers: workers that speak the protocol over real streams."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import structlog

from services.config import HandoffMode, WorkerRole
from services.gateway import dispatch
from services.gateway.dispatch import Dispatcher
from services.gateway.generation import (
    Delta,
    Expired,
    Failed,
    Generation,
    GenerationRequest,
    TooLarge,
    Unavailable,
)
from services.gateway.ledger import MAX_ATTEMPTS
from services.gateway.links import FIRST_BACKOFF_S
from services.gateway.router import Policy
from services.prefix_index.memory import MemoryPrefixIndex
from services.protocol.block_hash import block_hashes, root_hash
from services.protocol.capsule import Capsule
from services.protocol.frames import Frame, Load, PackedLogprobs
from services.protocol.messages import MAX_HANDLE, BlockEvents, HandTo, TakeFrom
from services.protocol.outcomes import FailureCode, FinishReason
from services.protocol.sampling import SamplingParams
from tests.gateway.peer import (
    PeerWorker,
    continuation,
    empty_frame,
    row_frame,
    serving,
    tokens_of,
    worker_hello,
)

PREFILL, DECODE, OTHER_DECODE = 0xF1, 0xD1, 0xD2
PROMPT = list(range(100, 110))
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class Counts:
    """A DispatchObserver that remembers."""

    def __init__(self) -> None:
        self.handoffs: Counter[str] = Counter()
        self.attempts = 0
        self.cached: list[tuple[int, int]] = []
        self.bytes_moved = 0
        self.loads: dict[str, Load] = {}

    def attempt_started(self) -> None:
        self.attempts += 1

    def handoff_ended(self, outcome: str) -> None:
        self.handoffs[outcome] += 1

    def cached_tokens(self, predicted: int, actual: int) -> None:
        self.cached.append((predicted, actual))

    def worker_load(self, worker: str, role: WorkerRole, load: Load) -> None:
        self.loads[worker] = load

    def worker_gone(self, worker: str, role: WorkerRole) -> None:
        self.loads.pop(worker, None)

    def kv_bytes_moved(self, count: int) -> None:
        self.bytes_moved += count


class Stack:
    """A dispatcher and its peers."""

    def __init__(self, dispatcher: Dispatcher, counts: Counts, workers: list[PeerWorker]) -> None:
        self.dispatcher = dispatcher
        self.counts = counts
        self.workers = workers

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = cast(Any, self.dispatcher.describe()["rows"])
        return rows

    async def connected(self, count: int, timeout_s: float = 120.0) -> None:
        await eventually(lambda: len(self.live) == count, timeout_s)

    @property
    def live(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = cast(Any, self.dispatcher.describe()["workers"])
        return workers


async def eventually(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(
    *workers: PeerWorker,
    handoff: HandoffMode = HandoffMode.ALWAYS,
    max_waiting: int = 100,
    addresses: tuple[str, ...] = (),
) -> AsyncIterator[Stack]:
    async with AsyncExitStack() as exits:
        for worker in workers:
            await exits.enter_async_context(serving(worker))
        counts = Counts()
        named = [worker.address for worker in workers] + list(addresses)
        dispatcher = Dispatcher(named, Policy(handoff, 64), max_waiting, MemoryPrefixIndex(), counts)
        task = asyncio.create_task(dispatcher.run())
        try:
            stack = Stack(dispatcher, counts, list(workers))
            await stack.connected(len(workers))
            yield stack
        finally:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


def prefill_peer(**hello: Any) -> PeerWorker:
    return PeerWorker(worker_hello(WorkerRole.PREFILL, PREFILL, **hello))


def decode_peer(incarnation: int = DECODE, **hello: Any) -> PeerWorker:
    return PeerWorker(worker_hello(WorkerRole.DECODE, incarnation, **hello))


def request(
    max_tokens: int = 8,
    timeout_s: float = 300.0,
    prompt: list[int] = PROMPT,
    seeds: tuple[int, ...] = (0,),
    **sampling: Any,
) -> GenerationRequest:
    """One choice for each seed."""
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    token_ids = np.array(prompt, np.int32)
    capsules = tuple(Capsule(token_ids, len(prompt), replace(params, seed=seed)) for seed in seeds)
    return GenerationRequest("request-1", capsules, timeout_s, len(seeds))


async def read_all(generation: Generation) -> tuple[list[int], Delta]:
    tokens: list[int] = []
    async with asyncio.timeout(120):
        while True:
            delta = await generation.next()
            tokens += delta.tokens
            if delta.finish:
                return tokens, delta


async def first(generation: Generation) -> Delta:
    async with asyncio.timeout(120):
        return await generation.next()


async def test_a_pair_gets_the_request_at_once_and_under_one_handle():
    prefill, decode = prefill_peer(), decode_peer()
    async with running(prefill, decode) as stack, stack.dispatcher.generate(request()):
        at_prefill, at_decode = await prefill.submit(), await decode.submit()
        assert at_prefill.handle == at_decode.handle == 1
        assert at_prefill.handoff == HandTo(DECODE)
        assert at_decode.handoff == TakeFrom(prefill.address, PREFILL)
        assert tokens_of(at_decode.capsule) == PROMPT
        assert at_decode.request_id == "request-1"
        assert 0 < at_decode.timeout_s <= 300


async def test_tokens_of_a_pair_come_once_and_in_order():
    prefill, decode = prefill_peer(), decode_peer()
    tokens = continuation(PROMPT, 8)
    async with running(prefill, decode) as stack:
        async with stack.dispatcher.generate(request()) as generation:
            submit = await decode.submit()
            prefill.say_tokens(submit, tokens[:1], cached=4)
            delta = await first(generation)
            assert (delta.tokens, delta.cached_tokens) == (tokens[:1], 4)
            assert stack.rows[0]["phase"] == "handoff"
            decode.say_tokens(submit, tokens[:1], cached=0)
            decode.say_tokens(submit, tokens[1:4], after=1)
            decode.say_tokens(submit, tokens[2:8], after=2, finish=LENGTH)
            rest, last = await read_all(generation)
            assert rest == tokens[1:]
            assert (last.finish, last.cached_tokens) == (LENGTH, 4)
        assert stack.rows == []
        assert stack.counts.handoffs == {"completed": 1}
        assert stack.counts.cached == [(0, 4)]
        await asyncio.sleep(0.02)
        assert prefill.aborts == decode.aborts == []


async def read_choices(generation: Generation, num_choices: int) -> list[list[int]]:
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
    prefill, decode = prefill_peer(), decode_peer()
    tokens = continuation(PROMPT, 4)
    async with running(prefill, decode) as stack, stack.dispatcher.generate(request(4, seeds=(7, 8, 9))) as generation:
        at_prefill, at_decode = await prefill.submit(), await decode.submit()
        assert (at_prefill.handle, at_prefill.seeds, at_prefill.handoff) == (1, (7, 8, 9), HandTo(DECODE))
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
    prefill, decode = prefill_peer(), decode_peer()
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
        for one in again:
            done = len(one.capsule.token_ids) - len(PROMPT)
            decode.say_tokens(one, tokens[done:], finish=LENGTH)
        assert await reading == [tokens, tokens]
        assert 1 in prefill.aborts
        assert stack.counts.attempts == 3
        assert stack.counts.handoffs == {"failed_handoff": 1, "completed": 2}


async def test_a_client_that_leaves_ends_the_prompt_and_all_its_choices():
    prefill, decode = prefill_peer(), decode_peer()
    async with running(prefill, decode) as stack:
        async with stack.dispatcher.generate(request(seeds=(7, 8))):
            await decode.submit()
        for worker in (prefill, decode):
            await worker.aborted(1)
            assert worker.aborts == [2, 3, 1]
        assert stack.counts.handoffs == {"abandoned": 1}


async def test_choices_that_do_not_fit_together_are_tried_alone():
    decode = decode_peer()
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
    """A peer has eight slots: one for the prompt, seven for choices."""
    decode = decode_peer()
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
    """Of a group under the prompt's handle, for each choice."""
    prefill, decode = prefill_peer(), decode_peer()
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
            decode.say(row_frame(handle, len(PROMPT), tokens, finish=LENGTH))
        deltas = [await reading] + [await first(generation) for _ in seeds[1:]]
        for delta in deltas:
            assert delta.prompt_logprobs is not None
            assert [score.sampled for score in delta.prompt_logprobs] == [-float(at) for at in range(len(PROMPT) - 1)]


async def test_decode_ahead_of_the_prompt_s_logprobs_costs_an_attempt():
    prefill, decode = prefill_peer(), decode_peer()
    tokens = continuation(PROMPT, 2)
    wanted = request(2, num_prompt_logprobs=0)
    async with running(prefill, decode) as stack, stack.dispatcher.generate(wanted) as generation:
        reading = asyncio.create_task(read_all(generation))
        decode.say_tokens(await decode.submit(), tokens, finish=LENGTH)
        again = await prefill.submit(2)
        assert again.capsule.sampling.num_prompt_logprobs == 0
        prefill.say(scores_frame(again.handle, PROMPT))
        prefill.say_tokens(again, tokens[:1])
        await eventually(lambda: stack.rows[0]["tokens_delivered"] == 1)
        decode.say_tokens(await decode.submit(2), tokens, finish=LENGTH)
        assert (await reading)[0] == tokens


async def test_all_tokens_since_the_last_call_come_in_one_delta():
    decode = decode_peer()
    tokens = continuation(PROMPT, 8)
    async with running(decode) as stack, stack.dispatcher.generate(request()) as generation:
        submit = await decode.submit()
        for at, token in enumerate(tokens):
            decode.say_tokens(submit, [token], after=at, finish=LENGTH if at == 7 else FinishReason.NONE)
        await eventually(lambda: stack.rows == [])
        delta = await first(generation)
        assert (delta.tokens, delta.finish) == (tokens, LENGTH)


async def test_a_request_that_ends_at_its_first_token_is_aborted_at_decode():
    prefill, decode = prefill_peer(), decode_peer()
    async with running(prefill, decode) as stack, stack.dispatcher.generate(request()) as generation:
        submit = await prefill.submit()
        prefill.say_tokens(submit, [2], finish=STOP, cached=0)
        assert await read_all(generation) == ([2], Delta([2], None, STOP, 0))
        await decode.aborted(submit.handle)
        assert prefill.aborts == []
        assert stack.counts.handoffs == {"not_needed": 1}


async def test_a_request_for_one_token_goes_to_prefill_alone():
    prefill, decode = prefill_peer(), decode_peer()
    async with running(prefill, decode) as stack, stack.dispatcher.generate(request(max_tokens=1)) as generation:
        submit = await prefill.submit()
        assert submit.handoff is None
        prefill.say_tokens(submit, [7], finish=LENGTH, cached=0)
        assert (await read_all(generation))[0] == [7]
        assert decode.submits == []


async def test_logprobs_come_with_their_tokens_and_a_token_without_them_is_not_delivered():
    prefill, decode = prefill_peer(), decode_peer()
    tokens = continuation(PROMPT, 3)
    async with (
        running(prefill, decode) as stack,
        stack.dispatcher.generate(request(max_tokens=3, num_logprobs=1)) as generation,
    ):
        submit = await decode.submit()
        prefill.say_tokens(submit, tokens[:1], cached=0)
        await eventually(lambda: stack.rows[0]["phase"] == "handoff")
        assert stack.rows[0]["tokens_delivered"] == 0
        decode.say_tokens(submit, tokens[:1], logprobs=True)
        delta = await first(generation)
        assert delta.tokens == tokens[:1]
        assert delta.logprobs is not None
        assert [entry.top for entry in delta.logprobs] == [((tokens[0], 0.0),)]
        decode.say_tokens(submit, tokens[1:], after=1, logprobs=True, finish=LENGTH)
        delta = await first(generation)
        assert delta.logprobs is not None
        assert [entry.top[0][0] for entry in delta.logprobs] == delta.tokens == tokens[1:]


@pytest.mark.parametrize("delivered", [0, 1, 4])
async def test_a_request_continues_with_the_same_tokens_after_the_stream_breaks(delivered: int):
    """Whatever was delivered is the start of the next attempt, under a new handle."""
    decode = decode_peer()
    tokens = continuation(PROMPT, 8)
    async with running(decode) as stack, stack.dispatcher.generate(request()) as generation:
        submit = await decode.submit()
        got: list[int] = []
        if delivered:
            decode.say_tokens(submit, tokens[:delivered], cached=8)
            got += (await first(generation)).tokens
        reading = asyncio.create_task(read_all(generation))
        decode.break_stream()
        again = await decode.submit(2)
        assert tokens_of(again.capsule) == PROMPT + tokens[:delivered]
        assert again.capsule.num_prompt == len(PROMPT)
        assert again.handle > submit.handle
        assert decode.hellos[1].gateway == decode.hellos[0].gateway
        assert [hello.highest_handle for hello in decode.hellos] == [0, submit.handle]
        after = continuation(tokens_of(again.capsule), 8 - delivered)
        decode.say_tokens(again, after, finish=LENGTH, cached=8)
        assert got + (await reading)[0] == tokens


async def test_rows_of_a_handle_that_was_given_up_are_dropped():
    decode, other = decode_peer(), decode_peer(OTHER_DECODE)
    async with running(decode, other) as stack, stack.dispatcher.generate(request()) as generation:
        reading = asyncio.create_task(read_all(generation))
        await eventually(lambda: bool(decode.submits or other.submits))
        former, latter = (decode, other) if decode.submits else (other, decode)
        submit = former.submits[0]
        former.fail(submit, FailureCode.HANDOFF)
        again = await eventually_next(former, latter, submit.handle)
        former.say_tokens(submit, [1, 2, 3])
        worker = former if again in former.submits else latter
        worker.say_tokens(again, continuation(PROMPT, 8), finish=LENGTH)
        assert (await reading)[0] == continuation(PROMPT, 8)


async def eventually_next(left: PeerWorker, right: PeerWorker, after: int) -> Any:
    """The first submit at either worker with a handle above `after`."""
    found: list[Any] = []

    def look() -> bool:
        found[:] = [submit for submit in left.submits + right.submits if submit.handle > after]
        return bool(found)

    await eventually(look)
    return found[0]


async def test_prefill_lost_before_decodes_first_row_means_a_new_attempt():
    prefill, decode = prefill_peer(), decode_peer()
    tokens = continuation(PROMPT, 8)
    async with running(prefill, decode) as stack, stack.dispatcher.generate(request()) as generation:
        submit = await decode.submit()
        prefill.say_tokens(submit, tokens[:1], cached=0)
        assert (await first(generation)).tokens == tokens[:1]
        reading = asyncio.create_task(read_all(generation))
        prefill.break_stream()
        await decode.aborted(submit.handle)
        again = await decode.submit(2)
        assert tokens_of(again.capsule) == PROMPT + tokens[:1]
        decode.say_tokens(again, tokens[1:], finish=LENGTH)
        assert (await reading)[0] == tokens[1:]
        assert stack.counts.handoffs["failed_worker_lost"] == 1


@pytest.mark.parametrize("how", ["lost", "failed"])
async def test_prefills_word_ends_with_decodes_first_row(how: str):
    prefill, decode = prefill_peer(), decode_peer()
    tokens = continuation(PROMPT, 8)
    async with running(prefill, decode) as stack, stack.dispatcher.generate(request()) as generation:
        submit = await decode.submit()
        prefill.say_tokens(submit, tokens[:1], cached=0)
        decode.say_tokens(submit, tokens[:1])
        await eventually(lambda: stack.rows[0]["phase"] == "decode")
        if how == "lost":
            prefill.break_stream()
            await prefill.until(lambda: len(prefill.hellos) == 2)
        else:
            prefill.fail(submit, FailureCode.HANDOFF)
            prefill.say(empty_frame(load=Load()))
            await eventually(lambda: prefill.address in stack.counts.loads)
        decode.say_tokens(submit, tokens[1:], after=1, finish=LENGTH)
        assert (await read_all(generation))[0] == tokens
        assert len(decode.submits) == len(prefill.submits) == 1
        assert decode.aborts == []


async def test_a_failure_at_one_worker_aborts_the_other():
    prefill, decode = prefill_peer(), decode_peer()
    async with running(prefill, decode) as stack, stack.dispatcher.generate(request()) as generation:
        reading = asyncio.create_task(read_all(generation))
        for attempt in range(1, 5):
            submit = await decode.submit(attempt)
            assert (await prefill.submit(attempt)).handle == submit.handle
            failing, standing = (prefill, decode) if attempt % 2 else (decode, prefill)
            failing.fail(submit, FailureCode.HANDOFF)
            await standing.aborted(submit.handle)
        with pytest.raises(Failed):
            await reading
        handles = [submit.handle for submit in decode.submits]
        assert handles == sorted(set(handles))
        assert len(handles) == 4
        assert stack.counts.handoffs == {"failed_handoff": 4}
    assert stack.rows == []


async def test_a_reader_that_leaves_ends_the_request_at_both_workers():
    prefill, decode = prefill_peer(), decode_peer()
    async with running(prefill, decode) as stack:
        async with stack.dispatcher.generate(request()):
            submit = await decode.submit()
        await prefill.aborted(submit.handle)
        await decode.aborted(submit.handle)
        assert stack.rows == []
        assert stack.counts.handoffs == {"abandoned": 1}


async def test_a_cancelled_reader_ends_the_request_too():
    decode = decode_peer()
    async with running(decode) as stack:

        async def read() -> None:
            async with stack.dispatcher.generate(request()) as generation:
                await generation.next()

        reader = asyncio.create_task(read())
        submit = await decode.submit()
        reader.cancel()
        await decode.aborted(submit.handle)
        assert stack.rows == []


async def test_handles_rise_at_each_worker_and_are_never_used_twice():
    prefill, decode, other = prefill_peer(), decode_peer(), decode_peer(OTHER_DECODE)
    async with running(prefill, decode, other) as stack:

        async def one() -> None:
            async with stack.dispatcher.generate(request()):
                await asyncio.sleep(0.05)

        await asyncio.gather(*(one() for _ in range(20)))
        await eventually(lambda: len(prefill.submits) == 20 and len(decode.submits) + len(other.submits) == 20)
        handles = [[submit.handle for submit in worker.submits] for worker in (prefill, decode, other)]
        assert all(seen == sorted(seen) for seen in handles)
        assert sorted(handles[1] + handles[2]) == handles[0] == list(range(1, 21))
        assert min(len(handles[1]), len(handles[2])) == 10, "requests without a load are spread evenly"


async def test_not_now_costs_no_attempt():
    """A worker that is alone and refuses for a while is asked again, more often than attempts would allow."""
    decode = decode_peer()
    async with running(decode) as stack, stack.dispatcher.generate(request()) as generation:
        reading = asyncio.create_task(read_all(generation))
        for number in range(1, MAX_ATTEMPTS + 1):
            decode.fail(await decode.submit(number), FailureCode.NOT_NOW)
        submit = await decode.submit(MAX_ATTEMPTS + 1)
        decode.say_tokens(submit, continuation(PROMPT, 8), finish=LENGTH)
        assert (await reading)[0] == continuation(PROMPT, 8)


async def test_not_now_goes_to_another_worker_first():
    decode, other = decode_peer(), decode_peer(OTHER_DECODE)
    async with running(decode, other) as stack, stack.dispatcher.generate(request()) as generation:
        reading = asyncio.create_task(read_all(generation))
        await eventually(lambda: bool(decode.submits or other.submits))
        refusing, taking = (decode, other) if decode.submits else (other, decode)
        refusing.fail(refusing.submits[0], FailureCode.NOT_NOW)
        submit = await taking.submit()
        taking.say_tokens(submit, continuation(PROMPT, 8), finish=LENGTH)
        assert (await reading)[0] == continuation(PROMPT, 8)


async def test_too_large_is_refused_for_good():
    decode = decode_peer()
    async with running(decode) as stack, stack.dispatcher.generate(request()) as generation:
        reading = asyncio.create_task(read_all(generation))
        decode.fail(await decode.submit(), FailureCode.TOO_LARGE)
        with pytest.raises(TooLarge):
            await reading
        assert len(decode.submits) == 1


async def test_too_large_for_one_worker_goes_to_a_larger_one():
    small, large = decode_peer(num_blocks=8), decode_peer(OTHER_DECODE, num_blocks=64)
    async with running(small, large) as stack:
        large.say(empty_frame(load=Load(running=50, available_blocks=64)))
        await eventually(lambda: large.address in stack.counts.loads)
        async with stack.dispatcher.generate(request()) as generation:
            reading = asyncio.create_task(read_all(generation))
            small.fail(await small.submit(), FailureCode.TOO_LARGE)
            submit = await large.submit()
            large.say_tokens(submit, continuation(PROMPT, 8), finish=LENGTH)
            assert (await reading)[0] == continuation(PROMPT, 8)


async def test_a_prompt_that_fits_no_pool_is_refused_before_it_is_sent():
    decode = decode_peer(num_blocks=2)
    async with running(decode) as stack:
        with pytest.raises(TooLarge):
            async with stack.dispatcher.generate(request()):
                pass
        assert decode.submits == []
        assert stack.rows == []


async def test_ready_when_a_decode_worker_is_there_and_every_address_was_tried():
    decode = decode_peer()
    async with running(decode, addresses=("127.0.0.1:1",)) as stack:
        await eventually(stack.dispatcher.ready)
        assert stack.dispatcher.max_model_len == 256
        decode.refuses = "gone for good"
        decode.break_stream()
        await eventually(lambda: not stack.dispatcher.ready())


async def test_without_a_decode_worker_new_requests_are_unavailable_at_once():
    prefill = prefill_peer()
    async with running(prefill) as stack:
        assert not stack.dispatcher.ready()
        with pytest.raises(Unavailable):
            async with stack.dispatcher.generate(request()):
                pass
        async with stack.dispatcher.generate(request(max_tokens=1)) as generation:
            prefill.say_tokens(await prefill.submit(), [5], finish=LENGTH)
            assert (await read_all(generation))[0] == [5]


async def test_more_requests_than_allowed_are_refused_before_any_work():
    decode = decode_peer()
    async with running(decode, max_waiting=2) as stack:
        async with stack.dispatcher.generate(request()), stack.dispatcher.generate(request()):
            with pytest.raises(Unavailable):
                async with stack.dispatcher.generate(request()):
                    pass
            await decode.submit(2)
        async with stack.dispatcher.generate(request()):
            await decode.submit(3)
        assert len(decode.submits) == 3


async def test_the_deadline_ends_a_request_everywhere():
    prefill, decode = prefill_peer(), decode_peer()
    async with running(prefill, decode) as stack, stack.dispatcher.generate(request(timeout_s=0.2)) as generation:
        submit = await decode.submit()
        with pytest.raises(Expired):
            await first(generation)
        await prefill.aborted(submit.handle)
        await decode.aborted(submit.handle)


async def test_a_running_request_without_a_worker_waits_until_its_deadline():
    decode = decode_peer()
    async with running(decode) as stack, stack.dispatcher.generate(request(timeout_s=4)) as generation:
        await decode.submit()
        decode.refuses = "gone for good"
        decode.break_stream()
        await stack.connected(0)
        assert stack.rows[0]["phase"] == "waiting"
        with pytest.raises(Unavailable):
            await first(generation)


async def test_a_restarted_worker_is_a_new_one_and_its_old_cache_is_forgotten():
    decode, other = decode_peer(), decode_peer(OTHER_DECODE)
    chain = block_hashes(root_hash("f" * 32), np.array(PROMPT, np.int32), 4)
    decode.events_at_start = BlockEvents(0, True, chain, [])
    async with running(decode, other) as stack:
        for number in range(1, 4):
            async with stack.dispatcher.generate(request()):
                await decode.submit(number)
        assert other.submits == [], "the prefix is cached at the first worker, and it has no load"
        decode.hello = worker_hello(WorkerRole.DECODE, 0xD3)
        decode.events_at_start = BlockEvents(0, True, [], [])
        decode.break_stream()
        await eventually(
            lambda: {worker["incarnation"] for worker in stack.live} == {f"{0xD3:016x}", f"{OTHER_DECODE:016x}"}
        )
        for _ in range(4):
            async with stack.dispatcher.generate(request()):
                await asyncio.sleep(0.01)
        assert len(other.submits) == 2


async def test_a_gap_in_block_events_makes_the_link_ask_for_a_new_snapshot():
    decode = decode_peer()
    async with running(decode) as stack:
        decode.say(BlockEvents(0, True, [], []))
        decode.say(BlockEvents(1, False, [], []))
        decode.say(BlockEvents(3, False, [], []))
        await decode.until(lambda: len(decode.hellos) == 2)
        await stack.connected(1)


async def test_workers_that_speak_another_major_version_are_not_used():
    decode = decode_peer(protocol_major=2)
    prefill = prefill_peer()
    prefill.refuses = "protocol 1 is too old for this worker"
    async with serving(decode), serving(prefill), running(addresses=(decode.address, prefill.address)) as stack:
        await decode.until(lambda: len(decode.hellos) >= 2)
        assert stack.live == []


async def test_a_message_that_makes_no_sense_costs_the_worker_its_stream():
    decode = decode_peer()
    async with running(decode):
        frame = empty_frame()
        frame.counts = np.array([3], np.uint32)
        decode.say(frame)
        await decode.until(lambda: len(decode.hellos) == 2)


async def test_tokens_missing_in_between_begin_a_new_attempt():
    decode = decode_peer()
    tokens = continuation(PROMPT, 8)
    async with running(decode) as stack, stack.dispatcher.generate(request()) as generation:
        reading = asyncio.create_task(read_all(generation))
        submit = await decode.submit()
        decode.say_tokens(submit, tokens[:2])
        decode.say_tokens(submit, tokens[3:], after=3, finish=LENGTH)
        again = await decode.submit(2)
        await decode.aborted(submit.handle)
        assert tokens_of(again.capsule) == PROMPT + tokens[:2]
        decode.say_tokens(again, tokens[2:], finish=LENGTH)
        assert (await reading)[0] == tokens


async def test_a_worker_that_does_not_stop_is_stopped_at_max_tokens():
    decode = decode_peer()
    tokens = continuation(PROMPT, 12)
    async with running(decode) as stack, stack.dispatcher.generate(request()) as generation:
        submit = await decode.submit()
        decode.say_tokens(submit, tokens)
        got, last = await read_all(generation)
        assert (got, last.finish) == (tokens[:8], LENGTH)
        await decode.aborted(submit.handle)


async def test_bytes_moved_are_counted_from_a_workers_first_word_on_across_its_streams():
    decode = decode_peer()
    async with running(decode) as stack:
        for moved in (100, 150, 150):
            decode.say(empty_frame(load=Load(bytes_moved=moved, available_blocks=9)))
        await eventually(lambda: stack.counts.bytes_moved == 50)
        assert stack.counts.loads[decode.address].available_blocks == 9
        decode.break_stream()
        await eventually(lambda: len(decode.hellos) == 2)
        decode.say(empty_frame(load=Load(bytes_moved=170, available_blocks=9)))
        await eventually(lambda: stack.counts.bytes_moved == 70)


async def test_when_handles_run_out_the_gateway_becomes_a_new_incarnation():
    decode = decode_peer()
    tokens = continuation(PROMPT, 8)
    async with running(decode) as stack:
        stack.dispatcher._ledger.highest_handle = MAX_HANDLE - 1
        async with stack.dispatcher.generate(request()) as generation:
            assert (await decode.submit()).handle == MAX_HANDLE
            reading = asyncio.create_task(read_all(generation))
            with pytest.raises(Unavailable):
                async with stack.dispatcher.generate(request()):
                    pass
            again = await decode.submit(2)
            assert again.handle == 1
            assert decode.hellos[1].highest_handle == 0
            assert decode.hellos[1].gateway != decode.hellos[0].gateway
            decode.say_tokens(again, tokens, finish=LENGTH)
            assert (await reading)[0] == tokens


FROZEN_WORKER = """
import asyncio, sys
from services.config import WorkerRole
from tests.gateway.peer import PeerWorker, serving, worker_hello

async def main():
    async with serving(PeerWorker(worker_hello(WorkerRole.DECODE, 0xD9))) as worker:
        print(worker.address, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_stopped_worker_is_noticed_and_its_requests_go_on_elsewhere():
    """SIGSTOP: its sockets stay open and nothing answers."""
    process = subprocess.Popen([sys.executable, "-c", FROZEN_WORKER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = await asyncio.to_thread(process.stdout.readline)
        decode = decode_peer()
        async with running(addresses=(address.strip(),)) as stack, serving(decode):
            await stack.connected(1)
            async with stack.dispatcher.generate(request()) as generation:
                reading = asyncio.create_task(read_all(generation))
                os.kill(process.pid, signal.SIGSTOP)
                stopped = time.monotonic()
                await stack.connected(0, timeout_s=120)
                assert time.monotonic() - stopped < 60, "about 2 s where nothing else runs"
                assert stack.rows[0]["phase"] == "waiting"
                reading.cancel()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


async def test_a_request_that_lost_both_workers_waits_for_both(monkeypatch: pytest.MonkeyPatch):
    """A machine that stood still breaks all streams at once, and one worker comes back before the other."""
    monkeypatch.setattr(dispatch, "_REUNION_S", 3600.0)
    prefill, decode = prefill_peer(), decode_peer()
    async with running(prefill, decode) as stack, stack.dispatcher.generate(request()) as generation:
        reading = asyncio.create_task(read_all(generation))
        await decode.submit()
        decode.refuses = prefill.refuses = "it stands still"
        decode.break_stream()
        await stack.connected(1)
        prefill.break_stream()
        await stack.connected(0)
        decode.refuses = ""
        await stack.connected(1)
        await asyncio.sleep(0.05)
        assert stack.rows[0]["phase"] == "waiting"
        prefill.refuses = ""
        assert (await decode.submit(2)).handoff == TakeFrom(prefill.address, PREFILL)
        reading.cancel()


async def test_a_worker_of_another_model_is_not_taken():
    ours, theirs = decode_peer(model="ours"), decode_peer(OTHER_DECODE, model="theirs")
    async with serving(ours), serving(theirs):
        counts, addresses = Counts(), [ours.address, theirs.address]
        policy = Policy(HandoffMode.NEVER, 64)
        dispatcher = Dispatcher(addresses, policy, 9, MemoryPrefixIndex(), counts, model="ours")
        task = asyncio.create_task(dispatcher.run())
        await eventually(dispatcher.ready)
        await theirs.until(lambda: len(theirs.hellos) > 1)  # refused, and tried again
        assert list(counts.loads) == [ours.address]
        task.cancel()
        await asyncio.wait([task])


async def test_workers_without_a_transport_in_common_never_pair_and_the_log_says_so():
    prefill, decode = prefill_peer(transports=("nixl",)), decode_peer(transports=("grpc",))
    with structlog.testing.capture_logs() as logs:
        async with running(prefill, decode) as stack, stack.dispatcher.generate(request()):
            assert (await decode.submit()).handoff is None
    (warning,) = [log for log in logs if log["event"] == "two workers never pair"]
    assert f"{prefill.address} has nixl" in warning["reason"]
    assert f"{decode.address} has grpc" in warning["reason"]


async def test_addresses_come_and_go_but_a_live_stream_outlasts_the_list():
    decode, other = decode_peer(), decode_peer(OTHER_DECODE)
    async with running() as stack, serving(decode), serving(other):
        stack.dispatcher.set_addresses([decode.address, other.address])
        await stack.connected(2)
        stack.dispatcher.set_addresses([])
        other.refuses = "it is about to go"
        other.break_stream()
        await stack.connected(1)
        await asyncio.sleep(0)  # the link hears of it last
        stack.dispatcher.set_addresses([])
        other.refuses = ""
        await asyncio.sleep(3 * FIRST_BACKOFF_S)
        assert [worker["address"] for worker in stack.live] == [decode.address]
        assert len(other.hellos) == 1
        assert stack.dispatcher.ready()
        stack.dispatcher.set_addresses([other.address])
        await stack.connected(2)


@pytest.mark.parametrize("turns", range(8))
async def test_a_link_ends_when_told_to_in_the_moment_in_which_its_stream_breaks(turns: int):
    async with serving(decode_peer()) as decode:
        counts = Counts()
        dispatcher = Dispatcher([decode.address], Policy(HandoffMode.NEVER, 64), 9, MemoryPrefixIndex(), counts)
        task = asyncio.create_task(dispatcher.run())
        await eventually(lambda: bool(counts.loads))
        dispatcher._links[decode.address].reset("the test says so")
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=20)
        assert task.done()


async def test_every_request_of_many_completes_while_streams_keep_breaking():
    """Peers that run every request at their own pace and lose their streams twice; nothing is lost or repeated."""
    workers = [prefill_peer(), decode_peer(), decode_peer(OTHER_DECODE)]
    prompts = [list(range(at, at + 9)) for at in range(24)]
    async with running(*workers) as stack:
        engines = [asyncio.create_task(run_everything(worker)) for worker in workers]

        async def one(prompt: list[int]) -> list[int]:
            async with stack.dispatcher.generate(request(max_tokens=30, prompt=prompt)) as generation:
                return (await read_all(generation))[0]

        async def trouble() -> None:
            for worker in itertools.islice(itertools.cycle(workers), 2):
                await asyncio.sleep(0.06)
                worker.break_stream()

        try:
            *answers, _ = await asyncio.gather(*(one(prompt) for prompt in prompts), trouble())
        finally:
            for engine in engines:
                engine.cancel()
        assert answers == [continuation(prompt, 30) for prompt in prompts]
        assert stack.rows == []
        assert stack.counts.attempts > len(prompts), "no attempt met a broken stream"


async def run_everything(worker: PeerWorker) -> None:
    """Answers every submit token by token until it is aborted or done."""
    async with asyncio.TaskGroup() as group:
        for number in itertools.count(1):
            await worker.until(lambda number=number: len(worker.submits) >= number, timeout_s=120)
            group.create_task(run_one(worker, worker.submits[number - 1]))


async def run_one(worker: PeerWorker, submit: Any) -> None:
    capsule = submit.capsule
    tokens = continuation(tokens_of(capsule), capsule.max_len - len(capsule.token_ids))
    only_first = worker.hello.role is WorkerRole.PREFILL
    streams = len(worker.hellos)
    for at, token in enumerate(tokens[:1] if only_first else tokens):
        await asyncio.sleep(0.004)
        if submit.handle in worker.aborts or len(worker.hellos) != streams:
            return
        last = at == len(tokens) - 1
        worker.say_tokens(submit, [token], after=at, finish=LENGTH if last else FinishReason.NONE)
