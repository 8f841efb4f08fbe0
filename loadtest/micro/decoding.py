"""A worker whose sequences all decode, over a runner that computes nothing: what its rounds take is Baton's own."""

import math
import time
from collections.abc import Callable

import numpy as np

from kvtransfer.block_memory import HostBlocks
from kvtransfer.consumer import Consumer
from kvtransfer.handles import HandleMarks
from kvtransfer.ids import AttemptId, GatewayId, WorkerId
from kvtransfer.layout import KvLayout
from kvtransfer.producer import Producer
from services.decode.scheduler import DecodeScheduler
from services.engine.batch_state import Phase
from services.engine.engine import Engine
from services.engine.request import Kind, Request
from services.engine.runner.base import StepInput, StepOutput
from services.engine.scheduler import Scheduler
from services.protocol.capsule import Capsule
from services.protocol.sampling import SamplingParams
from services.protocol.wire import pack_worker_message
from services.worker.core import WorkerCore
from services.worker.core_state import CoreOutputs
from services.worker.engine_thread import EngineThread

BLOCK_SIZE = 16
_GATEWAY = GatewayId(1)
_PROMPT = 64
_EOS = 1 << 29  # never sampled


class RestingRunner:
    """A `Runner` that computes nothing, for as long as it is told. Each sequence has tokens of its own."""

    vocab_size = 1 << 30
    window: int | None = None

    def __init__(self, num_blocks: int, model_s: float = 0.0) -> None:
        self.layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, dtype="float32")
        self.num_blocks = num_blocks
        self._kv = HostBlocks(np.zeros((num_blocks, self.layout.block_bytes), dtype=np.uint8))
        self._model_s = model_s
        self._tokens = np.zeros(0, dtype=np.int32)

    def kv_memory(self) -> HostBlocks:
        """See Runner."""
        return self._kv

    def copy_block(self, source: int, destination: int) -> None:
        """See Runner."""

    def launch(self, step: StepInput) -> None:
        """See Runner."""
        if len(self._tokens) != len(step.sample_rows):
            self._tokens = np.arange(len(step.sample_rows), dtype=np.int32)

    def collect(self) -> StepOutput:
        """See Runner. The interpreter lock is given away meanwhile, as a model's operations would."""
        if self._model_s:
            time.sleep(self._model_s)
        return StepOutput(self._tokens, None)


class DecodingWorker:
    """`batch` sequences of 64 to 79 prompt tokens, each with room for `steps` more; a sixteenth fills a block a step.

    `round` is the engine thread's, on the thread of the caller; `take`, which may be replaced, gets what it hands on.
    """

    def __init__(self, batch: int, steps: int, take: Callable[[CoreOutputs], None], *, model_s: float = 0.0) -> None:
        self.take = take
        max_tokens = steps + 100  # and some steps until all decode
        max_model_len = _PROMPT + BLOCK_SIZE + max_tokens
        runner = RestingRunner(batch * (max_model_len // BLOCK_SIZE + 2), model_s)
        scheduler = DecodeScheduler(batch * (_PROMPT + BLOCK_SIZE))
        self.core = make_core(runner, scheduler, batch, max_model_len)
        self._thread = EngineThread(self.core, lambda outputs, has_leases: self.take(outputs), _fail)
        self.round = self._thread.round
        for number in range(batch):
            prompt = number * _PROMPT * 2 + np.arange(_PROMPT + number % BLOCK_SIZE, dtype=np.int32)
            self.core.from_gateways.submit(make_request(number + 1, prompt, max_tokens), 0.0)
        while len(self.core.engine.sequences.batch.slots_in(Phase.DECODE)) < batch:
            self.round()


def make_core(runner: RestingRunner, scheduler: Scheduler, max_num_seqs: int, max_model_len: int) -> WorkerCore:
    """A worker's core that a gateway is connected to."""
    engine = Engine(runner, scheduler, max_num_seqs=max_num_seqs, max_model_len=max_model_len, eos_token_ids=(_EOS,))
    marks = HandleMarks()
    core = WorkerCore(engine, WorkerId(1), Producer(WorkerId(1), marks), Consumer(), marks)
    core.from_gateways.hello(_GATEWAY, 0)
    return core


def make_request(handle: int, prompt: np.ndarray, max_tokens: int) -> Request:
    """That gateway's request, without a deadline."""
    capsule = Capsule(prompt, len(prompt), SamplingParams(max_tokens=max_tokens))
    return Request(AttemptId(_GATEWAY, handle), capsule, Kind.LOCAL, arrival=0.0, deadline=math.inf)


def pack(outputs: CoreOutputs) -> None:
    """What the worker's event loop does with frames before they are gRPC's."""
    packed(outputs)


def packed(outputs: CoreOutputs) -> list[bytes]:
    """The frames' bytes, as they go to gRPC."""
    return [pack_worker_message(frame).SerializeToString() for frame in outputs.frames.values()]


def _fail(reason: str) -> None:
    raise RuntimeError(reason)
