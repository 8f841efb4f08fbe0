"""Deltas that are handed on as they come: the same ones that a reader would be given who asks for each."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kvtransfer.ids import WorkerId
from services.config import HandoffMode
from services.gateway.api.generation import Delta, Failed, TakeToken, TooLarge, never
from services.gateway.dispatch.router import Why
from services.protocol.outcomes import FailureCode, FinishReason
from tests.gateway.dispatch_stack import (
    DECODE,
    PROMPT,
    decode_worker,
    eventually,
    prefill_worker,
    read_all,
    request,
    running,
)
from tests.gateway.scripted_worker import continuation, row_frame

LENGTH = FinishReason.LENGTH
TOKENS = continuation(PROMPT, 8)


@dataclass
class Sink:
    """A sink of functions, for any choice."""

    take: Callable[[Delta], bool]
    take_token: TakeToken = never

    def token_taker(self, choice: int) -> TakeToken:
        return self.take_token


async def test_tokens_are_relayed_while_the_task_sleeps():
    decode = decode_worker()
    taken: list[Delta] = []

    def take(delta: Delta) -> bool:
        taken.append(delta)
        return delta.finish is FinishReason.NONE

    async def came(count: int) -> None:
        await eventually(lambda: sum(len(delta.tokens) for delta in taken) == count)

    async with running(decode) as stack, stack.dispatcher.generate(request()) as generation:
        relaying = asyncio.create_task(generation.relay(Sink(take)))
        submit = await decode.submit()
        for at, token in enumerate(TOKENS):
            decode.say_tokens(submit, [token], after=at, finish=LENGTH if at == 7 else FinishReason.NONE)
            await came(at + 1)
        await relaying
    assert [token for delta in taken for token in delta.tokens] == TOKENS


async def test_what_was_there_before_is_relayed_too_and_a_relay_that_stopped_goes_on():
    decode = decode_worker()
    taken: list[Delta] = []

    def take_one(delta: Delta) -> bool:
        taken.append(delta)
        return False

    async with running(decode) as stack, stack.dispatcher.generate(request()) as generation:
        submit = await decode.submit()
        decode.say_tokens(submit, TOKENS[:3])
        await generation.relay(Sink(take_one))
        decode.say_tokens(submit, TOKENS[3:6], after=3)
        await eventually(lambda: stack.rows[0]["tokens_delivered"] == 6)
        assert [delta.tokens for delta in taken] == [TOKENS[:3]]
        await generation.relay(Sink(take_one))
        decode.say_tokens(submit, TOKENS[6:], after=6, finish=LENGTH)
        assert (await read_all(generation))[0] == TOKENS[6:]
    assert [delta.tokens for delta in taken] == [TOKENS[:3], TOKENS[3:6]]


async def test_a_relay_goes_on_after_a_worker_was_lost():
    decode = decode_worker()
    taken: list[int] = []

    def take(delta: Delta) -> bool:
        taken.extend(delta.tokens)
        return delta.finish is FinishReason.NONE

    async with running(decode) as stack, stack.dispatcher.generate(request()) as generation:
        relaying = asyncio.create_task(generation.relay(Sink(take)))
        decode.say_tokens(await decode.submit(1), TOKENS[:3])
        await eventually(lambda: len(taken) == 3)
        decode.break_stream()
        decode.say_tokens(await decode.submit(2), TOKENS[3:], finish=LENGTH)
        await relaying
    assert taken == TOKENS


class Taken:
    """A sink that remembers how each token came. `willing`: single tokens are taken in the short form."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.deltas: list[Delta] = []
        self.all: list[int] = []
        self.willing = True

    def token_taker(self, choice: int) -> TakeToken:
        return self.take_token

    def take_token(self, token: int) -> bool:
        if self.willing:
            self.tokens.append(token)
            self.all.append(token)
        return self.willing

    def take(self, delta: Delta) -> bool:
        self.deltas.append(delta)
        self.all += delta.tokens
        return delta.finish is FinishReason.NONE

    async def came(self, count: int) -> None:
        await eventually(lambda: len(self.all) == count)


async def test_single_tokens_are_taken_as_such_unless_that_is_refused():
    decode, taken = decode_worker(), Taken()
    async with running(decode) as stack, stack.dispatcher.generate(request()) as generation:
        relaying = asyncio.create_task(generation.relay(taken))
        submit = await decode.submit()
        for at in range(6):
            taken.willing = at not in (2, 3)
            decode.say_tokens(submit, TOKENS[at : at + 1], after=at)
            await taken.came(at + 1)
        decode.say_tokens(submit, TOKENS[6:], after=6, finish=LENGTH)
        await relaying
    assert taken.all == TOKENS
    assert taken.tokens == [*TOKENS[1:2], *TOKENS[4:6]]  # the first one says what was cached
    assert [delta.tokens for delta in taken.deltas] == [TOKENS[:1], TOKENS[2:3], TOKENS[3:4], TOKENS[6:]]


async def test_tokens_taken_as_such_are_not_asked_for_again_after_a_worker_was_lost():
    decode, taken = decode_worker(), Taken()
    async with running(decode) as stack, stack.dispatcher.generate(request()) as generation:
        relaying = asyncio.create_task(generation.relay(taken))
        submit = await decode.submit(1)
        for at in range(3):
            decode.say_tokens(submit, TOKENS[at : at + 1], after=at)
        await taken.came(3)
        assert taken.tokens == TOKENS[1:3]
        decode.break_stream()
        again = await decode.submit(2)
        assert again.capsule.token_ids.tolist() == [*PROMPT, *TOKENS[:3]]
        decode.say_tokens(again, TOKENS[3:], finish=LENGTH)
        await relaying
    assert taken.all == TOKENS


async def test_no_token_is_taken_after_a_delta_was_the_last_one():
    """Not even one that comes before the task has woken up."""
    decode, taken = decode_worker(), Taken()
    async with running(decode) as stack, stack.dispatcher.generate(request()) as generation:
        submit = await decode.submit()
        second = row_frame(submit.handle, len(PROMPT) + 1, TOKENS[1:2])

        def take_one(delta: Delta) -> bool:
            taken.take(delta)
            asyncio.get_running_loop().call_soon(stack.dispatcher.worker_sent, WorkerId(DECODE), second)
            return False

        relaying = asyncio.create_task(generation.relay(Sink(take_one, taken.take_token)))
        await asyncio.sleep(0.01)
        decode.say_tokens(submit, TOKENS[:1])
        await relaying
        decode.say_tokens(submit, TOKENS[2:], after=2, finish=LENGTH)
        assert taken.all + (await read_all(generation))[0] == TOKENS
    assert not taken.tokens


async def test_what_take_token_raises_is_its_callers_and_nobody_elses():
    decode = decode_worker()

    def take_token(token: int) -> bool:
        raise Failed("by the test")

    async with running(decode) as stack, stack.dispatcher.generate(request()) as generation:
        relaying = asyncio.create_task(generation.relay(Sink(lambda delta: True, take_token)))
        submit = await decode.submit()
        for at in range(2):
            decode.say_tokens(submit, TOKENS[at : at + 1], after=at)
        with pytest.raises(Failed, match="by the test"):
            await relaying
        assert len(decode.hellos) == 1


@pytest.mark.parametrize("how", ["read", "relayed", "take raises", "take_token raises"])
async def test_a_request_leaves_nothing_for_the_garbage_collector(how: str):
    decode, taken = decode_worker(), Taken()

    def broken(_: object) -> bool:
        raise Failed("by the test")

    gc.disable()
    try:
        async with running(decode) as stack:
            async with stack.dispatcher.generate(request()) as generation:
                watched = weakref.ref(generation)
                submit = await decode.submit()
                decode.say_tokens(submit, TOKENS[:1])
                await generation.next()
                decode.say_tokens(submit, TOKENS[1:2], after=1)
                decode.say_tokens(submit, TOKENS[2:], after=2, finish=LENGTH)
                match how:
                    case "read":
                        await read_all(generation)
                    case "relayed":
                        await generation.relay(taken)
                        assert taken.all == TOKENS[1:]
                    case _:
                        take, take_token = (broken, never) if how == "take raises" else (taken.take, broken)
                        with contextlib.suppress(Failed):
                            await generation.relay(Sink(take, take_token))
                            raise AssertionError
            del generation
            # What came last may be on its way through the loop.
            await eventually(lambda: watched() is None)
    finally:
        gc.enable()


async def test_what_ends_the_request_is_raised():
    decode = decode_worker()
    async with running(decode) as stack, stack.dispatcher.generate(request()) as generation:
        relaying = asyncio.create_task(generation.relay(Sink(lambda delta: True)))
        decode.fail(await decode.submit(), FailureCode.TOO_LARGE)
        with pytest.raises(TooLarge):
            await relaying


async def test_what_take_raises_is_its_callers_and_nobody_elses():
    """Not of the stream that brought the tokens, and of those who wait for it."""
    decode = decode_worker()

    def take(delta: Delta) -> bool:
        raise Failed("by the test")

    async with running(decode) as stack, stack.dispatcher.generate(request()) as generation:
        relaying = asyncio.create_task(generation.relay(Sink(take)))
        submit = await decode.submit()
        await asyncio.sleep(0.01)
        decode.say_tokens(submit, TOKENS[:3])
        with pytest.raises(Failed, match="by the test"):
            await relaying
        decode.say_tokens(submit, TOKENS[3:], after=3, finish=LENGTH)
        assert (await read_all(generation))[0] == TOKENS[3:]
        assert len(decode.hellos) == 1


async def test_automatic_handoff_tries_both_plans_first_and_shows_what_it_learns():
    prefill, decode = prefill_worker(), decode_worker()
    prompt = list(range(100, 140))
    first = continuation(prompt, 1)
    async with running(prefill, decode, handoff=HandoffMode.AUTO) as stack:
        for number in range(4):
            async with stack.dispatcher.generate(request(max_tokens=4, prompt=prompt)) as generation:
                submit = await decode.submit(number + 1)
                if submit.handoff is not None:
                    prefill.say_tokens(submit, first, cached=0)
                    await asyncio.wait_for(generation.next(), 60)
                decode.say_tokens(submit, continuation(prompt, 4), finish=LENGTH)
                await read_all(generation)
        assert stack.counts.plans[Why.TRIAL] >= 2
        learned = stack.dispatcher.describe()["learned"]
        assert isinstance(learned, dict)
        assert learned["alone"] is not None or learned["prefill"] is not None
