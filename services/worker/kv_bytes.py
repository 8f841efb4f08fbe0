"""KV blocks over gRPC: what carries the bytes of the byte-stream transport, at both of its ends.

Lives on the event loop, as all gRPC does; the transport calls from its own thread. A worker's reads have a connection
of their own, where bulk does not stand before announcements and pings, and run a few at a time. Where this worker's
certificate has changed, later reads go over a new connection; those that run end on the old one.
"""

import asyncio
from collections.abc import AsyncIterator

import grpc
import structlog

from kvtransfer.transports.byte_stream import BlockSource, ByteRequest, ByteSink, ReadRefused
from protos import kv_pb2, kv_pb2_grpc
from services.protocol.grpc_options import BULK_CLIENT_OPTIONS
from services.protocol.wire import WireError
from services.tls.certificate import Certificate
from services.tls.grpc_ends import Channels
from services.tls.roles import CertificateRole
from services.worker.kv_wire import pack_read, pack_words, parse_read, parse_words

_MAX_READS_SERVED = 16  # at a time, for all consumers; others wait, holding nothing
_MAX_READS_OF_ONE_WORKER = 4  # at a time: enough that one's end does not leave the connection idle
_LONGEST_READ_S = 600.0  # on a connection that is replaced
_STALL_S = 30.0  # without a byte; a frozen worker is noticed long before, on the control stream

log = structlog.get_logger()


class KvBytesServicer(kv_pb2_grpc.KvBytesServicer):
    """The producer's end: sends blocks to who knows their generations."""

    def __init__(self, source: BlockSource | None) -> None:
        """source: None where it is still to come, as `source`; until then nothing is read."""
        self.source = source
        self._turns = asyncio.Semaphore(_MAX_READS_SERVED)

    async def Read(
        self, request: kv_pb2.ReadRequest, context: "grpc.aio.ServicerContext[kv_pb2.ReadRequest, kv_pb2.ReadPiece]"
    ) -> AsyncIterator[kv_pb2.ReadPiece]:
        """One read. Each piece waits until the connection took the one before, so one is in memory at a time."""
        if self.source is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this process has no blocks yet")
        try:
            reading = self.source.open(parse_read(request))
        except (ReadRefused, WireError) as error:
            log.warning("a read that no consumer asks for", error=str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such blocks")
        async with self._turns:
            for data in reading.pieces():
                yield kv_pb2.ReadPiece(data=data)
            yield pack_words(reading.words()) if reading.has_words else kv_pb2.ReadPiece(over=True)


class GrpcByteChannel:
    """The consumer's end: a `ByteChannel` to one producer, over the loop that it is given."""

    def __init__(self, address: str, loop: asyncio.AbstractEventLoop, channels: Channels) -> None:
        self._address = address
        self._loop = loop
        self._channels = channels
        self._turns = asyncio.Semaphore(_MAX_READS_OF_ONE_WORKER)
        self._channel: grpc.aio.Channel | None = None  # made on the loop
        self._certificate: Certificate | None = None  # of this channel
        self._tasks: set[asyncio.Task[None]] = set()

    def read(self, request: ByteRequest, sink: ByteSink) -> None:
        """See ByteChannel."""
        self._loop.call_soon_threadsafe(self._start, pack_read(request), sink)

    def close(self) -> None:
        """See ByteChannel."""
        self._loop.call_soon_threadsafe(self._close)

    def _start(self, request: kv_pb2.ReadRequest, sink: ByteSink) -> None:
        self._keep(self._loop.create_task(self._run(request, sink)))

    def _current_channel(self) -> grpc.aio.Channel:
        certificate = self._channels.certificate()
        if self._channel is None or certificate is not self._certificate:
            if self._channel is not None:
                self._keep(self._loop.create_task(self._channel.close(_LONGEST_READ_S)))
            self._channel = self._channels.open(self._address, CertificateRole.PREFILL, BULK_CLIENT_OPTIONS)
            self._certificate = certificate
        return self._channel

    def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._channel is not None:
            self._keep(self._loop.create_task(self._channel.close()))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)  # the loop alone would not keep it
        task.add_done_callback(self._tasks.discard)

    async def _run(self, request: kv_pb2.ReadRequest, sink: ByteSink) -> None:
        try:
            async with self._turns:
                if sink.wanted:
                    stub = kv_pb2_grpc.KvBytesStub(self._current_channel())
                    await _fill(stub.Read(request), sink)
        except (grpc.aio.AioRpcError, TimeoutError, WireError) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            log.info("a read broke", address=self._address, reason=reason or type(error).__name__)
        except Exception as error:  # a defect, or the system's: this read's alone
            log.error("a read broke", address=self._address, reason=type(error).__name__, exc_info=error)
        finally:
            sink.end(None)


async def _fill(call: "grpc.aio.UnaryStreamCall[kv_pb2.ReadRequest, kv_pb2.ReadPiece]", sink: ByteSink) -> None:
    """Reads one answer to its end, or as far as it is wanted."""
    try:
        while True:
            async with asyncio.timeout(_STALL_S):
                piece = await call.read()
            if not isinstance(piece, kv_pb2.ReadPiece):
                raise WireError("it ended without its last piece")
            if piece.generations or piece.over:
                sink.end(parse_words(piece))
                return
            if not sink.take(piece.data):
                return
    finally:
        call.cancel()
