"""One handoff at a time between two idle workers: from the prompt's last step to the first one of decode.

`ready_ms` is from the end of prefill's last step until decode begins the sequence's first one: announcement, read,
check, and the way between threads and processes. `read_ms` is the last read in it, as the transfer thread sees it,
`raw_ms` the same read by NIXL alone, without workers around it; `of_raw` its share of that bandwidth. `gap_ms` is what
a client sees between token 1, which prefill sends, and token 2. With `chunk` below the prompt, blocks of earlier
chunks move while later ones are computed.
"""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count

import grpc
import numpy as np

from loadtest.micro.handoff_worker import (
    BLOCK_SIZE,
    LAYOUT,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    VOCABULARY,
    Mark,
    Marks,
    new_marks,
    serve,
)
from loadtest.micro.rows import Row, spread
from loadtest.micro.transport import reading
from services.config import TransportName, WorkerRole
from services.protocol.capsule import Capsule
from services.protocol.frames import Frame
from services.protocol.messages import GatewayHello, HandTo, Submit, TakeFrom, WorkerHello
from services.protocol.sampling import SamplingParams
from services.protocol.wire import deserialize_worker_message, serialize_gateway_message

_BLOCKS = (1, 4, 16, 64, 256, 512)
_CHUNK = 2048  # tokens, as in `baton up`
_GATEWAY = 1
_TIMEOUT_S = 30.0

Moments = tuple[float, float, float]  # seconds: until ready, of the last read, between two tokens


async def measure(rounds: int) -> list[Row]:
    """Prompts in one chunk, then those that take several."""
    raw = _raw(rounds)
    whole = await handoffs(MAX_MODEL_LEN, _BLOCKS, rounds)
    chunked = await handoffs(_CHUNK, [blocks for blocks in _BLOCKS if blocks * BLOCK_SIZE > _CHUNK], rounds)
    rows = [_row(blocks, "whole", moments, raw[blocks]) for blocks, moments in whole.items()]
    last = _CHUNK // BLOCK_SIZE  # what the last chunk leaves to be read
    return rows + [_row(blocks, _CHUNK, moments, raw[last]) for blocks, moments in chunked.items()]


def _raw(rounds: int) -> dict[int, float]:
    """Seconds of a read by NIXL alone, by its number of blocks: the median of them, each of other blocks."""
    sizes = {*_BLOCKS, _CHUNK // BLOCK_SIZE}
    with reading(TransportName.NIXL, NUM_BLOCKS, LAYOUT.block_bytes) as read:
        return {blocks: float(np.median([read(blocks) for _ in range(rounds)])) for blocks in sizes}


def _row(blocks: int, chunk: str | int, moments: list[Moments], raw_s: float) -> Row:
    ready, read, gap = zip(*moments, strict=True)
    figures = spread([each * 1e3 for each in ready])
    return {
        "blocks": blocks,
        "mib": blocks * LAYOUT.block_bytes / 2**20,
        "chunk": str(chunk),
        **{f"ready_ms_{name}": value for name, value in figures.items()},
        "read_ms": float(np.median(read)) * 1e3,
        "raw_ms": raw_s * 1e3,
        "of_raw": raw_s / float(np.median(read)),
        "gap_ms": float(np.median(gap)) * 1e3,
    }


async def handoffs(max_num_batched_tokens: int, sizes: Sequence[int], rounds: int) -> dict[int, list[Moments]]:
    """Between a pair of their own; the first one of each size is left out."""
    random = np.random.default_rng(0)
    async with _pair(max_num_batched_tokens) as pair:
        found: dict[int, list[Moments]] = {blocks: [] for blocks in sizes}
        for _ in range(rounds + 1):
            for blocks in sizes:
                prompt = random.integers(0, VOCABULARY, blocks * BLOCK_SIZE, dtype=np.int32)
                found[blocks].append(await pair.hand_over(prompt))
    return {blocks: moments[1:] for blocks, moments in found.items()}


@asynccontextmanager
async def _pair(max_num_batched_tokens: int) -> AsyncIterator["_Pair"]:
    with ExitStack() as processes:
        workers = [processes.enter_context(_worker(role, max_num_batched_tokens)) for role in WorkerRole]
        async with _stream(workers[0].port) as prefill, _stream(workers[1].port) as decode:
            yield _Pair(workers[0], prefill, workers[1], decode)


@dataclass(frozen=True, slots=True)
class _Worker:
    port: int
    marks: Marks


@contextmanager
def _worker(role: WorkerRole, max_num_batched_tokens: int) -> Iterator[_Worker]:
    context = multiprocessing.get_context("spawn")
    marks: Marks = context.RawArray("d", new_marks())
    pipe, theirs = context.Pipe()
    arguments = (role, max_num_batched_tokens, marks, theirs)
    process = context.Process(target=serve, args=arguments, daemon=True)
    process.start()
    theirs.close()  # ours: so that its end is noticed
    try:
        yield _Worker(pipe.recv(), marks)
    finally:
        process.kill()
        process.join()


class _Stream:
    """A gateway's stream to one worker."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]", hello: WorkerHello) -> None:
        self.hello = hello
        self._call = call

    async def submit(self, submit: Submit) -> None:
        await self._call.write(serialize_gateway_message(submit))

    async def until_position(self, handle: int, position: int) -> None:
        """Until the worker's row for this position is here."""
        while True:
            message = deserialize_worker_message(_bytes(await self._call.read()))
            if not isinstance(message, Frame):
                continue
            assert not message.failures, message.failures
            if any(row.handle == handle and row.position + len(row.tokens) > position for row in message.rows()):
                return


@asynccontextmanager
async def _stream(port: int) -> AsyncIterator[_Stream]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream("/baton.v1.Worker/Connect")()
        await call.write(serialize_gateway_message(GatewayHello(_GATEWAY, 0)))
        hello = deserialize_worker_message(_bytes(await call.read()))
        assert isinstance(hello, WorkerHello)
        yield _Stream(call, hello)


def _bytes(message: object) -> bytes:
    """What a stream's read gave; anything else is its end."""
    assert isinstance(message, bytes), "a worker ended its stream"
    return message


class _Pair:
    """Two workers and a gateway that sends both the same request, as Baton's does."""

    def __init__(self, prefill_worker: _Worker, prefill: _Stream, decode_worker: _Worker, decode: _Stream) -> None:
        self._prefill_marks, self._decode_marks = prefill_worker.marks, decode_worker.marks
        self._prefill, self._decode = prefill, decode
        to, source = decode.hello.incarnation, f"127.0.0.1:{prefill_worker.port}"
        self._produce, self._consume = HandTo(to), TakeFrom(source, prefill.hello.incarnation)
        self._handles = count(1)

    async def hand_over(self, prompt: np.ndarray) -> Moments:
        """One request of two tokens."""
        self._decode_marks[Mark.LAUNCHED] = 0.0
        handle = next(self._handles)
        capsule = Capsule(prompt, len(prompt), SamplingParams(max_tokens=2, temperature=0.0))
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_TIMEOUT_S):
            await self._prefill.submit(Submit(handle, capsule, _TIMEOUT_S, handoff=self._produce))
            await self._decode.submit(Submit(handle, capsule, _TIMEOUT_S, handoff=self._consume))
            await self._prefill.until_position(handle, len(prompt))
            first = loop.time()
            await self._decode.until_position(handle, len(prompt) + 1)
            gap = loop.time() - first
        ready = self._decode_marks[Mark.LAUNCHED] - self._prefill_marks[Mark.COLLECTED]
        return ready, self._decode_marks[Mark.READ], gap
