"""A request that ends every worker that computes it fails with words that say so, and no other request does."""

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from kvtransfer.ids import WorkerId
from services.config import WorkerRole
from services.gateway.api.generation import Failed
from services.gateway.dispatch.retries import MAX_DEATHS
from services.protocol.messages import Submit
from services.protocol.outcomes import FinishReason
from tests.gateway.dispatch_stack import Stack, decode_worker, eventually, prefill_worker, read_all, request, running
from tests.gateway.scripted_worker import ScriptedWorker, continuation, empty_frame, tokens_of

POISON = [666, *range(300, 308)]
TOKENS = 12
STEP_S = 0.004
LENGTH = FinishReason.LENGTH


@dataclass(eq=False)
class Sequence:
    """A sequence in a batch."""

    submit: Submit
    start: list[int]
    tokens: list[int]
    given: int = 0  # of `tokens`

    @property
    def is_poison(self) -> bool:
        return self.start[: len(POISON)] == POISON


class MortalWorker:
    """An engine: each step gives every sequence its next token; a step over the poisonous one ends the worker.

    dies_at: tokens of the poisonous sequence that come out before the step that ends the worker.
    """

    def __init__(self, worker: ScriptedWorker, dies_at: int, ids: Iterator[int]) -> None:
        self.worker, self.dies_at, self.ids = worker, dies_at, ids
        self.num_deaths = 0
        self.batch: list[Sequence] = []
        self.num_seen = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            self.worker.say(empty_frame())  # a real worker reports once a second, and after each step
            self.take_commands()
            if any(one.is_poison and one.given >= self.dies_at for one in self.batch):
                await self.die()
            for sequence in self.batch:
                self.say_next(sequence)
            most = 1 if self.worker.hello.role is WorkerRole.PREFILL else TOKENS
            self.batch = [one for one in self.batch if one.given < min(most, len(one.tokens))]

    def take_commands(self) -> None:
        for submit in self.worker.submits[self.num_seen :]:
            start = tokens_of(submit.capsule)
            self.batch.append(Sequence(submit, start, continuation(start, submit.capsule.max_len - len(start))))
        self.num_seen = len(self.worker.submits)
        self.batch = [one for one in self.batch if one.submit.handle not in self.worker.aborts]

    def say_next(self, one: Sequence) -> None:
        finish = LENGTH if one.given == len(one.tokens) - 1 else FinishReason.NONE
        self.worker.say_tokens(one.submit, [one.tokens[one.given]], after=one.given, finish=finish)
        one.given += 1

    async def die(self) -> None:
        """Comes back as another worker on the same address."""
        self.num_deaths += 1
        self.worker.hello = replace(self.worker.hello, worker_id=WorkerId(next(self.ids)))
        num_lives = len(self.worker.hellos)
        self.worker.break_stream()
        await self.worker.until(lambda: len(self.worker.hellos) > num_lives)
        self.batch.clear()
        self.num_seen = len(self.worker.submits)


async def answer(stack: Stack, prompt: list[int]) -> list[int]:
    async with stack.dispatcher.generate(request(TOKENS, prompt=prompt)) as generation:
        return (await read_all(generation))[0]


@pytest.mark.few(4)
@pytest.mark.parametrize("dies_at", [0, 1], ids=["computing the prompt", "decoding"])
@pytest.mark.parametrize("num_decode", [1, 2, 3])
@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_a_poison_prompt_fails_alone(num_decode: int, num_prefill: int, dies_at: int):
    ids = itertools.count(1000)
    decodes = [decode_worker(next(ids)) for _ in range(num_decode)]
    workers = [*([prefill_worker()] * num_prefill), *decodes]
    innocent = [list(range(at, at + 9)) for at in range(10, 26)]
    async with running(*workers) as stack:
        engines = [MortalWorker(worker, dies_at, ids) for worker in workers]
        tasks = [asyncio.create_task(engine.run()) for engine in engines]
        try:
            before = [asyncio.create_task(answer(stack, prompt)) for prompt in innocent[:8]]
            poisonous = asyncio.create_task(answer(stack, POISON))
            later = []
            for prompt in innocent[8:]:
                await asyncio.sleep(0.02)
                later.append(asyncio.create_task(answer(stack, prompt)))
            with pytest.raises(Failed, match=f"{MAX_DEATHS} workers in a row ended"):
                await poisonous
            assert [await task for task in (*before, *later)] == [continuation(prompt, TOKENS) for prompt in innocent]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        at_decode = sum(engine.num_deaths for engine in engines[num_prefill:])
        assert at_decode <= MAX_DEATHS, "a pair may have died as one"
        await eventually(lambda: stack.rows == [])
