"""The dispatch side against scripted workers, which speak the protocol over real streams."""

import asyncio
import itertools
from typing import Any

import pytest

from kvtransfer.ids import WorkerId
from services.config import WorkerRole
from services.gateway.api.generation import (
    Delta,
    Expired,
    Failed,
    GenerationRequest,
    Overloaded,
    Refusal,
    TooLarge,
    Unavailable,
)
from services.gateway.dispatch import dispatcher, pair_health
from services.gateway.dispatch.dispatcher import MAX_ALTERNATIVES_IN_FLIGHT
from services.gateway.dispatch.retries import MAX_ATTEMPTS
from services.gateway.dispatch.retry_budget import RetryBudget
from services.protocol.capabilities import MANY_LOGPROBS
from services.protocol.frames import Load
from services.protocol.messages import MAX_HANDLE, HandTo, TakeFrom
from services.protocol.outcomes import FailureCode, FinishReason
from services.protocol.sampling import FEW_ALTERNATIVES
from tests.gateway.dispatch_stack import (
    DECODE,
    OTHER_DECODE,
    PATIENT_DEADLINES_S,
    PREFILL,
    PROMPT,
    Stack,
    decode_worker,
    eventually,
    first,
    prefill_worker,
    read_all,
    request,
    running,
)
from tests.gateway.scripted_worker import (
    ScriptedWorker,
    continuation,
    empty_frame,
    tokens_of,
    worker_hello,
)

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


async def test_a_pair_gets_the_request_at_once_and_under_one_handle():
    prefill, decode = prefill_worker(), decode_worker()
    async with running(prefill, decode) as stack, stack.dispatcher.generate(request()):
        at_prefill, at_decode = await prefill.submit(), await decode.submit()
        assert at_prefill.handle == at_decode.handle == 1
        assert at_prefill.handoff == HandTo(WorkerId(DECODE))
        assert at_decode.handoff == TakeFrom(prefill.address, WorkerId(PREFILL))
        assert tokens_of(at_decode.capsule) == PROMPT
        assert at_decode.request_id == "request-1"
        assert 0 < at_decode.timeout_s <= 300


async def test_tokens_of_a_pair_come_once_and_in_order():
    prefill, decode = prefill_worker(), decode_worker()
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


async def test_a_prompt_that_a_worker_is_to_compute_counts_as_cached_there_for_the_next():
    """The index hears of blocks when they are there; requests that came together would all be taken to compute them."""
    decode = decode_worker()
    tokens = continuation(PROMPT, 8)
    async with running(decode) as stack:
        async with stack.dispatcher.generate(request()):
            await decode.submit()
            async with stack.dispatcher.generate(request()) as generation:
                decode.say_tokens(await decode.submit(2), tokens, cached=8, finish=LENGTH)
                assert (await read_all(generation))[0] == tokens
        assert stack.counts.cached == [(8, 8)]
        async with stack.dispatcher.generate(request()) as generation:  # the first was given up before it was computed
            decode.say_tokens(await decode.submit(3), tokens, cached=0, finish=LENGTH)
            await read_all(generation)
        assert stack.counts.cached == [(8, 8), (0, 0)]


async def test_all_tokens_since_the_last_call_come_in_one_delta():
    decode = decode_worker()
    tokens = continuation(PROMPT, 8)
    async with running(decode) as stack, stack.dispatcher.generate(request()) as generation:
        submit = await decode.submit()
        for at, token in enumerate(tokens):
            decode.say_tokens(submit, [token], after=at, finish=LENGTH if at == 7 else FinishReason.NONE)
        await eventually(lambda: stack.rows == [])
        delta = await first(generation)
        assert (delta.tokens, delta.finish) == (tokens, LENGTH)


async def test_a_request_that_ends_at_its_first_token_is_aborted_at_decode():
    prefill, decode = prefill_worker(), decode_worker()
    async with running(prefill, decode) as stack, stack.dispatcher.generate(request()) as generation:
        submit = await prefill.submit()
        prefill.say_tokens(submit, [2], finish=STOP, cached=0)
        assert await read_all(generation) == ([2], Delta([2], None, STOP, 0))
        await decode.aborted(submit.handle)
        assert prefill.aborts == []
        assert stack.counts.handoffs == {"not_needed": 1}


async def test_a_request_for_one_token_goes_to_prefill_alone():
    prefill, decode = prefill_worker(), decode_worker()
    async with running(prefill, decode) as stack, stack.dispatcher.generate(request(max_tokens=1)) as generation:
        submit = await prefill.submit()
        assert submit.handoff is None
        prefill.say_tokens(submit, [7], finish=LENGTH, cached=0)
        assert (await read_all(generation))[0] == [7]
        assert decode.submits == []


async def test_logprobs_come_with_their_tokens_and_a_token_without_them_is_not_delivered():
    prefill, decode = prefill_worker(), decode_worker()
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
    decode = decode_worker()
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


async def test_streams_of_a_living_worker_may_break_more_often_than_attempts_may_fail():
    decode = decode_worker()
    tokens = continuation(PROMPT, 8)
    assert len(tokens) > MAX_ATTEMPTS
    async with running(decode) as stack, stack.dispatcher.generate(request()) as generation:
        reading = asyncio.create_task(read_all(generation))
        for number, token in enumerate(tokens[:-1], start=1):
            decode.say_tokens(await decode.submit(number), [token])
            await stack.delivered(number)
            decode.break_stream()
        decode.say_tokens(await decode.submit(len(tokens)), tokens[-1:], finish=LENGTH)
        assert (await reading)[0] == tokens


async def test_rows_of_a_handle_that_was_given_up_are_dropped():
    decode, other = decode_worker(), decode_worker(OTHER_DECODE)
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


async def eventually_next(left: ScriptedWorker, right: ScriptedWorker, after: int) -> Any:
    """The first submit at either worker with a handle above `after`."""
    found: list[Any] = []

    def look() -> bool:
        found[:] = [submit for submit in left.submits + right.submits if submit.handle > after]
        return bool(found)

    await eventually(look)
    return found[0]


async def test_prefill_lost_before_decodes_first_row_means_a_new_attempt():
    prefill, decode = prefill_worker(), decode_worker()
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
    prefill, decode = prefill_worker(), decode_worker()
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


@pytest.mark.parametrize("fails_first", [PREFILL, DECODE])
async def test_a_failure_at_one_worker_aborts_the_other_and_the_pair_is_left_alone(fails_first: int):
    prefill, decode = prefill_worker(), decode_worker()
    async with running(prefill, decode) as stack, stack.dispatcher.generate(request()) as generation:
        reading = asyncio.create_task(read_all(generation))
        submit = await decode.submit()
        assert (await prefill.submit()).handle == submit.handle
        failing, standing = (prefill, decode) if fails_first == PREFILL else (decode, prefill)
        failing.fail(submit, FailureCode.HANDOFF)
        await standing.aborted(submit.handle)
        for attempt in range(2, 5):
            again = await decode.submit(attempt)
            assert again.handoff is None
            decode.fail(again, FailureCode.HANDOFF)
        with pytest.raises(Failed):
            await reading
        handles = [submit.handle for submit in decode.submits]
        assert handles == sorted(set(handles))
        assert len(prefill.submits) == 1
        assert stack.counts.handoffs == {"failed_handoff": 1}
    assert stack.rows == []


async def test_a_request_goes_by_another_pair_after_its_first_one_failed():
    prefill, decode, other = prefill_worker(), decode_worker(), decode_worker(OTHER_DECODE)
    tokens = continuation(PROMPT, 8)
    async with running(prefill, decode, other) as stack, stack.dispatcher.generate(request()) as generation:
        reading = asyncio.create_task(read_all(generation))
        await eventually(lambda: bool(decode.submits or other.submits))
        failing, standing = (decode, other) if decode.submits else (other, decode)
        failing.fail(await failing.submit(), FailureCode.HANDOFF)
        again = await standing.submit()
        assert again.handoff == TakeFrom(prefill.address, WorkerId(PREFILL))
        standing.say_tokens(again, tokens, finish=LENGTH)
        assert (await reading)[0] == tokens
    assert stack.counts.handoffs == {"failed_handoff": 1, "completed": 1}


async def test_a_request_whose_handoffs_failed_at_two_pairs_goes_on_without_one():
    """Where all links between the workers are cut, a third and a fourth pair would fail as well."""
    prefills = [prefill_worker(), ScriptedWorker(worker_hello(WorkerRole.PREFILL, 0xF2))]
    decodes = [decode_worker(), decode_worker(OTHER_DECODE)]
    tokens = continuation(PROMPT, 8)
    async with running(*prefills, *decodes) as stack, stack.dispatcher.generate(request()) as generation:
        reading = asyncio.create_task(read_all(generation))
        for _ in range(2):
            await eventually(lambda: any(worker.submits for worker in decodes))
            (worker,) = [worker for worker in decodes if worker.submits]
            submit = worker.submits.pop()
            assert submit.handoff is not None
            worker.fail(submit, FailureCode.HANDOFF)
        await eventually(lambda: any(worker.submits for worker in decodes))
        (worker,) = [worker for worker in decodes if worker.submits]
        assert worker.submits[-1].handoff is None
        worker.say_tokens(worker.submits[-1], tokens, cached=0)
        assert (await reading)[0] == tokens
    assert stack.counts.handoffs == {"failed_handoff": 2}


async def test_a_pair_that_failed_is_tried_again_later(monkeypatch: pytest.MonkeyPatch):
    """Only by one request at a time, until one arrives."""
    for pause in ("_FIRST_PAUSE_S", "_TRIAL_S"):
        monkeypatch.setattr(pair_health, pause, 3600.0)
    prefill, decode = prefill_worker(), decode_worker()
    engine = asyncio.create_task(run_everything(decode))
    async with running(prefill, decode) as stack:
        health = stack.dispatcher._ledger.pairs

        async def pairs_of(count: int) -> int:
            before = len(prefill.submits)
            await asyncio.gather(*(answer() for _ in range(count)))
            return len(prefill.submits) - before

        async def answer() -> list[int]:
            async with stack.dispatcher.generate(request(max_tokens=3)) as generation:
                return (await read_all(generation))[0]

        try:
            assert await pairs_of(3) == 3
            failing = asyncio.create_task(answer())
            prefill.fail(await prefill.submit(4), FailureCode.HANDOFF)
            await failing
            assert await pairs_of(3) == 0
            for failing_pair in health._failing.values():
                failing_pair.until = 0.0  # the pause is over
            assert await pairs_of(3) == 1
            assert await pairs_of(3) == 3
        finally:
            engine.cancel()


async def test_a_reader_that_leaves_ends_the_request_at_both_workers():
    prefill, decode = prefill_worker(), decode_worker()
    async with running(prefill, decode) as stack:
        async with stack.dispatcher.generate(request()):
            submit = await decode.submit()
        await prefill.aborted(submit.handle)
        await decode.aborted(submit.handle)
        assert stack.rows == []
        assert stack.counts.handoffs == {"abandoned": 1}


async def test_a_cancelled_reader_ends_the_request_too():
    decode = decode_worker()
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
    prefill, decode, other = prefill_worker(), decode_worker(), decode_worker(OTHER_DECODE)
    async with running(prefill, decode, other) as stack:
        all_came = asyncio.Event()

        async def one() -> None:
            async with stack.dispatcher.generate(request()):
                await all_came.wait()

        asked = [asyncio.create_task(one()) for _ in range(20)]
        await eventually(lambda: len(prefill.submits) == 20 and len(decode.submits) + len(other.submits) == 20)
        all_came.set()
        await asyncio.gather(*asked)
        handles = [[submit.handle for submit in worker.submits] for worker in (prefill, decode, other)]
        assert all(seen == sorted(seen) for seen in handles)
        assert sorted(handles[1] + handles[2]) == handles[0] == list(range(1, 21))
        assert min(len(handles[1]), len(handles[2])) == 10, "requests without a load are spread evenly"


async def test_not_now_costs_no_attempt():
    """A worker that is alone and refuses for a while is asked again, more often than attempts would allow."""
    decode = decode_worker()
    async with running(decode) as stack, stack.dispatcher.generate(request()) as generation:
        reading = asyncio.create_task(read_all(generation))
        for number in range(1, MAX_ATTEMPTS + 1):
            decode.fail(await decode.submit(number), FailureCode.NOT_NOW)
        submit = await decode.submit(MAX_ATTEMPTS + 1)
        decode.say_tokens(submit, continuation(PROMPT, 8), finish=LENGTH)
        assert (await reading)[0] == continuation(PROMPT, 8)


async def test_a_failure_takes_a_retry_of_the_budget_and_refusals_take_none(monkeypatch: pytest.MonkeyPatch):
    taken = itertools.count()
    monkeypatch.setattr(RetryBudget, "take", lambda self: next(taken) * 0.0)
    decode, tokens = decode_worker(), continuation(PROMPT, 8)
    async with running(decode) as stack:
        answering = asyncio.create_task(answer_of(stack, request()))
        decode.fail(await decode.submit(), FailureCode.HANDOFF)
        for number in range(2, 5):
            decode.fail(await decode.submit(number), FailureCode.NOT_NOW)
        decode.say_tokens(await decode.submit(5), tokens, finish=LENGTH)
        assert await answering == tokens
    assert next(taken) == 1


async def test_a_retry_over_the_budget_waits(monkeypatch: pytest.MonkeyPatch):
    waits = iter([0.1, 0.1, 0.0])
    monkeypatch.setattr(RetryBudget, "take", lambda self: next(waits))
    decode, tokens = decode_worker(), continuation(PROMPT, 8)
    async with running(decode) as stack:
        answering = asyncio.create_task(answer_of(stack, request()))
        decode.fail(await decode.submit(), FailureCode.HANDOFF)
        failed_at = asyncio.get_running_loop().time()
        decode.say_tokens(await decode.submit(2), tokens, finish=LENGTH)
        assert asyncio.get_running_loop().time() - failed_at > 0.19
        assert await answering == tokens


async def test_not_now_goes_to_another_worker_first():
    decode, other = decode_worker(), decode_worker(OTHER_DECODE)
    async with running(decode, other) as stack, stack.dispatcher.generate(request()) as generation:
        reading = asyncio.create_task(read_all(generation))
        await eventually(lambda: bool(decode.submits or other.submits))
        refusing, taking = (decode, other) if decode.submits else (other, decode)
        refusing.fail(refusing.submits[0], FailureCode.NOT_NOW)
        submit = await taking.submit()
        taking.say_tokens(submit, continuation(PROMPT, 8), finish=LENGTH)
        assert (await reading)[0] == continuation(PROMPT, 8)


async def test_too_large_is_refused_for_good():
    decode = decode_worker()
    async with running(decode) as stack, stack.dispatcher.generate(request()) as generation:
        reading = asyncio.create_task(read_all(generation))
        decode.fail(await decode.submit(), FailureCode.TOO_LARGE)
        with pytest.raises(TooLarge):
            await reading
        assert len(decode.submits) == 1


async def test_too_large_for_one_worker_goes_to_a_larger_one():
    small, large = decode_worker(num_blocks=8), decode_worker(OTHER_DECODE, num_blocks=64)
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
    decode = decode_worker(num_blocks=2)
    async with running(decode) as stack:
        with pytest.raises(TooLarge):
            async with stack.dispatcher.generate(request()):
                pass
        assert decode.submits == []
        assert stack.rows == []


async def test_without_a_decode_worker_new_requests_are_unavailable():
    prefill = prefill_worker()
    async with running(prefill, no_worker_wait_s=0.05) as stack:
        assert not stack.dispatcher.ready()
        with pytest.raises(Unavailable):
            async with stack.dispatcher.generate(request()):
                pass
        async with stack.dispatcher.generate(request(max_tokens=1)) as generation:
            prefill.say_tokens(await prefill.submit(), [5], finish=LENGTH)
            assert (await read_all(generation))[0] == [5]


async def test_a_request_waits_for_workers_that_are_known_and_not_connected():
    """All of them restart, for example."""
    decode = decode_worker()
    async with running(decode) as stack:
        decode.refuses = "it starts"
        decode.break_stream()
        await stack.connected(0)
        opening = asyncio.create_task(answer_of(stack, request()))
        await asyncio.sleep(0.1)
        assert not opening.done()
        decode.refuses = ""
        tokens = continuation(PROMPT, 8)
        decode.say_tokens(await decode.submit(), tokens, finish=LENGTH)
        assert await opening == tokens


async def test_where_no_worker_is_known_a_request_is_refused_at_once():
    async with running(no_worker_wait_s=3600) as stack, asyncio.timeout(60):
        stack.dispatcher.set_addresses([])
        with pytest.raises(Unavailable):
            await answer_of(stack, request())
        with pytest.raises(Unavailable):
            await stack.dispatcher.until_model_len_known()


async def test_a_request_waits_until_a_gateway_has_heard_which_workers_there_are():
    """It has just started, and Redis has not answered yet."""
    decode = decode_worker()
    async with running(decode) as other, running() as stack:
        length = asyncio.create_task(stack.dispatcher.until_model_len_known())
        opening = asyncio.create_task(answer_of(stack, request()))
        await asyncio.sleep(0.1)
        assert not length.done()
        assert not opening.done()
        stack.dispatcher.set_addresses(link for link in other.dispatcher._links)
        tokens = continuation(PROMPT, 8)
        decode.say_tokens(await decode.submit(), tokens, finish=LENGTH)
        assert await opening == tokens
        assert await length == 256


async def answer_of(stack: Stack, wanted: GenerationRequest) -> list[int]:
    async with stack.dispatcher.generate(wanted) as generation:
        return (await read_all(generation))[0]


async def test_more_requests_than_allowed_are_refused_before_any_work():
    decode = decode_worker()
    async with running(decode, max_waiting=2) as stack:
        async with stack.dispatcher.generate(request()), stack.dispatcher.generate(request()):
            with pytest.raises(Unavailable):
                async with stack.dispatcher.generate(request()):
                    pass
            await decode.submit(2)
        async with stack.dispatcher.generate(request()):
            await decode.submit(3)
        assert len(decode.submits) == 3


async def test_many_alternatives_are_bounded_over_all_requests_in_flight():
    """Those of a request count until it ends, however that is; requests with few alternatives are not counted."""
    knows = frozenset({MANY_LOGPROBS})
    half = request(num_logprobs=MAX_ALTERNATIVES_IN_FLIGHT // 16)
    few = request(num_logprobs=FEW_ALTERNATIVES)
    async with running(decode_worker(knows=knows)) as stack:
        generate = stack.dispatcher.generate
        async with generate(half):
            async with generate(half), generate(few):
                with pytest.raises(Overloaded) as refused:
                    async with generate(request(num_logprobs=FEW_ALTERNATIVES + 1)):
                        pass
                assert refused.value.refusal is Refusal.LOGPROBS
            async with generate(half):
                pass


async def test_many_alternatives_are_asked_of_workers_that_give_them():
    older, newer = decode_worker(), decode_worker(OTHER_DECODE, knows=frozenset({MANY_LOGPROBS}))
    async with running(older, newer) as stack:
        for number in range(1, 4):
            async with stack.dispatcher.generate(request(num_logprobs=FEW_ALTERNATIVES + 1)):
                await newer.submit(number)
    assert not older.submits


async def test_the_deadline_ends_a_request_everywhere():
    prefill, decode = prefill_worker(), decode_worker()
    async with running(prefill, decode) as stack:
        for timeout_s in PATIENT_DEADLINES_S:
            async with stack.dispatcher.generate(request(timeout_s=timeout_s)) as generation:
                with pytest.raises(Expired):
                    await first(generation)
                if decode.submits:  # it had come to the workers by then
                    await prefill.aborted(decode.submits[-1].handle)
                    await decode.aborted(decode.submits[-1].handle)
                    return
    raise AssertionError("it came to no worker")


async def test_a_running_request_without_a_worker_waits_until_its_deadline():
    for timeout_s in PATIENT_DEADLINES_S:
        decode = decode_worker()
        async with running(decode) as stack, stack.dispatcher.generate(request(timeout_s=timeout_s)) as generation:
            await eventually(lambda: bool(decode.submits) or not stack.rows)  # noqa: B023
            decode.refuses = "gone for good"
            decode.break_stream()
            await stack.connected(0)
            if stack.rows:  # it was not over by then
                assert stack.rows[0]["phase"] == "waiting"
                with pytest.raises(Unavailable):
                    await first(generation)
                return
    raise AssertionError("it was over before it had lost its worker")


async def test_tokens_missing_in_between_begin_a_new_attempt():
    decode = decode_worker()
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
    decode = decode_worker()
    tokens = continuation(PROMPT, 12)
    async with running(decode) as stack, stack.dispatcher.generate(request()) as generation:
        submit = await decode.submit()
        decode.say_tokens(submit, tokens)
        got, last = await read_all(generation)
        assert (got, last.finish) == (tokens[:8], LENGTH)
        await decode.aborted(submit.handle)


async def test_when_handles_run_out_the_gateway_becomes_a_new_incarnation():
    decode = decode_worker()
    tokens = continuation(PROMPT, 8)
    async with running(decode) as stack:
        stack.dispatcher._ledger.highest_handle = MAX_HANDLE - 1
        async with stack.dispatcher.generate(request()) as generation:
            assert (await decode.submit()).handle == MAX_HANDLE
            reading = asyncio.create_task(read_all(generation))
            waiting = asyncio.create_task(answer_of(stack, request()))
            for number in (2, 3):
                again = await decode.submit(number)
                assert again.handle == number - 1
                decode.say_tokens(again, tokens, finish=LENGTH)
            assert decode.hellos[1].highest_handle == 0
            assert decode.hellos[1].gateway != decode.hellos[0].gateway
            assert (await reading)[0] == await waiting == tokens


async def test_a_request_that_lost_both_workers_waits_for_both(monkeypatch: pytest.MonkeyPatch):
    """A machine that stood still breaks all streams at once, and one worker comes back before the other."""
    monkeypatch.setattr(dispatcher, "_REUNION_S", 3600.0)
    prefill, decode = prefill_worker(), decode_worker()
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
        assert (await decode.submit(2)).handoff == TakeFrom(prefill.address, WorkerId(PREFILL))
        reading.cancel()


async def test_every_request_of_many_completes_while_streams_keep_breaking():
    """Peers that run every request at their own pace and lose their streams twice; nothing is lost or repeated."""
    workers = [prefill_worker(), decode_worker(), decode_worker(OTHER_DECODE)]
    prompts = [list(range(at, at + 9)) for at in range(24)]
    async with running(*workers) as stack:
        engines = [asyncio.create_task(run_everything(worker)) for worker in workers]

        async def one(prompt: list[int]) -> list[int]:
            async with stack.dispatcher.generate(request(max_tokens=30, prompt=prompt)) as generation:
                return (await read_all(generation))[0]

        async def trouble() -> None:
            for worker in workers[:2]:
                await worker.until(lambda worker=worker: bool(worker.submits))  # what it has just got is under way
                worker.break_stream()

        try:
            *answers, _ = await asyncio.gather(*(one(prompt) for prompt in prompts), trouble())
        finally:
            for engine in engines:
                engine.cancel()
        assert answers == [continuation(prompt, 30) for prompt in prompts]
        assert stack.rows == []
        assert stack.counts.attempts > len(prompts), "no attempt met a broken stream"


async def run_everything(worker: ScriptedWorker) -> None:
    """Answers every submit token by token until it is aborted or done."""
    async with asyncio.TaskGroup() as group:
        for number in itertools.count(1):
            await worker.until(lambda number=number: len(worker.submits) >= number, timeout_s=120)
            group.create_task(run_one(worker, worker.submits[number - 1]))


async def run_one(worker: ScriptedWorker, submit: Any) -> None:
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
