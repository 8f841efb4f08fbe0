"""Decode steps of a worker beside all else that its process does: streams to gateways, submits, publishing.

The worker is whole, with its event loop, its gRPC server and its engine thread, which share the interpreter lock; only
the model is replaced by one that takes time without the lock, as a GPU's would. Gateways are processes of their own.
"""

import asyncio
import logging
import math
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import grpc
import numpy as np
import structlog

from kvtransfer.ids import AttemptId, GatewayId
from loadtest.children import child
from loadtest.micro.idle_runner import IdleRunner
from loadtest.micro.own_redis import own_redis
from loadtest.tables import Record, spread
from services.config import TransportName, WorkerRole
from services.engine.runner.base import StepInput
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.sequences.request import Kind, Request
from services.protocol.capsule import Capsule
from services.protocol.grpc_options import CLIENT_OPTIONS
from services.protocol.messages import Abort, GatewayHello, Submit
from services.protocol.sampling import SamplingParams
from services.protocol.wire import serialize_gateway_message
from services.worker.core.core import WorkerCore
from services.worker.engine_thread import SWITCH_INTERVAL_S
from services.worker.transports import make_transports
from services.worker.worker import Worker, WorkerParts

_MODEL_S = 0.005
_PROMPT, _LONG_PROMPT = 64, 16_384
_LONG_EVERY_S = 0.02
_MAX_TOKENS = 8192
_MAX_MODEL_LEN = _LONG_PROMPT + _MAX_TOKENS
_SETTLING = 50  # steps of each round that are not counted
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class _Beside:
    """The work beside the steps. Without gateways, sequences are submitted inside the worker; no frame leaves it."""

    name: str
    gateways: int = 0
    long_prompts: bool = False  # submitted and aborted, fifty a second
    publishing: bool = False  # of the blocks that the steps fill, to Redis


_KINDS = (
    _Beside("nothing"),
    _Beside("publishing", publishing=True),
    _Beside("frames to a gateway", gateways=1),
    _Beside("frames to two gateways", gateways=2),
    _Beside("frames to two gateways, long prompts", gateways=2, long_prompts=True),
    _Beside("frames to two gateways, long prompts, publishing", gateways=2, long_prompts=True, publishing=True),
)


async def measure(batch: int, steps: int, rounds: int) -> list[Record]:
    """Measures rounds of all kinds in turn, and returns a record for each kind."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    times: dict[_Beside, list[float]] = {kind: [] for kind in _KINDS}
    async with own_redis() as url:
        for _ in range(rounds):
            for kind in _KINDS:
                times[kind] += await _measure(kind, batch, steps, url if kind.publishing else None)
    about: Record = {"batch": batch, "model_ms": _MODEL_S * 1e3, "unit": "ms beyond the model"}
    return [{**about, "beside": kind.name, **_beyond(spent)} for kind, spent in times.items()]


def _beyond(times: list[float]) -> Record:
    return spread((np.array(times) - _MODEL_S) * 1e3, (0, 50, 90, 99))


async def _measure(kind: _Beside, batch: int, steps: int, redis_url: str | None) -> list[float]:
    runner = _NotingRunner(batch, steps)
    async with _worker(runner, batch, redis_url) as (worker, port):
        if not kind.gateways:
            _submit_inside(worker, batch)
        with ExitStack() as gateways:
            for number in range(kind.gateways):
                share = len(range(number, batch, kind.gateways))
                gateways.enter_context(child(_gateway, port, number + 1, share, kind.long_prompts))
            async with asyncio.timeout(_START_S + steps):
                await asyncio.to_thread(runner.done.wait)
    times: list[float] = np.diff(runner.launched_at[_SETTLING:]).tolist()
    return times


class _NotingRunner(IdleRunner):
    """Notes when each step of the whole batch begins."""

    def __init__(self, batch: int, steps: int) -> None:
        super().__init__(batch * (_PROMPT + _MAX_TOKENS) // 16, _MODEL_S)
        self.launched_at: list[float] = []
        self.done = threading.Event()
        self._batch = batch
        self._steps = steps

    def launch(self, step: StepInput) -> None:
        """See Runner."""
        if len(step.sampled) == self._batch and not self.done.is_set():
            self.launched_at.append(time.perf_counter())
            if len(self.launched_at) > self._steps + _SETTLING:
                self.done.set()
        super().launch(step)


@asynccontextmanager
async def _worker(runner: IdleRunner, batch: int, redis_url: str | None) -> AsyncIterator[tuple[Worker, int]]:
    parts = WorkerParts(
        role=WorkerRole.DECODE,
        runner=runner,
        scheduler=DecodeScheduler(batch * _PROMPT),
        make_transports=make_transports(TransportName.GRPC),
        fingerprint="micro",
        eos_token_ids=(),
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=batch,  # all of them taken: a long prompt waits, and is not computed
        redis_url=redis_url,
    )
    worker = Worker(parts)
    port = await worker.start("127.0.0.1:0")
    try:
        yield worker, port
    finally:
        await worker.stop()


def _submit_inside(worker: Worker, batch: int) -> None:
    """Submits the sequences in the name of a gateway that has no stream."""
    worker.engine.call(lambda core, now: core.from_gateways.hello(GatewayId(1), 0))
    for number in range(batch):
        capsule = _capsule(number, _PROMPT)
        request = Request(AttemptId(GatewayId(1), number + 1), capsule, Kind.LOCAL, arrival=0.0, deadline=math.inf)
        worker.engine.call(partial(_submit, request))


def _submit(request: Request, core: WorkerCore, now: float) -> None:
    core.from_gateways.submit(request, now)


def _gateway(pipe: Connection, port: int, gateway_id: int, sequences: int, long_prompts: bool) -> None:
    """Runs in a process of its own. The pipe carries nothing."""
    asyncio.run(_read_frames(port, gateway_id, sequences, long_prompts))


async def _read_frames(port: int, gateway_id: int, sequences: int, long_prompts: bool) -> None:
    """Submits the gateway's sequences to the worker and reads its frames, until the process is killed."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS) as channel:
        stream: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream("/baton.v1.Worker/Connect")()
        await stream.write(serialize_gateway_message(GatewayHello(GatewayId(gateway_id), 0, wants_block_events=False)))
        for number in range(sequences):
            submit = Submit(number + 1, _capsule(gateway_id * sequences + number, _PROMPT), timeout_s=600.0)
            await stream.write(serialize_gateway_message(submit))
        async with asyncio.TaskGroup() as group:
            if long_prompts:
                group.create_task(_submit_long(stream, sequences + 1))
            while await stream.read() is not grpc.aio.EOF:
                pass


async def _submit_long(stream: "grpc.aio.StreamStreamCall[bytes, bytes]", handle: int) -> None:
    while True:
        submit = Submit(handle, _capsule(handle, _LONG_PROMPT), timeout_s=600.0)
        await stream.write(serialize_gateway_message(submit))
        await stream.write(serialize_gateway_message(Abort(handle)))
        handle += 1
        await asyncio.sleep(_LONG_EVERY_S)


def _capsule(number: int, num_prompt: int) -> Capsule:
    """Makes a capsule whose prompt shares no block with another one."""
    tokens = number * _LONG_PROMPT + np.arange(num_prompt, dtype=np.int32)
    return Capsule(tokens, num_prompt, SamplingParams(max_tokens=_MAX_TOKENS, ignore_eos=True))
