"""A pair of worker processes and a stand-in for a gateway, which sends both the same request, as Baton's does."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

import grpc
import numpy as np

from kvtransfer.ids import GatewayId
from loadtest.micro.marks import Mark
from loadtest.micro.worker_process import MakeParts, RunningWorker, running_pair
from services.config import TransportName
from services.protocol.capsule import Capsule
from services.protocol.frames import Frame
from services.protocol.messages import Abort, GatewayHello, HandTo, Submit, TakeFrom, WorkerHello
from services.protocol.sampling import SamplingParams
from services.protocol.wire import deserialize_worker_message, serialize_gateway_message

_GATEWAY = GatewayId(1)
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """The noted times of one handoff, in seconds."""

    ready_s: float  # from the end of prefill's last step until decode begins the sequence's first one
    read_s: float  # the last read of the handoff
    read_blocks: int  # blocks that the last read moved
    transport: TransportName  # of the last read
    first_s: float  # from the request to the first token
    gap_s: float  # from the first token to the second


class Stream:
    """A gateway's stream to one worker. One task reads it: a task that is cancelled while it reads ends the stream."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]", hello: WorkerHello) -> None:
        self.hello = hello
        self._call = call

    async def send(self, command: Submit | Abort) -> None:
        """Sends a command. Commands are sent in the order of their handles."""
        await self._call.write(serialize_gateway_message(command))

    async def frame(self) -> Frame:
        """Reads the next frame."""
        while True:
            message = deserialize_worker_message(_bytes(await self._call.read()))
            if isinstance(message, Frame):
                return message

    async def until_position(self, handle: int, position: int) -> None:
        """Reads frames up to the row that has this position."""
        while True:
            frame = await self.frame()
            assert not frame.failures, frame.failures
            if any(row.handle == handle and row.position + len(row.tokens) > position for row in frame.rows()):
                return


class WorkerPair:
    """Two workers, a stream to each, and requests that they answer together or decode alone."""

    def __init__(self, workers: tuple[RunningWorker, RunningWorker], prefill: Stream, decode: Stream) -> None:
        self.prefill, self.decode = prefill, decode
        self._prefill_marks, self._decode_marks = (worker.marks for worker in workers)
        self._to = HandTo(decode.hello.worker_id)
        self._source = TakeFrom(f"127.0.0.1:{workers[0].port}", prefill.hello.worker_id)
        self._handles = count(1)

    async def submit(self, prompt: np.ndarray, max_tokens: int, *, handed_over: bool) -> int:
        """Submits a greedy request to both workers or to decode alone, and returns its handle."""
        handle = next(self._handles)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        capsule = Capsule(prompt, len(prompt), sampling)
        if handed_over:
            await self.prefill.send(Submit(handle, capsule, _TIMEOUT_S, handoff=self._to))
        source = self._source if handed_over else None
        await self.decode.send(Submit(handle, capsule, _TIMEOUT_S, handoff=source))
        return handle

    async def abort(self, handle: int) -> None:
        """Aborts a request at both workers; one that does not know the handle ignores it."""
        await self.prefill.send(Abort(handle))
        await self.decode.send(Abort(handle))

    async def hand_over(self, prompt: np.ndarray) -> Handoff:
        """Measures one request of two tokens that is handed off, while nothing else goes on."""
        self._decode_marks[Mark.LAUNCHED] = 0.0
        begin = time.monotonic()
        async with asyncio.timeout(_TIMEOUT_S):
            handle = await self.submit(prompt, 2, handed_over=True)
            await self.prefill.until_position(handle, len(prompt))
            first = time.monotonic()
            await self.decode.until_position(handle, len(prompt) + 1)
            second = time.monotonic()
        marks = self._decode_marks
        return Handoff(
            ready_s=marks[Mark.LAUNCHED] - self._prefill_marks[Mark.COLLECTED],
            read_s=marks[Mark.READ],
            read_blocks=int(marks[Mark.READ_BLOCKS]),
            transport=list(TransportName)[int(marks[Mark.TRANSPORT])],
            first_s=first - begin,
            gap_s=second - first,
        )

    async def alone(self, prompt: np.ndarray) -> float:
        """Measures seconds until the first token of a request that decode computes alone; nothing else goes on."""
        begin = time.monotonic()
        async with asyncio.timeout(_TIMEOUT_S):
            handle = await self.submit(prompt, 2, handed_over=False)
            await self.decode.until_position(handle, len(prompt))
            first = time.monotonic()
            await self.decode.until_position(handle, len(prompt) + 1)
        return first - begin


@asynccontextmanager
async def worker_pair(make_parts: MakeParts) -> AsyncIterator[WorkerPair]:
    """Starts the workers, and ends them. Raises StartError."""
    with running_pair(make_parts) as workers:
        async with _stream(workers[0].port) as prefill, _stream(workers[1].port) as decode:
            yield WorkerPair(workers, prefill, decode)


@asynccontextmanager
async def _stream(port: int) -> AsyncIterator[Stream]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream("/baton.v1.Worker/Connect")()
        await call.write(serialize_gateway_message(GatewayHello(_GATEWAY, 0)))
        hello = deserialize_worker_message(_bytes(await call.read()))
        assert isinstance(hello, WorkerHello)
        yield Stream(call, hello)


def _bytes(message: object) -> bytes:
    """Returns the bytes that a stream's read gave; any other object is the end of the stream."""
    assert isinstance(message, bytes), "a worker ended its stream"
    return message
