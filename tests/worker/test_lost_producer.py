"""A producer that cannot be reached may be alive, and what is being read from it may still land.

Over the memory fabric in this process, and over NIXL between processes.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kvtransfer.ids import WorkerId
from kvtransfer.messages import EndReason
from kvtransfer.process import ProcessIdentity
from kvtransfer.transports.memory import MemoryFabric
from loadtest.processes import free_ports
from services.config import WorkerRole
from services.protocol.messages import Abort
from services.protocol.outcomes import FailureCode
from services.worker.core.core import WorkerCore
from services.worker.worker import Worker
from tests.engine.harness import reference
from tests.worker.client import Stream, TestGateway
from tests.worker.conftest import make_worker, serving, worker_baseline
from tests.worker.process import SimulatedWorkerProcess
from tests.worker.relay import Relay

NUM_BLOCKS = 100
PROMPT = list(range(500, 530))  # one chunk of prefill, so one announcement
PROMPT_BLOCKS = 8
OTHERS = [[first + at for at in range(60)] for first in range(10, 510, 70)]  # 16 blocks each: more than there are


async def ask(worker: Worker, question: Callable[[WorkerCore], Any]) -> Any:
    """What the worker's core answers, on its thread."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def look(core: WorkerCore, now: float) -> None:
        loop.call_soon_threadsafe(answer.set_result, question(core))

    worker.engine.call(look)
    return await answer


async def until(worker: Worker, condition: Callable[[WorkerCore], bool], timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await ask(worker, condition):
            await asyncio.sleep(0.01)


async def serve_others(gateway: TestGateway, decode: Stream) -> None:
    """Prompts for the decode worker alone, until each block that it has left was used."""
    for prompt in OTHERS:
        submit = gateway.submit(prompt, 3)
        await decode.send(submit)
        await decode.until(lambda handle=submit.handle: decode.ended(handle))
        assert decode.tokens(submit.handle) == reference(prompt, 3)


async def ask_others_again(gateway: TestGateway, decode: Stream) -> None:
    """The latest are answered by blocks that are still cached."""
    for prompt in OTHERS[-3:]:
        submit = gateway.submit(prompt, 3)
        await decode.send(submit)
        await decode.until(lambda handle=submit.handle: decode.ended(handle))
        assert decode.rows[submit.handle][0].cached
        assert decode.tokens(submit.handle) == reference(prompt, 3), "wrong tokens"


@dataclass
class Bench:
    """A decode worker that reads a living prefill worker, which it reaches through a relay."""

    fabric: MemoryFabric
    gateway: TestGateway
    producer: Worker
    consumer: Worker
    prefill: Stream
    decode: Stream
    relay: Relay
    other_address: str

    async def lose(self, how: str) -> None:
        """The producer lives on."""
        if how == "refused":
            await self.relay.refuse()
        else:
            await self.relay.lead_to(self.other_address)

    async def read_of_lost_producer(self, how: str) -> None:
        """A handoff fails while its blocks are being read."""
        self.fabric.hold(self.source)
        handle = await self.gateway.hand_off(self.prefill, self.decode, PROMPT, 5)
        await until(self.consumer, lambda core: core.has_open_reads)
        await self.lose(how)
        await self.decode.until(lambda: handle in self.decode.failures)
        assert self.decode.failures[handle].code is FailureCode.HANDOFF
        assert self.decode.failures[handle].end_reason is EndReason.WORKER_LOST
        await self.prefill.send(Abort(handle))

    @property
    def source(self) -> WorkerId:
        assert self.prefill.hello is not None
        return WorkerId(self.prefill.hello.worker_id)

    def content(self) -> np.ndarray:
        """What the decode worker's pool holds now."""
        array: np.ndarray = self.consumer._parts.runner.kv_memory().array.copy()  # type: ignore[attr-defined]
        return array


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    fabric, gateway = MemoryFabric(), TestGateway()
    producers = [make_worker(WorkerRole.PREFILL, fabric) for _ in range(2)]
    consumer = make_worker(WorkerRole.DECODE, fabric, num_blocks=NUM_BLOCKS)
    async with (
        serving(*producers, consumer) as (prefill_port, other_port, decode_port),
        gateway.connect(prefill_port) as prefill,
        gateway.connect(decode_port) as decode,
    ):
        relay = Relay(prefill.address)
        async with relay.serving():
            prefill.address = relay.address
            other = f"127.0.0.1:{other_port}"
            bench = Bench(fabric, gateway, producers[0], consumer, prefill, decode, relay, other)
            yield bench
            fabric.release(bench.source)


async def test_a_read_that_stands_still_fails_its_handoff_long_before_the_deadline(bench: Bench):
    """One-sided, with the control stream alive, and 300 s to the deadline. What lands later hits no block in use."""
    warm = await bench.gateway.hand_off(bench.prefill, bench.decode, [1, 2, 3], 5)
    await bench.decode.until(lambda: bench.decode.ended(warm))
    bench.fabric.hold(bench.source)
    handle = await bench.gateway.hand_off(bench.prefill, bench.decode, PROMPT, 5)
    await until(bench.consumer, lambda core: core.has_open_reads)
    start = time.monotonic()
    await bench.decode.until(lambda: handle in bench.decode.failures)
    print(f"a read that stood still was noticed after {time.monotonic() - start:.1f} s")
    assert bench.decode.failures[handle].end_reason is EndReason.STALLED
    assert bench.decode.load.avoid == (bench.source,)
    await serve_others(bench.gateway, bench.decode)
    assert bench.decode.load.quarantined_blocks == PROMPT_BLOCKS
    before = bench.content()
    quarantined = await ask(bench.consumer, lambda core: sorted(core.engine.sequences.tables._quarantined))
    bench.fabric.release(bench.source)
    assert np.flatnonzero((bench.content() != before).any(axis=1)).tolist() == quarantined
    await ask_others_again(bench.gateway, bench.decode)
    await worker_baseline(bench.consumer)
    await worker_baseline(bench.producer)


@pytest.mark.parametrize("how", ["refused", "another life answers"])
async def test_what_lands_late_from_a_living_producer_hits_quarantined_blocks_only(bench: Bench, how: str):
    await bench.read_of_lost_producer(how)
    await serve_others(bench.gateway, bench.decode)
    held = await ask(bench.consumer, lambda core: sorted(core.engine.sequences.tables._quarantined))
    before = bench.content()
    bench.fabric.release(bench.source)
    changed = np.flatnonzero((bench.content() != before).any(axis=1)).tolist()
    assert changed == held, "blocks in use were written to"
    assert len(held) == PROMPT_BLOCKS
    await ask_others_again(bench.gateway, bench.decode)
    await worker_baseline(bench.consumer)


async def test_blocks_leave_quarantine_when_the_process_of_a_lost_producer_is_seen_gone(bench: Bench):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        streams = bench.producer._kv
        streams.identity = replace(streams.identity, process=ProcessIdentity.of(process.pid))
        await bench.read_of_lost_producer("refused")
        await serve_others(bench.gateway, bench.decode)
        assert await ask(bench.consumer, lambda core: core.engine.sequences.tables.num_quarantined) == PROMPT_BLOCKS
        process.kill()
    await worker_baseline(bench.consumer)


OVER_TCP = {"UCX_TLS": "tcp"}  # where a read needs its source's help: one of a stopped source hangs until it goes on


@dataclass
class Processes:
    """A prefill and a decode worker in processes of their own, which move KV over NIXL."""

    gateway: TestGateway
    producer: SimulatedWorkerProcess
    consumer: SimulatedWorkerProcess
    prefill: Stream
    decode: Stream
    relay: Relay

    async def read_of_stopped_producer(self) -> None:
        """The producer is stopped between its announcement and the read, and then its port refuses."""
        warm = await self.gateway.hand_off(self.prefill, self.decode, [1, 2, 3], 5)
        await self.decode.until(lambda: self.decode.ended(warm))
        assert self.decode.tokens(warm) == reference([1, 2, 3], 5)
        await self.decode.until(lambda: not self.decode.load.running)
        self.relay.hold()
        handle = await self.gateway.hand_off(self.prefill, self.decode, PROMPT, 5)
        async with asyncio.timeout(120):
            await self.relay.holding.wait()
        self.producer.freeze()
        self.relay.go_on()
        await self.decode.until(lambda: self.decode.load.running)  # what it reserved blocks for is being read
        await self.relay.refuse()
        await self.decode.until(lambda: handle in self.decode.failures)
        assert self.decode.failures[handle].detail == "WORKER_LOST"

    async def until_quarantined(self, num_blocks: int) -> None:
        await self.decode.until(lambda: self.decode.load.quarantined_blocks == num_blocks)


@contextlib.asynccontextmanager
async def processes(num_blocks: int) -> AsyncIterator[Processes]:
    prefill_port, decode_port = free_ports(2)
    producer = SimulatedWorkerProcess(WorkerRole.PREFILL, NUM_BLOCKS, prefill_port, OVER_TCP)
    consumer = SimulatedWorkerProcess(WorkerRole.DECODE, num_blocks, decode_port, OVER_TCP)
    try:
        for worker in (producer, consumer):
            await listening(worker)
        gateway = TestGateway()
        async with gateway.connect(producer.port) as prefill, gateway.connect(consumer.port) as decode:
            relay = Relay(prefill.address)
            async with relay.serving():
                prefill.address = relay.address
                yield Processes(gateway, producer, consumer, prefill, decode, relay)
    finally:
        for worker in (producer, consumer):
            worker.kill()


async def listening(worker: SimulatedWorkerProcess) -> None:
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", worker.port)):
                return
            assert worker.exit_code is None
            await asyncio.sleep(0.02)


async def test_nixl_reads_of_a_stopped_producer_stay_in_quarantine_until_it_goes_on():
    async with processes(NUM_BLOCKS) as between:
        await between.read_of_stopped_producer()
        await serve_others(between.gateway, between.decode)
        assert between.decode.load.quarantined_blocks == PROMPT_BLOCKS
        between.producer.thaw()
        await between.until_quarantined(0)
        await ask_others_again(between.gateway, between.decode)


async def test_nixl_reads_of_a_killed_producer_leave_quarantine_when_it_is_seen_gone():
    async with processes(NUM_BLOCKS) as between:
        await between.read_of_stopped_producer()
        await between.until_quarantined(PROMPT_BLOCKS)
        between.producer.kill()
        await between.until_quarantined(0)
        await serve_others(between.gateway, between.decode)


@pytest.mark.long
async def test_a_worker_with_a_tenth_of_its_pool_in_quarantine_starts_afresh():
    async with processes(num_blocks=PROMPT_BLOCKS * 8) as between:
        await between.read_of_stopped_producer()
        async with asyncio.timeout(120):
            while between.consumer.exit_code is None:
                await asyncio.sleep(0.05)
        assert between.consumer.exit_code == 1
