"""A worker for tests, which speaks the real protocol over a real server and follows the test's script."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np

from kvtransfer.ids import WorkerId
from protos import worker_pb2, worker_pb2_grpc
from services.config import WorkerRole
from services.protocol.capsule import Capsule
from services.protocol.frames import Embeddings, Failure, Frame, Load, PackedLogprobs
from services.protocol.grpc_options import SERVER_OPTIONS
from services.protocol.messages import (
    Abort,
    BlockEvents,
    Command,
    Commands,
    GatewayHello,
    Submit,
    WorkerHello,
    WorkerMessage,
)
from services.protocol.outcomes import FailureCode, FinishReason
from services.protocol.wire import pack_worker_message, parse_gateway_message

VOCABULARY = 50_000


def next_token(tokens: list[int]) -> int:
    """The next token of a model whose every token depends on all tokens before it."""
    state = 17
    for token in tokens:
        state = (state * 31 + token + 7) % 1_000_003
    return state % VOCABULARY


def continuation(prompt: list[int], count: int) -> list[int]:
    """The `count` tokens that follow the prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def row_frame(
    handle: int,
    position: int,
    tokens: list[int],
    finish: FinishReason = FinishReason.NONE,
    cached: int = -1,
    logprobs: bool = False,
) -> Frame:
    """A frame of one row; with logprobs, those of width 1."""
    count = len(tokens)
    packed = None
    if logprobs:
        packed = PackedLogprobs(
            np.array([1], np.int32), np.full(count, -0.5, np.float32), np.array(tokens, np.int32), np.zeros(count, "f4")
        )
    return Frame(
        handles=np.array([handle], np.uint32),
        positions=np.array([position], np.uint32),
        counts=np.array([count], np.uint32),
        tokens=np.array(tokens, np.int32),
        finish=np.array([finish], np.uint8),
        cached=np.array([cached], np.int32),
        logprobs=packed,
    )


def empty_frame(failures: list[Failure] | None = None, load: Load | None = None) -> Frame:
    """A frame without rows."""
    none = np.zeros(0, np.uint32)
    return Frame(none, none, none, none.astype("i4"), none.astype("u1"), none.astype("i4"), None, failures or [], load)


@dataclass(eq=False)
class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """The protocol side of a worker process. Tests read the commands that it got, and have it send messages."""

    hello: WorkerHello
    hellos: list[GatewayHello] = field(default_factory=list)
    submits: list[Submit] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # commands in each message
    address: str = ""
    refuses: str = ""  # the reason with which every stream is refused; empty: none is
    events_at_start: BlockEvents | None = None
    _stream: asyncio.Queue[WorkerMessage | None] | None = None
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.WorkerMessage]:
        """The servicer's method: one stream."""
        if self.refuses:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refuses)
        stream: asyncio.Queue[WorkerMessage | None] = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while (message := await stream.get()) is not None:
                yield pack_worker_message(message)
        finally:
            reader.cancel()

    async def _read(self, requests: Any, stream: asyncio.Queue[WorkerMessage | None]) -> None:
        async for raw in requests:
            message = parse_gateway_message(raw)
            async with self._changed:
                match message:
                    case GatewayHello():
                        self.hellos.append(message)
                        self._stream = stream
                        stream.put_nowait(self.hello)
                        if self.events_at_start is not None:
                            stream.put_nowait(self.events_at_start)
                    case Commands(commands):
                        self._take(*commands)
                    case _:
                        self._take(message)
                self._changed.notify_all()

    def _take(self, *commands: Command) -> None:
        self.sizes.append(len(commands))
        self.submits += [command for command in commands if isinstance(command, Submit)]
        self.aborts += [command.handle for command in commands if isinstance(command, Abort)]

    async def submit(self, number: int = 1) -> Submit:
        """The submit with this number, counted from 1, when it has come."""
        await self.until(lambda: len(self.submits) >= number)
        return self.submits[number - 1]

    async def aborted(self, handle: int) -> None:
        """Returns when this handle was aborted here."""
        await self.until(lambda: handle in self.aborts)

    async def until(self, condition: Any, timeout_s: float = 120.0) -> None:
        """Returns when the condition holds; it is looked at after each message."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(condition)

    def say(self, message: WorkerMessage) -> None:
        """Sends a frame or block events on the newest stream."""
        assert self._stream is not None
        self._stream.put_nowait(message)

    def say_tokens(self, submit: Submit, tokens: list[int], after: int = 0, **row: Any) -> None:
        """A row for this submit, `after` tokens behind the end of its capsule."""
        self.say(row_frame(submit.handle, len(submit.capsule.token_ids) + after, tokens, **row))

    def say_embedding(self, submit: Submit, values: list[float], cached: int = 0) -> None:
        """The embedding of this submit's prompt."""
        handles, vectors = np.array([submit.handle], np.uint32), np.array([values], np.float32)
        frame = empty_frame()
        frame.embeddings = Embeddings(handles, np.array([cached], np.int32), vectors)
        self.say(frame)

    def fail(self, submit: Submit, code: FailureCode) -> None:
        """Fails this submit."""
        self.say(empty_frame([Failure(submit.handle, code)]))

    def break_stream(self) -> None:
        """Ends the newest stream, as a worker does that goes on living."""
        assert self._stream is not None
        self._stream.put_nowait(None)


def tokens_of(capsule: Capsule) -> list[int]:
    """The capsule's tokens as a list."""
    listed: list[int] = capsule.token_ids.tolist()
    return listed


def worker_hello(role: WorkerRole, worker_id: int, **changes: Any) -> WorkerHello:
    """A hello of a small worker."""
    hello = WorkerHello(
        worker_id=WorkerId(worker_id),
        role=role,
        fingerprint="f" * 32,
        kv_protocol=1,
        transports=("memory",),
        block_size=4,
        num_blocks=64,
        max_model_len=256,
        max_num_seqs=8,
        vocab_size=VOCABULARY,
    )
    return replace(hello, **changes)


@asynccontextmanager
async def serving(worker: ScriptedWorker, port: int = 0) -> AsyncIterator[ScriptedWorker]:
    """Runs the worker's server."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    worker.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    try:
        yield worker
    finally:
        await server.stop(None)
