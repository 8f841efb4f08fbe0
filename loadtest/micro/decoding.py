"""A worker whose sequences all decode, over a runner that computes nothing: the time of a round is Baton's own."""

import math
from collections.abc import Callable

import numpy as np

from kvtransfer.consumer import Consumer
from kvtransfer.handles import HandleMarks
from kvtransfer.ids import AttemptId, GatewayId, WorkerId
from kvtransfer.producer import Producer
from loadtest.micro.idle_runner import BLOCK_SIZE, IdleRunner
from services.engine.engine import Engine
from services.engine.schedulers.base import Scheduler
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.sequences.batch_state import Phase
from services.engine.sequences.request import Kind, Request
from services.protocol.capsule import Capsule
from services.protocol.sampling import SamplingParams
from services.protocol.wire import pack_worker_message
from services.worker.core.core import WorkerCore
from services.worker.core.state import CoreOutputs
from services.worker.engine_thread import EngineThread

_GATEWAY = GatewayId(1)
_PROMPT = 64
_EOS = 1 << 29  # never sampled


class DecodingWorker:
    """`batch` sequences of 64 to 79 prompt tokens, each with room for `steps` more; a sixteenth fills a block a step.

    `round` runs the engine thread's round on the caller's thread; `take`, which may be replaced, gets its outputs.
    """

    def __init__(self, batch: int, steps: int, take: Callable[[CoreOutputs], None], *, model_s: float = 0.0) -> None:
        self.take = take
        max_tokens = steps + 100  # and some steps until all decode
        max_model_len = _PROMPT + BLOCK_SIZE + max_tokens
        runner = IdleRunner(batch * (max_model_len // BLOCK_SIZE + 2), model_s)
        scheduler = DecodeScheduler(batch * (_PROMPT + BLOCK_SIZE))
        self.core = make_core(runner, scheduler, batch, max_model_len)
        self._thread = EngineThread(self.core, lambda outputs, has_leases: self.take(outputs), _fail)
        self.round = self._thread.round
        for number in range(batch):
            prompt = number * _PROMPT * 2 + np.arange(_PROMPT + number % BLOCK_SIZE, dtype=np.int32)
            self.core.from_gateways.submit(make_request(number + 1, prompt, max_tokens), 0.0)
        while len(self.core.engine.sequences.batch.slots_in(Phase.DECODE)) < batch:
            self.round()


def make_core(runner: IdleRunner, scheduler: Scheduler, max_num_seqs: int, max_model_len: int) -> WorkerCore:
    """Makes a worker's core that a gateway is connected to."""
    engine = Engine(runner, scheduler, max_num_seqs=max_num_seqs, max_model_len=max_model_len, eos_token_ids=(_EOS,))
    marks = HandleMarks()
    core = WorkerCore(engine, WorkerId(1), Producer(WorkerId(1), marks), Consumer(), marks)
    core.from_gateways.hello(_GATEWAY, 0)
    return core


def make_request(handle: int, prompt: np.ndarray, max_tokens: int) -> Request:
    """Makes a request of that gateway, without a deadline."""
    capsule = Capsule(prompt, len(prompt), SamplingParams(max_tokens=max_tokens))
    return Request(AttemptId(_GATEWAY, handle), capsule, Kind.LOCAL, arrival=0.0, deadline=math.inf)


def pack(outputs: CoreOutputs) -> None:
    """Does with frames what the worker's event loop does before it hands them to gRPC."""
    packed(outputs)


def packed(outputs: CoreOutputs) -> list[bytes]:
    """Returns the frames' bytes, as they go to gRPC."""
    return [pack_worker_message(frame).SerializeToString() for frame in outputs.frames.values()]


def _fail(reason: str) -> None:
    raise RuntimeError(reason)
