"""A prefill and a decode worker in this process: real streams and threads, simulated model, memory transport."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cached_property

import pytest

from kvtransfer.transports.base import Transport
from kvtransfer.transports.byte_stream import BlockSource, Dial
from kvtransfer.transports.memory import MemoryFabric, MemoryTransport
from services.config import WorkerRole
from services.engine.runner.base import StepInput
from services.engine.runner.simulated import SimulatedRunner
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.schedulers.prefill import PrefillScheduler
from services.tls.files import CertificateFiles
from services.worker.worker import MakeTransports, Worker, WorkerParts
from tests.pace import Pace
from tests.worker.client import Stream, TestGateway

BLOCK_SIZE = 4
MAX_MODEL_LEN = 6000


@dataclass
class Pair:
    """Streams of one gateway to both workers."""

    gateway: TestGateway
    prefill: Stream
    decode: Stream
    fabric: MemoryFabric
    workers: list[Worker]

    @property
    def decode_steps(self) -> int:
        """Steps that the decode worker has run."""
        runner = self.workers[1]._parts.runner
        assert isinstance(runner, CountingRunner)
        return runner.num_steps

    def slow_down(self, step_s: float = 0.02) -> None:
        """Gives each step of the decode worker so much time: a long request outlasts what the test does meanwhile."""
        runner = self.workers[1]._parts.runner
        assert isinstance(runner, CountingRunner)
        runner.pace.step_s = step_s

    async def baseline(self) -> None:
        """Waits until neither worker holds anything but cached content; fails when that does not come."""
        for worker in self.workers:
            await worker_baseline(worker)


async def worker_baseline(worker: Worker, timeout_s: float = 120.0) -> None:
    """Waits until the worker's pool is at its baseline and nothing is open."""
    import asyncio

    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        while True:
            answer: asyncio.Future[bool] = loop.create_future()

            def look(core, now, answer=answer) -> None:
                sequences = core.engine.sequences
                sequences.check()
                at_baseline = not core.open_ids and sequences.pool.available == sequences.pool.num_blocks
                loop.call_soon_threadsafe(answer.set_result, at_baseline)

            worker.engine.call(look)
            if await answer:
                return
            await asyncio.sleep(0.02)


class CountingRunner(SimulatedRunner):
    """Counts steps, so that a test sees what was computed for nobody, and keeps to a pace."""

    num_steps = 0

    def launch(self, step: StepInput) -> None:
        self.num_steps += 1
        self.pace.keep()
        super().launch(step)

    @cached_property
    def pace(self) -> Pace:
        """The least time of its steps."""
        return Pace()


def make_worker(
    role: WorkerRole,
    fabric: MemoryFabric,
    *,
    num_blocks: int = 2000,
    max_num_seqs: int = 64,
    redis_url: str | None = None,
    transports: MakeTransports | None = None,
    runner: type[SimulatedRunner] | None = None,
    tls: CertificateFiles | None = None,
    health_address: str | None = None,
) -> Worker:
    """A worker over the simulated runner, and the memory transport unless others are named."""

    def over_memory(source: BlockSource, dial: Dial) -> list[Transport]:
        return [MemoryTransport(fabric, source.worker_id, source.memory)]

    scheduler = PrefillScheduler(32) if role is WorkerRole.PREFILL else DecodeScheduler(64, prefill_chunk=16)
    return Worker(
        WorkerParts(
            role=role,
            runner=(runner or CountingRunner)(num_blocks, BLOCK_SIZE),
            scheduler=scheduler,
            make_transports=transports or over_memory,
            fingerprint="simulated",
            eos_token_ids=(),
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            redis_url=redis_url,
            tls=tls,
            health_address=health_address,
        )
    )


@contextlib.asynccontextmanager
async def serving(*workers: Worker) -> AsyncIterator[list[int]]:
    """Ports of the started workers."""
    ports = [await worker.start("127.0.0.1:0") for worker in workers]
    try:
        yield ports
    finally:
        for worker in workers:
            await worker.stop()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    fabric = MemoryFabric()
    workers = [make_worker(WorkerRole.PREFILL, fabric), make_worker(WorkerRole.DECODE, fabric)]
    gateway = TestGateway()
    async with (
        serving(*workers) as (prefill_port, decode_port),
        gateway.connect(prefill_port) as prefill,
        gateway.connect(decode_port) as decode,
    ):
        yield Pair(gateway, prefill, decode, fabric, workers)
