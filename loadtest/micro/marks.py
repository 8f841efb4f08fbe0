"""Moments of a handoff, noted by workers where they happen: a wrapper around a worker's runner and its transports.

The monotonic clock is one for all processes of a host.
"""

import time
from collections.abc import MutableSequence, Sequence
from dataclasses import replace
from enum import IntEnum

from kvtransfer.block_memory import BlockMemory
from kvtransfer.ids import WorkerId
from kvtransfer.transports.base import BlockRead, Reach, ReadEnd, Transport
from kvtransfer.transports.byte_stream import BlockSource, Dial
from services.config import TransportName
from services.engine.runner.base import Runner, StepInput, StepOutput
from services.worker.worker import WorkerParts


class Mark(IntEnum):
    """The noted moments; a later one overwrites an earlier one."""

    COLLECTED = 0  # seconds: when the last step was complete
    LAUNCHED = 1  # seconds: when the first step since this was 0 began
    READ = 2  # seconds: how long the last read took, from its post until its end was known
    READ_BLOCKS = 3  # of the last read
    TRANSPORT = 4  # of the last read: its place in TransportName


Marks = MutableSequence[float]  # by Mark; shared between processes


def new_marks() -> list[float]:
    """Returns the content with which a shared array begins."""
    return [0.0] * len(Mark)


def marking(parts: WorkerParts, marks: Marks) -> WorkerParts:
    """Returns the parts of the worker with a runner and transports that note their moments."""

    def make_transports(source: BlockSource, dial: Dial) -> Sequence[Transport]:
        return [_MarkingTransport(inner, marks) for inner in parts.make_transports(source, dial)]

    return replace(parts, runner=_MarkingRunner(parts.runner, marks), make_transports=make_transports)


class _MarkingRunner:
    """A `Runner` that hands everything on to another one."""

    def __init__(self, inner: Runner, marks: Marks) -> None:
        self.layout = inner.layout
        self.num_blocks = inner.num_blocks
        self.spare_blocks = inner.spare_blocks
        self.vocab_size = inner.vocab_size
        self.embedding_size = inner.embedding_size
        self.window = inner.window
        self.whole_prompts = inner.whole_prompts
        self.token_types = inner.token_types
        self.generates = inner.generates
        self.has_experts, self.experts_of_ranks = inner.has_experts, inner.experts_of_ranks
        self._inner = inner
        self._marks = marks

    def kv_memory(self) -> BlockMemory:
        """See Runner."""
        return self._inner.kv_memory()

    def copy_block(self, source: int, destination: int) -> None:
        """See Runner."""
        self._inner.copy_block(source, destination)

    def launch(self, step: StepInput) -> None:
        """See Runner."""
        self._marks[Mark.LAUNCHED] = self._marks[Mark.LAUNCHED] or time.monotonic()
        self._inner.launch(step)

    def collect(self) -> StepOutput:
        """See Runner."""
        output = self._inner.collect()
        self._marks[Mark.COLLECTED] = time.monotonic()
        return output


class _MarkingTransport:
    """A `Transport` that hands everything on to another one."""

    def __init__(self, inner: Transport, marks: Marks) -> None:
        self.name = inner.name
        self._inner = inner
        self._marks = marks
        self._place = list(TransportName).index(TransportName(inner.name))
        self._posted: dict[int, tuple[float, int]] = {}  # by read id: time of the post, and number of blocks

    def descriptor(self) -> bytes:
        """See Transport."""
        return self._inner.descriptor()

    def reach(self, descriptor: bytes) -> Reach:
        """See Transport."""
        return self._inner.reach(descriptor)

    def add_worker(self, peer: WorkerId, address: str, descriptor: bytes) -> None:
        """See Transport."""
        self._inner.add_worker(peer, address, descriptor)

    def remove_worker(self, peer: WorkerId) -> None:
        """See Transport."""
        self._inner.remove_worker(peer)

    def post(self, read: BlockRead) -> None:
        """See Transport."""
        self._posted[read.read_id] = time.monotonic(), len(read.source)
        self._inner.post(read)

    def abandon(self, read_id: int) -> None:
        """See Transport."""
        self._inner.abandon(read_id)

    def set_pace(self, poll_s: float) -> None:
        """See Transport."""
        self._inner.set_pace(poll_s)

    def poll(self) -> list[ReadEnd]:
        """See Transport."""
        ends = self._inner.poll()
        for end in ends:
            posted, num_blocks = self._posted.pop(end.read_id)
            self._marks[Mark.READ] = time.monotonic() - posted
            self._marks[Mark.READ_BLOCKS] = num_blocks
            self._marks[Mark.TRANSPORT] = self._place
        return ends

    def close(self) -> None:
        """See Transport."""
        self._inner.close()
