"""A dispatcher and the scripted workers that it is tried against."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from kvtransfer.messages import EndReason
from kvtransfer.moved import Moved
from services.config import HandoffMode, Pooling, WorkerRole
from services.gateway.api.generation import (
    Delta,
    GenerationRequest,
    RunningRequest,
)
from services.gateway.dispatch.dispatcher import Dispatcher, WorkerAccess
from services.gateway.dispatch.router import Policy, Why
from services.prefix_index.memory import MemoryPrefixIndex
from services.protocol.capsule import Capsule
from services.protocol.frames import Load
from services.protocol.messages import WorkerHello
from services.protocol.sampling import SamplingParams
from tests.gateway.scripted_worker import (
    ScriptedWorker,
    serving,
    worker_hello,
)

PREFILL, DECODE, OTHER_DECODE = 0xF1, 0xD1, 0xD2
PROMPT = list(range(100, 110))
PATIENT_DEADLINES_S = (0.2, 2.0, 20.0, 100.0)  # of requests that are to come somewhere first, one after the other


class Counts:
    """A DispatchObserver that remembers."""

    def __init__(self) -> None:
        self.handoffs: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.transports: dict[tuple[str, str], str] = {}
        self.failed_handoffs: Counter[EndReason] = Counter()
        self.handoff_pairs: set[tuple[str, str]] = set()
        self.attempts = 0
        self.plans: Counter[Why] = Counter()
        self.cached: list[tuple[int, int]] = []
        self.bytes_moved = 0
        self.loads: dict[str, Load] = {}
        self.kernels: dict[str, str] = {}

    def attempt_started(self) -> None:
        self.attempts += 1

    def attempt_ended(self, reason: str) -> None:
        self.ends[reason] += 1

    def blocks_moved(self, prefill: str, decode: str, moved: Moved) -> None:
        self.transports[prefill, decode] = moved.transport

    def handoff_ended(self, outcome: str, pair: tuple[str, str]) -> None:
        self.handoffs[outcome] += 1
        self.handoff_pairs.add(pair)

    def handoff_failed(self, reason: EndReason, pair: tuple[str, str]) -> None:
        self.failed_handoffs[reason] += 1

    def cached_tokens(self, predicted: int, actual: int) -> None:
        self.cached.append((predicted, actual))

    def worker_up(self, worker: str, hello: WorkerHello) -> None:
        self.kernels[worker] = hello.kernels

    def worker_load(self, worker: str, role: WorkerRole, load: Load) -> None:
        self.loads[worker] = load

    def worker_gone(self, worker: str, role: WorkerRole) -> None:
        self.kernels.pop(worker, None)
        self.loads.pop(worker, None)

    def planned(self, workers: str, why: str) -> None:
        self.plans[Why(why)] += 1

    def kv_bytes_moved(self, count: int) -> None:
        self.bytes_moved += count


class Stack:
    """A dispatcher and its scripted workers."""

    def __init__(self, dispatcher: Dispatcher, counts: Counts, workers: list[ScriptedWorker]) -> None:
        self.dispatcher = dispatcher
        self.counts = counts
        self.workers = workers

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = cast(Any, self.dispatcher.describe()["rows"])
        return rows

    async def connected(self, count: int, timeout_s: float = 120.0) -> None:
        await eventually(lambda: len(self.live) == count, timeout_s)

    async def delivered(self, count: int) -> None:
        await eventually(lambda: self.rows[0]["tokens_delivered"] == count)

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
    *workers: ScriptedWorker,
    handoff: HandoffMode = HandoffMode.ALWAYS,
    max_waiting: int = 100,
    addresses: tuple[str, ...] = (),
    no_worker_wait_s: float = 60.0,
    role: WorkerRole = WorkerRole.DECODE,
) -> AsyncIterator[Stack]:
    async with AsyncExitStack() as exits:
        for worker in workers:
            await exits.enter_async_context(serving(worker))
        counts = Counts()
        named = [worker.address for worker in workers] + list(addresses)
        access = WorkerAccess(no_worker_wait_s=no_worker_wait_s, role=role)
        dispatcher = Dispatcher(named, Policy(handoff), max_waiting, MemoryPrefixIndex(), counts, access)
        task = asyncio.create_task(dispatcher.run())
        try:
            stack = Stack(dispatcher, counts, list(workers))
            await stack.connected(len(workers))
            yield stack
        finally:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


def prefill_worker(**hello: Any) -> ScriptedWorker:
    return ScriptedWorker(worker_hello(WorkerRole.PREFILL, PREFILL, **hello))


def decode_worker(worker_id: int = DECODE, **hello: Any) -> ScriptedWorker:
    return ScriptedWorker(worker_hello(WorkerRole.DECODE, worker_id, **hello))


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


def embedding_request(
    *prompts: list[int], pooling: Pooling = Pooling.LAST, timeout_s: float = 300.0
) -> GenerationRequest:
    """One prompt to embed for each choice."""
    capsules = [
        Capsule(np.array(prompt, np.int32), len(prompt), SamplingParams(0), pooling=pooling) for prompt in prompts
    ]
    return GenerationRequest("request-1", tuple(capsules), timeout_s)


async def read_all(generation: RunningRequest) -> tuple[list[int], Delta]:
    tokens: list[int] = []
    async with asyncio.timeout(120):
        while True:
            delta = await generation.next()
            tokens += delta.tokens
            if delta.finish:
                return tokens, delta


async def first(generation: RunningRequest) -> Delta:
    async with asyncio.timeout(120):
        return await generation.next()
