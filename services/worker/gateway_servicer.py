"""The gateways' streams: commands in, frames, block events and news out.

A gateway has one stream; a newer one ends the older. When it ends, for whatever reason, its requests end.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import replace

import grpc
import structlog

from kvtransfer.ids import AttemptId, GatewayId, WorkerId
from protos import worker_pb2, worker_pb2_grpc
from services.engine.sequences.request import Branch, Kind, Request
from services.protocol.block_hash import BlockHash
from services.protocol.frames import Failure, Frame
from services.protocol.messages import (
    Abort,
    BlockEvents,
    Command,
    Commands,
    GatewayHello,
    HandTo,
    Submit,
    TakeFrom,
    WorkerHello,
    WorkerMessage,
    WorkerNews,
)
from services.protocol.outcomes import FailureCode
from services.protocol.versions import PROTOCOL_MAJOR, Since, frame_for
from services.protocol.wire import WireError, pack_worker_message, parse_gateway_message
from services.worker.block_changes import BlockChanges
from services.worker.block_log import BlockLog
from services.worker.engine_thread import EngineThread
from services.worker.outbox import Outbox
from services.worker.submit_check import what_is_wrong

_HELLO_TIMEOUT_S = 5.0
_MAX_UNREAD_FRAMES = 2048  # some seconds of steps

log = structlog.get_logger()


class _Stream:
    """A gateway's stream."""

    def __init__(self, hello: GatewayHello, end: Callable[["_Stream"], None]) -> None:
        self.gateway = hello.gateway
        self.minor = hello.protocol_minor
        self.wants_block_events = hello.wants_block_events
        self.outbox: Outbox[WorkerMessage | BlockChanges] = Outbox(_MAX_UNREAD_FRAMES, lambda: end(self))
        self.changes = BlockChanges()  # is in the outbox once while it has any


class GatewayServicer(worker_pb2_grpc.WorkerServicer):
    """Lives on the event loop.

    `on_producer` is told where a request's producer is, before the engine hears of it. `drain` drains the worker within
    so many seconds (None: as many as the worker's own configuration says), and returns whether it came to an end and
    how many attempts were moved.
    """

    def __init__(
        self,
        engine: EngineThread,
        hello: WorkerHello,
        on_producer: Callable[[TakeFrom], None],
        drain: Callable[[float | None], Awaitable[tuple[bool, int]]],
    ) -> None:
        self._engine = engine
        self._hello = hello
        self._on_producer = on_producer
        self._drain = drain
        self._streams: dict[GatewayId, _Stream] = {}
        self.block_log = BlockLog(hello.fingerprint)
        self.block_log.subscribe(self._publish)

    def deliver(self, frames: dict[GatewayId, Frame]) -> None:
        """Frames of one step, by gateway."""
        for gateway, frame in frames.items():
            if (stream := self._streams.get(gateway)) is not None:
                stream.outbox.put(frame_for(stream.minor, frame))

    def tell(self, news: WorkerNews) -> None:
        """Tells news to the gateways that understand them, and to those whose streams begin later by the hello."""
        self._hello = replace(self._hello, knows=news.knows, embedding_size=news.embedding_size)
        for stream in list(self._streams.values()):
            if stream.minor >= Since.NEWS:
                stream.outbox.put(news)

    def close(self) -> None:
        """Ends all streams, each after the messages that wait for it."""
        for stream in self._streams.values():
            stream.outbox.finish()

    async def Connect(
        self,
        request_iterator: AsyncIterator[worker_pb2.GatewayMessage],
        context: "grpc.aio.ServicerContext[worker_pb2.GatewayMessage, worker_pb2.WorkerMessage]",
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        """One stream, until either side ends it or a newer one of the same gateway comes."""
        stream = await self._begin(request_iterator, context)
        reader = asyncio.create_task(self._read(stream, request_iterator))
        try:
            yield pack_worker_message(replace(self._hello, time_us=time.time_ns() // 1000))
            if stream.wants_block_events:
                yield pack_worker_message(BlockEvents(1, snapshot=True, added=self.block_log.cached(), evicted=[]))
            async for message in stream.outbox.drain():
                yield pack_worker_message(self._next_of(stream) if isinstance(message, BlockChanges) else message)
        finally:
            self._end(stream)
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader

    async def Drain(
        self,
        request: worker_pb2.DrainRequest,
        context: "grpc.aio.ServicerContext[worker_pb2.DrainRequest, worker_pb2.DrainReply]",
    ) -> worker_pb2.DrainReply:
        """Drains the worker, and answers when that is over and the worker ends. It goes on without its caller."""
        timeout_s = request.timeout_s if request.HasField("timeout_s") else None
        if timeout_s is not None and not 0 <= timeout_s < math.inf:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "timeout_s must be a number of seconds")
        done, moved = await self._drain(timeout_s)
        return worker_pb2.DrainReply(done=done, moved=moved)

    async def _begin(
        self,
        messages: AsyncIterator[worker_pb2.GatewayMessage],
        context: "grpc.aio.ServicerContext[worker_pb2.GatewayMessage, worker_pb2.WorkerMessage]",
    ) -> _Stream:
        hello = await self._read_hello(messages)
        if hello is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a hello")
        if hello.protocol_major != PROTOCOL_MAJOR:
            ours, theirs = PROTOCOL_MAJOR, hello.protocol_major
            words = f"this worker speaks protocol {ours}, the gateway {theirs}: their major versions must be equal"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, words)
        gateway, highest = hello.gateway, hello.highest_handle
        if (older := self._streams.get(gateway)) is not None:
            self._end(older)
        stream = self._streams[gateway] = _Stream(hello, self._end)
        self._engine.call(lambda core, now: core.from_gateways.hello(gateway, highest))
        log.info("gateway connected", gateway=f"{gateway:016x}")
        return stream

    async def _read_hello(self, messages: AsyncIterator[worker_pb2.GatewayMessage]) -> GatewayHello | None:
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                message = parse_gateway_message(await anext(messages))
        except (TimeoutError, StopAsyncIteration, WireError):
            return None
        return message if isinstance(message, GatewayHello) else None

    def _end(self, stream: _Stream) -> None:
        stream.outbox.close()
        if self._streams.get(stream.gateway) is stream:
            del self._streams[stream.gateway]
            self._engine.call(lambda core, now: core.from_gateways.lost(stream.gateway, now))
            log.info("gateway gone", gateway=f"{stream.gateway:016x}")

    async def _read(self, stream: _Stream, messages: AsyncIterator[worker_pb2.GatewayMessage]) -> None:
        try:
            async for message in messages:
                if self._streams.get(stream.gateway) is not stream:
                    return
                self._message(stream, message)
        except WireError as error:
            log.warning("a gateway sent what no gateway sends", gateway=f"{stream.gateway:016x}", error=str(error))
        finally:
            stream.outbox.close()  # ends the stream

    def _message(self, stream: _Stream, message: worker_pb2.GatewayMessage) -> None:
        match parse_gateway_message(message):
            case Commands(commands):
                for command in commands:
                    self._command(stream, command)
            case GatewayHello():
                raise WireError("a second hello on one stream")
            case command:
                self._command(stream, command)

    def _command(self, stream: _Stream, command: Command) -> None:
        match command:
            case Abort(handle):
                id = AttemptId(stream.gateway, handle)
                self._engine.call(lambda core, now: core.from_gateways.abort(id, now))
            case Submit():
                self._submit(stream, command)

    def _submit(self, stream: _Stream, submit: Submit) -> None:
        if (wrong := what_is_wrong(submit, self._hello.vocab_size)) is not None:
            failure = Failure(submit.handle, FailureCode.UNSUPPORTED, wrong)
            id = AttemptId(stream.gateway, submit.handle)
            self._engine.call(lambda core, now: core.from_gateways.refuse(id, failure))
            return
        if isinstance(submit.handoff, TakeFrom):
            self._on_producer(submit.handoff)
        request = engine_request(stream.gateway, submit, time.monotonic())
        self._engine.call(lambda core, now: core.from_gateways.submit(request, now))
        log.info("submitted", request_id=submit.request_id, handle=submit.handle, kind=request.kind.name)

    def _publish(self, added: Collection[BlockHash], evicted: Collection[BlockHash]) -> None:
        for stream in list(self._streams.values()):
            if not stream.wants_block_events or not (added or evicted):
                continue
            if not len(stream.changes):
                stream.outbox.put(stream.changes)
            stream.changes.note(added, evicted)

    def _next_of(self, stream: _Stream) -> BlockEvents:
        """Takes a message of a stream's changes; the others go behind the frames that wait."""
        events = stream.changes.take()
        if len(stream.changes):
            stream.outbox.put(stream.changes)
        return events


def engine_request(gateway: GatewayId, submit: Submit, now: float) -> Request:
    """The request that the engine gets for a gateway's submit."""
    paired_with: WorkerId | None = None
    match submit.handoff:
        case HandTo(worker):
            kind, paired_with = Kind.PRODUCE, worker
        case TakeFrom(_, worker):
            kind, paired_with = Kind.CONSUME, worker
        case None:
            kind = Kind.LOCAL if submit.capsule.pooling is None else Kind.EMBED
    handles = range(submit.handle + 1, submit.last_handle + 1)
    return Request(
        AttemptId(gateway, submit.handle),
        submit.capsule,
        kind,
        arrival=now,
        deadline=now + submit.timeout_s,
        paired_with=paired_with,
        branches=tuple(
            Branch(AttemptId(gateway, handle), seed) for handle, seed in zip(handles, submit.seeds, strict=True)
        ),
    )
