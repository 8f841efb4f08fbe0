"""Busy is not silent: whom a decode worker asks its gateways to avoid, over real streams."""

import time

import pytest

from kvtransfer.messages import EndReason
from kvtransfer.progress import ProgressLimits
from kvtransfer.transports.memory import MemoryFabric
from services.config import WorkerRole
from services.engine.runner.base import StepInput
from services.engine.runner.simulated import SimulatedRunner
from tests.engine.harness import reference
from tests.worker.client import TestGateway
from tests.worker.conftest import Pair, make_worker, serving
from tests.worker.relay import Relay

LONG_STEP_S = ProgressLimits().silent_s + 0.5
PROMPT = list(range(200, 212))


class SlowRunner(SimulatedRunner):
    """Takes long for a step in which a prompt begins."""

    def launch(self, step: StepInput) -> None:
        if step.tokens.positions.min() == 0:
            time.sleep(LONG_STEP_S)
        super().launch(step)


@pytest.mark.long
async def test_a_prefill_worker_in_a_long_step_is_not_avoided_though_opens_wait_for_the_step():
    fabric, gateway = MemoryFabric(), TestGateway()
    workers = (make_worker(WorkerRole.PREFILL, fabric, runner=SlowRunner), make_worker(WorkerRole.DECODE, fabric))
    async with (
        serving(*workers) as (prefill_port, decode_port),
        gateway.connect(prefill_port) as prefill,
        gateway.connect(decode_port) as decode,
    ):
        start = time.monotonic()
        first = await gateway.hand_off(prefill, decode, PROMPT, 5)
        second = await gateway.hand_off(prefill, decode, [1, *PROMPT], 5)
        while not decode.ended(first) or not decode.ended(second):
            load = decode.load
            await decode.until(lambda load=load: decode.load is not load)
            assert decode.load.avoid == ()
        assert time.monotonic() - start > LONG_STEP_S
        assert decode.tokens(first) == reference(PROMPT, 5)
        assert decode.tokens(second) == reference([1, *PROMPT], 5)


async def test_a_prefill_worker_whose_streams_are_silent_is_avoided_and_its_handoffs_fail(pair: Pair):
    """Pings are answered, and nothing else."""
    assert pair.prefill.hello is not None
    relay = Relay(pair.prefill.address)
    async with relay.serving():
        pair.prefill.address = relay.address
        warm = await pair.gateway.hand_off(pair.prefill, pair.decode, [1, 2, 3], 5)
        await pair.decode.until(lambda: pair.decode.ended(warm))
        relay.fall_silent()
        start = time.monotonic()
        handle = await pair.gateway.hand_off(pair.prefill, pair.decode, PROMPT, 5)
        await pair.decode.until(lambda: pair.decode.load.avoid)
        avoided_s = time.monotonic() - start
        await pair.decode.until(lambda: handle in pair.decode.failures)
        print(f"silence: avoided after {avoided_s:.1f} s, failed after {time.monotonic() - start:.1f} s")
        assert pair.decode.load.avoid == (pair.prefill.hello.worker_id,)
        assert pair.decode.failures[handle].end_reason is EndReason.STALLED
    await pair.baseline()
