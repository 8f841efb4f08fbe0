"""A worker process with everything in it but a model, which notes when the moments of a handoff are.

Its KV has the shape of a small model's, and its steps take time in proportion to their tokens, without a core. The
monotonic clock is one for all processes of a host.
"""

import asyncio
import logging
import sys
import time
from collections.abc import MutableSequence, Sequence
from enum import IntEnum
from multiprocessing.connection import Connection

import numpy as np
import structlog

from kvtransfer.layout import KvLayout
from kvtransfer.transports.base import BlockRead, Incarnation, Reach, ReadEnd, Transport
from kvtransfer.transports.byte_stream import BlockSource, Dial
from services.config import TransportName, WorkerRole
from services.decode.scheduler import DecodeScheduler
from services.engine.runner.base import StepInput, StepOutput
from services.prefill.scheduler import PrefillScheduler
from services.worker.engine_thread import SWITCH_INTERVAL_S
from services.worker.transports import make_transports
from services.worker.worker import Worker, WorkerParts

BLOCK_SIZE = 16
LAYOUT = KvLayout(num_layers=12, num_kv_heads=4, head_dim=64, block_size=BLOCK_SIZE, dtype="bfloat16")  # 192 KiB
VOCABULARY = 8192
MAX_MODEL_LEN = 16_384

NUM_BLOCKS = 2048
_TOKEN_S, _LEAST_STEP_S = 20e-6, 0.001


class Mark(IntEnum):
    """What is noted, in seconds; the later one of two overwrites the earlier."""

    COLLECTED = 0  # when the last step was complete
    LAUNCHED = 1  # when the first step since this was 0 began
    READ = 2  # how long the last read took, from its post until its end was known


Marks = MutableSequence[float]  # by Mark; shared between processes


def new_marks() -> list[float]:
    """What a shared array begins with."""
    return [0.0] * len(Mark)


class _TimedRunner:
    """A `Runner` that computes nothing, for as long as a model would."""

    vocab_size = VOCABULARY
    window: int | None = None
    layout = LAYOUT
    num_blocks = NUM_BLOCKS

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._kv = np.full((NUM_BLOCKS, LAYOUT.block_bytes), 1, dtype=np.uint8)  # in memory, not only asked for
        self._num_rows = 0
        self._step_s = 0.0

    def kv_bytes(self) -> np.ndarray:
        """See Runner."""
        return self._kv

    def copy_block(self, source: int, destination: int) -> None:
        """See Runner."""

    def launch(self, step: StepInput) -> None:
        """See Runner."""
        self._marks[Mark.LAUNCHED] = self._marks[Mark.LAUNCHED] or time.monotonic()
        self._num_rows = len(step.sample_rows)
        self._step_s = max(_LEAST_STEP_S, len(step.token_ids) * _TOKEN_S)

    def collect(self) -> StepOutput:
        """See Runner."""
        time.sleep(self._step_s)
        self._marks[Mark.COLLECTED] = time.monotonic()
        return StepOutput(np.arange(self._num_rows, dtype=np.int32), None)


class _TimedTransport:
    """A `Transport` that hands everything on to another one."""

    def __init__(self, inner: Transport, marks: Marks) -> None:
        self.name = inner.name
        self._inner = inner
        self._marks = marks
        self._posted_s: dict[int, float] = {}

    def descriptor(self) -> bytes:
        """See Transport."""
        return self._inner.descriptor()

    def reach(self, descriptor: bytes) -> Reach:
        """See Transport."""
        return self._inner.reach(descriptor)

    def add_peer(self, peer: Incarnation, address: str, descriptor: bytes) -> None:
        """See Transport."""
        self._inner.add_peer(peer, address, descriptor)

    def forget_peer(self, peer: Incarnation) -> None:
        """See Transport."""
        self._inner.forget_peer(peer)

    def post(self, read: BlockRead) -> None:
        """See Transport."""
        self._posted_s[read.read_id] = time.monotonic()
        self._inner.post(read)

    def give_up(self, read_id: int) -> None:
        """See Transport."""
        self._inner.give_up(read_id)

    def poll(self) -> list[ReadEnd]:
        """See Transport."""
        ends = self._inner.poll()
        for end in ends:
            self._marks[Mark.READ] = time.monotonic() - self._posted_s.pop(end.read_id)
        return ends

    def close(self) -> None:
        """See Transport."""
        self._inner.close()


def serve(role: WorkerRole, max_num_batched_tokens: int, marks: Marks, pipe: Connection) -> None:
    """Sends its port up the pipe and serves until it is killed."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    sys.setswitchinterval(SWITCH_INTERVAL_S)

    def make_timed(source: BlockSource, dial: Dial) -> Sequence[Transport]:
        return [_TimedTransport(inner, marks) for inner in make_transports(TransportName.NIXL)(source, dial)]

    prefill, decode = PrefillScheduler(max_num_batched_tokens), DecodeScheduler(max_num_batched_tokens)
    parts = WorkerParts(
        role=role,
        runner=_TimedRunner(marks),
        scheduler=prefill if role is WorkerRole.PREFILL else decode,
        make_transports=make_timed,
        fingerprint="micro",
        eos_token_ids=(),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
    )
    asyncio.run(_serve(Worker(parts), pipe))


async def _serve(worker: Worker, pipe: Connection) -> None:
    pipe.send(await worker.start("127.0.0.1:0"))
    await worker.ended
