"""An engine that hangs in a step ends its worker; one that only stands still with its machine does not."""

import asyncio
import threading
import time
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtransfer.transports.memory import MemoryFabric
from services.config import WorkerRole
from services.engine.runner.base import StepOutput
from services.engine.runner.simulated import SimulatedRunner
from services.worker import engine_watch
from services.worker.engine_watch import FIRST_S, LEAST_S, EngineWatch
from tests.worker.client import TestGateway
from tests.worker.conftest import make_worker

HANGS = threading.Event()  # set: the next step does not end until it is cleared


class HangingRunner(SimulatedRunner):
    def collect(self) -> StepOutput:
        while HANGS.is_set():
            time.sleep(0.01)
        return super().collect()


@dataclass
class Thread:
    num_rounds: int = 10
    longest_round_s: float = 0.1
    resting: bool = False


def seconds_until_hang(thread: Thread, tick_s: float = 0.25) -> float:
    reasons: list[str] = []
    watch, seconds = EngineWatch(thread, reasons.append), 0.0
    watch.tick(0.0)
    while not reasons:
        watch.tick(tick_s)
        seconds += tick_s
    watch.tick(tick_s)
    assert len(reasons) == 1
    return seconds


@pytest.mark.parametrize(
    ("thread", "bound_s"),
    [
        (Thread(), LEAST_S),
        (Thread(longest_round_s=12.0), 120.0),
        (Thread(num_rounds=2), FIRST_S),
    ],
)
def test_the_bound_follows_from_the_rounds_so_far(thread: Thread, bound_s: float):
    assert seconds_until_hang(thread) == pytest.approx(bound_s, abs=0.5)


def test_a_machine_that_stands_still_ages_a_round_by_a_second():
    assert seconds_until_hang(Thread(), tick_s=3600.0) == 3600.0 * (LEAST_S + 1)


def test_a_thread_that_rests_or_gets_on_does_not_hang():
    thread, reasons = Thread(resting=True), list[str]()
    watch = EngineWatch(thread, reasons.append)
    for _ in range(1000):
        watch.tick(1.0)
    thread.resting = False
    for _ in range(1000):
        thread.num_rounds += 1
        watch.tick(1.0)
    assert not reasons


async def test_a_hung_engine_makes_its_worker_unhealthy_and_ends_it(monkeypatch: pytest.MonkeyPatch):
    worker, gateway = make_worker(WorkerRole.DECODE, MemoryFabric(), runner=HangingRunner), TestGateway()
    port = await worker.start("127.0.0.1:0")
    try:
        async with gateway.connect(port) as stream, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            submit = gateway.submit([1, 2, 3], 100_000)
            await stream.send(submit)
            await stream.until(lambda: len(stream.rows[submit.handle]) > 5)
            HANGS.set()
            begin = time.monotonic()
            monkeypatch.setattr(engine_watch, "LEAST_S", 0.5)  # not before: a machine that stands still is no hang
            monkeypatch.setattr(engine_watch, "_TIMES_LONGEST", 0.0)
            async with asyncio.timeout(300):
                reason = await worker.ended
            print(f"noticed after {time.monotonic() - begin:.2f} s")
            assert reason is not None
            assert reason.startswith("the engine has made no step for")
            await asyncio.sleep(0)
            health: Any = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            async with asyncio.timeout(300):
                await worker.stop()  # the engine hangs on
            assert not worker.threads_ended
    finally:
        HANGS.clear()
        assert await asyncio.to_thread(worker.engine.stop, 300)
