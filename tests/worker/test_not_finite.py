"""Numbers that are not finite, in whole workers: who is told, what others may read, and when a worker ends."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvtransfer.transports.memory import MemoryFabric
from services.config import WorkerRole
from services.engine.runner.simulated import SimulatedRunner
from services.protocol.outcomes import FailureCode
from services.worker.worker import Worker, WorkerError
from tests.engine.harness import reference
from tests.worker.client import TestGateway
from tests.worker.conftest import BLOCK_SIZE, Pair, make_worker, serving

NAN = 777
CHUNK = 32  # tokens of a step at the prefill worker


@pytest.fixture
async def damaged(pair: Pair) -> AsyncIterator[Pair]:
    """Both workers' model has a token whose embedding is NaN. They still are what they were at the end."""
    for worker in pair.workers:
        runner_of(worker).nan_token = NAN
    yield pair
    await pair.baseline()
    assert not any(worker.ended.done() for worker in pair.workers)


def runner_of(worker: Worker) -> SimulatedRunner:
    """The worker's runner."""
    runner = worker._parts.runner
    assert isinstance(runner, SimulatedRunner)
    return runner


@pytest.mark.parametrize("at", [0, 40, 79])
async def test_a_prompt_that_is_handed_off_fails_once_and_leaves_nothing_on_either_side(damaged: Pair, at: int) -> None:
    """No gateway or index hears of a block of it at the prefill worker. The decode worker may have those of earlier
    chunks, for which all was finite.
    """
    gateway, prefill, decode = damaged.gateway, damaged.prefill, damaged.decode
    handle = await gateway.hand_off(prefill, decode, [*range(at), NAN, *range(79 - at)], 5)
    await prefill.until(lambda: prefill.ended(handle))
    assert prefill.failures[handle].code is FailureCode.NOT_FINITE
    sound = await gateway.hand_off(prefill, decode, [5, 6, 7], 3)
    await decode.until(lambda: decode.ended(sound))
    assert decode.tokens(sound) == reference([5, 6, 7], 3)
    await damaged.baseline()
    assert prefill.load.not_finite == 1
    assert not decode.failures
    assert not prefill.rows[handle]
    assert not decode.rows[handle]
    assert len(prefill.held_hashes()) == 0
    assert 1 <= len(decode.held_hashes()) <= 1 + at // CHUNK * CHUNK // BLOCK_SIZE  # one is of the sound request


async def test_an_answer_ends_at_the_decode_worker_that_notices(damaged: Pair) -> None:
    prompt = list(range(30, 60))
    expected = reference(prompt, 20)
    runner_of(damaged.workers[1]).nan_token = expected[9]
    handle = await damaged.gateway.hand_off(damaged.prefill, damaged.decode, prompt, 20)
    await damaged.decode.until(lambda: damaged.decode.ended(handle))
    assert damaged.decode.tokens(handle) == expected[:10]
    assert damaged.decode.failures[handle].code is FailureCode.NOT_FINITE
    assert damaged.decode.load.not_finite == 1
    assert damaged.prefill.load.not_finite == 0


async def test_a_worker_that_fails_its_check_ends_and_blames_no_request() -> None:
    """Its gateways lose their stream, and go on elsewhere."""
    worker, gateway = make_worker(WorkerRole.DECODE, MemoryFabric()), TestGateway()
    async with serving(worker) as (port,), gateway.connect(port) as stream:
        runner = runner_of(worker)
        check = worker.engine._core.engine.check
        runner.nan_token = int(check._tokens[20])  # something happened to the weights after the start
        submit = gateway.submit([4, runner.nan_token, 6], 5)
        await stream.send(submit)
        reason = await worker.ended
    assert reason is not None
    assert "self-check failed" in reason
    assert not stream.failures
    assert not stream.rows[submit.handle]


def test_a_worker_whose_model_computes_nothing_finite_does_not_start() -> None:
    parts = make_worker(WorkerRole.DECODE, MemoryFabric())._parts
    with pytest.raises(WorkerError, match="not finite, whatever the prompt"):
        Worker(replace(parts, runner=SimulatedRunner(8, 4, vocab_size=1, nan_token=0)))
