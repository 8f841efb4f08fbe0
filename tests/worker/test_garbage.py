"""Steady decoding leaves nothing for the garbage collector."""

import gc
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvtransfer.consumer import Consumer
from kvtransfer.handles import HandleMarks
from kvtransfer.ids import AttemptId, GatewayId, WorkerId
from kvtransfer.producer import Producer
from services.engine.engine import Engine
from services.engine.runner.simulated import SimulatedRunner
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.sequences.batch_state import Phase
from services.engine.sequences.request import Kind, Request
from services.protocol.capsule import Capsule
from services.protocol.sampling import SamplingParams
from services.protocol.wire import pack_worker_message
from services.worker.core.core import WorkerCore
from services.worker.core.state import CoreOutputs
from services.worker.engine_thread import EngineThread

BATCH, BLOCK_SIZE, STEPS, VOCAB = 32, 4, 40, 1 << 16
WINDOWS = 3  # of STEPS: what a step leaves, it leaves in each


class DecodingWorker:
    """Its sequences all decode; a quarter of them fills a block in each round, soon in place of an older one."""

    def __init__(self, depth: int, sampling: dict[str, Any]) -> None:
        runner = SimulatedRunner(BATCH * 16, BLOCK_SIZE, vocab_size=VOCAB, late=depth > 0)
        self.engine = Engine(
            runner,
            DecodeScheduler(BATCH * 100),
            max_num_seqs=BATCH,
            max_model_len=200,
            eos_token_ids=(VOCAB - 1,),
            pipeline_depth=depth,
        )
        marks = HandleMarks()
        self.core = WorkerCore(self.engine, WorkerId(1), Producer(WorkerId(1), marks), Consumer(), marks)
        self.round = EngineThread(self.core, self._pack, pytest.fail).round
        self.num_evicted = 0
        self.core.from_gateways.hello(GatewayId(7), 0)
        self._submit(0, {"max_tokens": 30})
        while not self.core.idle:
            self.round()
        self._submit(BATCH, {"max_tokens": 150, **sampling})
        while len(self.engine.sequences.batch.slots_in(Phase.DECODE)) < BATCH:
            self.round()

    def _submit(self, first: int, sampling: dict[str, Any]) -> None:
        for number in range(first, first + BATCH):
            prompt = np.arange(number * 100, number * 100 + 8 + number % BLOCK_SIZE, dtype=np.int32)
            capsule = Capsule(prompt, len(prompt), SamplingParams(**{"temperature": 0, **sampling}))
            request = Request(AttemptId(GatewayId(7), number + 1), capsule, Kind.LOCAL, arrival=0.0, deadline=math.inf)
            self.core.from_gateways.submit(request, 0.0)

    def _pack(self, outputs: CoreOutputs, has_leases: bool) -> None:
        """As the worker does before frames are gRPC's."""
        self.num_evicted += outputs.block_events.tokens.count(None)
        for frame in outputs.frames.values():
            pack_worker_message(frame).SerializeToString()


@pytest.fixture(autouse=True, scope="module")
def nothing_older() -> Iterator[None]:
    """Leaves what other tests of this process keep, which can be millions of objects, out of what is counted."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as the run began


def kept_of(worker: DecodingWorker) -> int:
    """Counts the objects that rounds leave, with those that other threads of the process made meanwhile."""
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(STEPS):
            worker.round()
        return len(gc.get_objects()) - before
    finally:
        gc.enable()


@pytest.mark.few(3)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"num_logprobs": 3}, {"temperature": 0.7, "stop_token_ids": (1, 2, 3)}, {"min_tokens": 140}],
    ids=["greedy", "logprobs", "sampled", "min_tokens"],
)
def test_a_steady_step_leaves_no_object_that_the_collector_tracks(sampling: dict[str, Any], depth: int) -> None:
    """Rounds of the worker's own loop, blocks that fill and grow, frames up to their bytes."""
    worker = DecodingWorker(depth, sampling)
    for _ in range(2 * BLOCK_SIZE):
        worker.round()
    kept = min(kept_of(worker) for _ in range(WINDOWS))
    assert worker.num_evicted
    assert kept < STEPS // 4, f"{kept / STEPS} objects a step stay"
