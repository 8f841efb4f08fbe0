"""A worker that is told to end: it takes nothing new, finishes what it can, and has the rest continued elsewhere."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtransfer.ids import AttemptId, GatewayId
from kvtransfer.transports.memory import MemoryFabric
from loadtest.processes import free_ports
from protos import worker_pb2, worker_pb2_grpc
from services.config import WorkerRole
from services.process.signals import ENDING
from services.protocol.messages import HandTo
from services.protocol.outcomes import FailureCode
from services.worker.drain import Drain
from services.worker.outbox import Outbox
from tests.engine.harness import reference
from tests.worker.client import Stream, TestGateway
from tests.worker.conftest import Pair, make_worker, serving
from tests.worker.process import SimulatedWorkerProcess
from tests.worker.test_worker import LONG


def ids(number: int) -> list[AttemptId]:
    return [AttemptId(GatewayId(1), handle) for handle in range(number)]


def test_attempts_that_do_not_end_are_failed_one_after_the_other_those_with_most_left_first():
    drain, open_ids = Drain(100.0, 10.0), ids(4)
    left = {id: id.handle for id in open_ids}.__getitem__
    due = {
        now: [id.handle for id in drain.due(open_ids, left, now)] for now in (104.9, 105.0, 106.1, 107.1, 108.9, 109)
    }
    assert due == {104.9: [], 105.0: [], 106.1: [3], 107.1: [2], 108.9: [1], 109: [0]}
    assert drain.due(open_ids, left, 110.0) == [], "each is failed once"


def test_attempts_that_end_by_themselves_are_not_replaced_by_others():
    drain, open_ids = Drain(0.0, 10.0), ids(4)
    assert drain.due(open_ids, lambda id: 1, 5.0) == []
    assert drain.due(open_ids[:2], lambda id: 1, 7.0) == []


def test_without_a_budget_all_are_failed_at_once():
    assert len(Drain(0.0, 0.0).due(ids(3), lambda id: 1, 0.0)) == 3


async def test_an_idle_worker_ends_at_once(pair: Pair):
    for worker in pair.workers:
        worker.drain(600.0)
        async with asyncio.timeout(120):
            assert await worker.ended is None


async def test_a_draining_worker_says_so_at_once_and_refuses_what_crosses_with_the_news(pair: Pair):
    pair.slow_down()
    running = pair.gateway.submit([1, 2, 3], LONG)
    await pair.decode.send(running)
    await pair.decode.until(lambda: pair.decode.rows[running.handle])
    assert not pair.decode.load.draining
    pair.workers[1].drain(600.0)
    await pair.decode.until(lambda: pair.decode.load.draining)
    crossing = pair.gateway.submit([4, 5, 6], 3)
    await pair.decode.send(crossing)
    await pair.decode.until(lambda: crossing.handle in pair.decode.failures)
    assert pair.decode.failures[crossing.handle].code is FailureCode.NOT_NOW
    assert running.handle not in pair.decode.failures
    assert not pair.workers[1].ended.done()


async def test_what_runs_ends_within_the_budget_and_then_the_worker_does(pair: Pair):
    submit = pair.gateway.submit([1, 2, 3], 200)
    await pair.decode.send(submit)
    await pair.decode.until(lambda: pair.decode.rows[submit.handle])
    pair.workers[1].drain(600.0)
    async with asyncio.timeout(300):
        assert await pair.workers[1].ended is None
    await pair.decode.until(lambda: pair.decode.ended(submit.handle))
    assert pair.decode.tokens(submit.handle) == reference([1, 2, 3], 200)


async def test_what_does_not_end_within_the_budget_is_failed_for_its_gateway_to_continue(pair: Pair):
    """With all the tokens before it, and long enough before the end that its gateway hears of it."""
    submits = [pair.gateway.submit([1, 2, number], LONG) for number in range(3)]
    for submit in submits:
        await pair.decode.send(submit)
    await pair.decode.until(lambda: all(pair.decode.rows[submit.handle] for submit in submits))
    pair.workers[1].drain(1.0)
    assert await pair.workers[1].ended is None
    await pair.decode.until(lambda: all(pair.decode.ended(submit.handle) for submit in submits))
    for submit in submits:
        assert pair.decode.failures[submit.handle].code is FailureCode.DRAINING
        tokens = pair.decode.tokens(submit.handle)[:200]
        assert tokens == reference(list(submit.capsule.token_ids), len(tokens))
        rows = pair.decode.rows[submit.handle]
        assert [row.position for row in rows] == list(range(3, 3 + len(rows)))


async def test_a_producer_stays_until_its_reader_is_done(pair: Pair):
    """The consumer never comes: the handoff is failed within the budget, and not before half of it."""
    assert pair.decode.hello is not None
    submit = pair.gateway.submit(list(range(30)), 9, handoff=HandTo(pair.decode.hello.worker_id))
    await pair.prefill.send(submit)
    await pair.prefill.until(lambda: pair.prefill.rows[submit.handle])
    begin = time.monotonic()
    pair.workers[0].drain(1.0)
    assert await pair.workers[0].ended is None
    assert time.monotonic() - begin > 0.5
    await pair.prefill.until(lambda: submit.handle in pair.prefill.failures)
    assert pair.prefill.failures[submit.handle].code is FailureCode.DRAINING


async def test_a_handoff_goes_on_while_both_workers_drain(pair: Pair):
    handles = [await pair.gateway.hand_off(pair.prefill, pair.decode, list(range(n, 90 + n)), 40) for n in range(4)]
    await pair.prefill.until(lambda: any(pair.prefill.rows[handle] for handle in handles))
    await asyncio.sleep(0.05)
    for worker in pair.workers:
        worker.drain(600.0)
    await pair.decode.until(lambda: all(pair.decode.ended(handle) for handle in handles))
    for number, handle in enumerate(handles):
        first = [token for row in pair.prefill.rows[handle] for token in row.tokens]
        assert first == reference(list(range(number, 90 + number)), 1)
        assert pair.decode.tokens(handle) == reference(list(range(number, 90 + number)), 40)
    async with asyncio.timeout(120):
        assert [await worker.ended for worker in pair.workers] == [None, None]


async def test_a_shorter_time_holds_and_a_longer_one_does_not(pair: Pair):
    submit = pair.gateway.submit([1, 2, 3], LONG)
    await pair.decode.send(submit)
    await pair.decode.until(lambda: pair.decode.rows[submit.handle])
    for timeout_s in (600.0, 0.5, 600.0):
        pair.workers[1].drain(timeout_s)
    await pair.workers[1].ended
    await pair.decode.until(lambda: pair.decode.ended(submit.handle))
    assert pair.decode.failures[submit.handle].code is FailureCode.DRAINING  # it did not have the time to end


@asynccontextmanager
async def stub(port: int) -> AsyncIterator[worker_pb2_grpc.WorkerStub]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield worker_pb2_grpc.WorkerStub(channel)


async def test_a_drain_by_grpc_answers_when_it_is_over():
    worker, gateway = make_worker(WorkerRole.DECODE, MemoryFabric()), TestGateway()
    async with serving(worker) as (port,), gateway.connect(port) as stream, stub(port) as client:
        submit = gateway.submit([1, 2, 3], LONG)
        await stream.send(submit)
        await stream.until(lambda: stream.rows[submit.handle])
        reply = await client.Drain(worker_pb2.DrainRequest(timeout_s=0.5), timeout=60)  # sooner than LONG ends
        assert (reply.done, reply.moved) == (True, 1)
        assert worker.ended.done()


async def test_a_drain_for_no_time_that_is_one_is_refused():
    async with serving(make_worker(WorkerRole.DECODE, MemoryFabric())) as (port,), stub(port) as client:
        for timeout_s in (-1.0, float("nan"), float("inf")):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await client.Drain(worker_pb2.DrainRequest(timeout_s=timeout_s))
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_finished_outbox_gives_what_waits_and_takes_no_more():
    outbox: Outbox[int] = Outbox(10, lambda: None)
    outbox.put(1)
    outbox.finish()
    outbox.put(2)
    assert [message async for message in outbox.drain()] == [1]


@pytest.mark.parametrize("number", ENDING)
async def test_a_signal_drains_and_the_second_one_ends_the_process_at_once(number: signal.Signals):
    process, gateway = SimulatedWorkerProcess(WorkerRole.DECODE, 2000, free_ports(1)[0], {}), TestGateway()
    try:
        async with connected(gateway, process.port) as stream:
            submit = gateway.submit([1, 2, 3], LONG)
            await stream.send(submit)
            await stream.until(lambda: stream.rows[submit.handle])
            process.signal(number)
            await stream.until(lambda: stream.load.draining)
            assert process.exit_code is None
            async with stub_of_health(process.port) as health:
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            process.signal(number)
            assert await asyncio.to_thread(process.wait, 120) == 0
    finally:
        process.kill()


@asynccontextmanager
async def stub_of_health(port: int) -> AsyncIterator[Any]:
    """Asks for the health of the worker at this port."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield health_pb2_grpc.HealthStub(channel)


@asynccontextmanager
async def connected(gateway: TestGateway, port: int) -> AsyncIterator[Stream]:
    """A stream to a process that may still be starting."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 60)
    async with gateway.connect(port) as stream:
        yield stream
