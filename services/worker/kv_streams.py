"""The control streams of handoffs: the producer's end (a servicer) and the consumer's end (a client).

Messages go to and come from the core; here they only cross the network. The transports' descriptors, as good as keys
to our KV memory, are given on no other channel.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

import grpc
import structlog

from kvtransfer.ids import StreamId, WorkerId
from kvtransfer.layout import KV_PROTOCOL_VERSION
from kvtransfer.messages import Open, Pulse, Release, ToConsumer, ToProducer
from kvtransfer.process import ProcessIdentity
from kvtransfer.transports.byte_stream import ByteStreamTransport
from kvtransfer.transports.nixl_descriptor import NixlDescriptor
from kvtransfer.transports.parts import has_parts
from protos import kv_pb2, kv_pb2_grpc
from services.config.hosts import AddressError
from services.protocol.grpc_options import CLIENT_OPTIONS
from services.protocol.messages import TakeFrom
from services.protocol.wire import WireError
from services.tls.grpc_ends import Channels, check_name
from services.tls.roles import CertificateRole
from services.worker.engine_thread import EngineThread
from services.worker.kv_wire import (
    pack_process,
    pack_to_consumer,
    pack_to_producer,
    parse_process,
    parse_to_consumer,
    parse_to_producer,
)
from services.worker.outbox import Outbox
from services.worker.transfer_thread import TransferThread

_HELLO_TIMEOUT_S = 3.0
_RETRY_S = 0.2
_MAX_RETRIES = 25  # a producer that stays away longer is dialled again by the next request
_PULSE_S = 0.5
_MAX_UNREAD_MESSAGES = 16_384

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """The contents of this worker's hellos."""

    worker_id: WorkerId
    fingerprint: str
    offers: Mapping[str, bytes]  # descriptors, by transport
    process: ProcessIdentity | None  # None: it cannot be told


class KvStreams:
    """All control streams of this worker, of both directions. Lives on the event loop."""

    def __init__(
        self, engine: EngineThread, transfer: TransferThread, identity: KvIdentity, channels: Channels
    ) -> None:
        self.engine = engine
        self.transfer = transfer
        self.identity = identity
        self._channels = channels
        self._stream_ids = count(1)
        self._consumers: dict[StreamId, Outbox[ToConsumer]] = {}
        self._producers: dict[StreamId, Outbox[ToProducer]] = {}
        self._dialling: dict[int, asyncio.Task[None]] = {}

    def deliver(self, stream: StreamId, message: ToConsumer | ToProducer) -> None:
        """Puts a message on its stream; dropped where that is gone."""
        if isinstance(message, ToConsumer):
            if (to_consumer := self._consumers.get(stream)) is not None:
                to_consumer.put(message)
        elif (to_producer := self._producers.get(stream)) is not None:
            to_producer.put(message)

    def ensure(self, producer: TakeFrom) -> None:
        """Sees to it that there is a stream to this life of a producer, or that somebody is dialling it."""
        if producer.worker not in self._dialling:
            task = asyncio.get_running_loop().create_task(self._keep(producer))
            self._dialling[producer.worker] = task

    async def close(self) -> None:
        """Ends all streams."""
        for outbox in self._consumers.values():
            outbox.close()
        for task in (tasks := list(self._dialling.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # The producer's end.

    def consumer_connected(self) -> tuple[StreamId, Outbox[ToConsumer]]:
        """A consumer's stream begins."""
        self.transfer.expect_consumer()
        stream = StreamId(next(self._stream_ids))
        outbox: Outbox[ToConsumer] = Outbox(_MAX_UNREAD_MESSAGES, lambda: self.consumer_gone(stream))
        self._consumers[stream] = outbox
        return stream, outbox

    def consumer_gone(self, stream: StreamId) -> None:
        """A consumer's stream ended, or it does not read it."""
        if (outbox := self._consumers.pop(stream, None)) is not None:
            outbox.close()
            self.engine.call(lambda core, now: core.from_consumers.stream_lost(stream, now))

    # The consumer's end.

    async def _keep(self, producer: TakeFrom) -> None:
        """A stream to one life of a producer, again and again until that life cannot be reached."""
        try:
            await self._dial(producer)
        finally:
            del self._dialling[producer.worker]
        self._lost(producer.worker)

    async def _dial(self, producer: TakeFrom) -> None:
        """Returns when it makes no sense to wait for the producer any longer."""
        failures = 0
        while failures < _MAX_RETRIES:
            try:
                if await self._run_stream(producer):
                    failures = 0
            except grpc.aio.AioRpcError as error:
                failures += 1
                log.info("no stream to a producer", address=producer.address, reason=error.details())
                if "Connection refused" in (error.details() or ""):
                    return
            except (TimeoutError, WireError, AddressError) as error:
                failures += 1
                log.warning("no stream to a producer", address=producer.address, reason=str(error) or "no hello")
            except _WrongWorker:
                log.info("no stream to a producer", address=producer.address, reason="another life answers there")
                return
            except Exception as error:  # a defect, or the system's: this producer's alone
                failures += 1
                reason, trace = f"{type(error).__name__}: {error}", error if failures == 1 else None
                log.warning("no stream to a producer", address=producer.address, reason=reason, exc_info=trace)
            await asyncio.sleep(_RETRY_S)

    def _lost(self, producer: WorkerId) -> None:
        """Handoffs with a producer have nothing to wait for. It may be alive all the same, behind a firewall that
        refuses us or at another address by now: what is being read from it may still land.
        """
        self.transfer.worker_lost(producer)
        self.engine.call(lambda core, now: core.from_producers.lost(producer, now))

    async def _run_stream(self, producer: TakeFrom) -> bool:
        """One stream, until it breaks. True: it was up."""
        await check_name(producer.address)
        async with self._channels.open(producer.address, CertificateRole.PREFILL, CLIENT_OPTIONS) as channel:
            call = kv_pb2_grpc.KvControlStub(channel).Pair()
            await call.write(kv_pb2.ConsumerMessage(hello=self._consumer_hello()))
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                answer = await call.read()
            if not isinstance(answer, kv_pb2.ProducerMessage):
                raise WireError("it ended the stream")
            self._check(answer.hello, producer)
            offers = self._usable(answer.hello)
            process = parse_process(answer.hello)
            self.transfer.add_worker(producer.worker, producer.address, offers, process)
            stream, pulses = StreamId(next(self._stream_ids)), answer.hello.sends_pulses
            outbox: Outbox[ToProducer] = Outbox(_MAX_UNREAD_MESSAGES, call.cancel)
            self._producers[stream] = outbox
            self.engine.call(
                lambda core, now: core.from_producers.stream_up(producer.worker, stream, now, pulses=pulses)
            )
            writer = asyncio.create_task(_write_all(call, outbox))
            try:
                while (message := await call.read()) is not grpc.aio.EOF:
                    self._from_producer(stream, message)
            except (grpc.aio.AioRpcError, WireError) as error:
                log.info("the stream to a producer broke", address=producer.address, reason=type(error).__name__)
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                log.info("the stream to a producer broke", address=producer.address, reason="it takes no messages")
            finally:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)  # what broke it broke the reading too
                del self._producers[stream]
                self.engine.call(lambda core, now: core.from_producers.stream_lost(producer.worker, stream, now))
        return True

    def _usable(self, hello: kv_pb2.ProducerHello) -> dict[str, bytes]:
        """Returns a producer's offers; not of bytes where it sends whole blocks, and this worker has several parts."""
        offers = {offer.transport: offer.descriptor for offer in hello.offers}
        if not hello.serves_ranges and has_parts(self.identity.offers.get(ByteStreamTransport.name, b"")):
            offers.pop(ByteStreamTransport.name, None)
        return offers

    def _from_producer(self, stream: StreamId, message: kv_pb2.ProducerMessage) -> None:
        parsed = parse_to_consumer(message)
        self.engine.call(lambda core, now: core.from_producers.message(stream, parsed, now))

    def _consumer_hello(self) -> kv_pb2.ConsumerHello:
        identity = self.identity
        return kv_pb2.ConsumerHello(
            kv_protocol=KV_PROTOCOL_VERSION,
            fingerprint=identity.fingerprint,
            incarnation=identity.worker_id,
            transports=identity.offers,
            hears_pulses=True,
            reads_regions=True,
            reads_parts=True,
        )

    def _check(self, hello: kv_pb2.ProducerHello, producer: TakeFrom) -> None:
        if hello.incarnation != producer.worker:
            raise _WrongWorker
        identity = self.identity
        ours = (KV_PROTOCOL_VERSION, identity.fingerprint)
        theirs = (hello.kv_protocol, hello.fingerprint)
        if ours != theirs:
            raise WireError(f"its KV is not ours: {theirs}, not {ours}")


class KvServicer(kv_pb2_grpc.KvControlServicer):
    """The producer's end of control streams."""

    def __init__(self, streams: KvStreams) -> None:
        self._streams = streams

    async def Pair(
        self,
        request_iterator: AsyncIterator[kv_pb2.ConsumerMessage],
        context: "grpc.aio.ServicerContext[kv_pb2.ConsumerMessage, kv_pb2.ProducerMessage]",
    ) -> AsyncIterator[kv_pb2.ProducerMessage]:
        """One consumer's stream, until either side ends it."""
        hello = await self._check_hello(request_iterator, context)
        stream, outbox = self._streams.consumer_connected()
        tasks = [asyncio.create_task(self._read(stream, outbox, request_iterator))]
        if hello.hears_pulses:
            tasks.append(asyncio.create_task(_pulse(outbox)))
        try:
            yield kv_pb2.ProducerMessage(hello=self._producer_hello(hello))
            async for message in outbox.drain():
                yield pack_to_consumer(message)
        finally:
            self._streams.consumer_gone(stream)
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _read(
        self, stream: StreamId, outbox: Outbox[ToConsumer], messages: AsyncIterator[kv_pb2.ConsumerMessage]
    ) -> None:
        try:
            async for message in messages:
                self._from_consumer(stream, parse_to_producer(message))
        except WireError as error:
            log.warning("a consumer sent what no consumer sends", error=str(error))
        finally:
            outbox.close()  # ends the stream

    def _from_consumer(self, stream: StreamId, message: Open | Release) -> None:
        self._streams.engine.call(lambda core, now: core.from_consumers.message(stream, message, now))

    async def _check_hello(
        self,
        messages: AsyncIterator[kv_pb2.ConsumerMessage],
        context: "grpc.aio.ServicerContext[kv_pb2.ConsumerMessage, kv_pb2.ProducerMessage]",
    ) -> kv_pb2.ConsumerHello:
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                hello = (await anext(messages)).hello
        except (TimeoutError, StopAsyncIteration):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a hello")
        identity = self._streams.identity
        ours = (KV_PROTOCOL_VERSION, identity.fingerprint)
        theirs = (hello.kv_protocol, hello.fingerprint)
        if theirs != ours or identity.offers.keys().isdisjoint(hello.transports):
            transports = ", ".join(identity.offers)
            words = "KV protocol {}, fingerprint {} and transport {} are spoken here".format(*ours, transports)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, words)
        log.info("consumer connected", worker=f"{hello.incarnation:016x}")
        return hello

    def _producer_hello(self, consumer: kv_pb2.ConsumerHello) -> kv_pb2.ProducerHello:
        """Offers a consumer of an older version nothing that it would refuse: it takes another transport, if any."""
        identity = self._streams.identity
        offers = {
            name: key
            for name, key in identity.offers.items()
            if (consumer.reads_regions or not NixlDescriptor.has_regions(key))
            and (consumer.reads_parts or not has_parts(key))
        }
        return kv_pb2.ProducerHello(
            kv_protocol=KV_PROTOCOL_VERSION,
            fingerprint=identity.fingerprint,
            incarnation=identity.worker_id,
            offers=[kv_pb2.Offer(transport=name, descriptor=key) for name, key in offers.items()],
            process=None if identity.process is None else pack_process(identity.process),
            sends_pulses=True,
            serves_ranges=True,
        )


class _WrongWorker(Exception):
    """Another worker answers at the producer's address."""


async def _pulse(outbox: Outbox[ToConsumer]) -> None:
    while True:
        outbox.put(Pulse())
        await asyncio.sleep(_PULSE_S)


async def _write_all(
    call: "grpc.aio.StreamStreamCall[kv_pb2.ConsumerMessage, kv_pb2.ProducerMessage]", outbox: Outbox[ToProducer]
) -> None:
    try:
        async for message in outbox.drain():
            await call.write(pack_to_producer(message))
    finally:
        call.cancel()  # a stream that is only read would let handoffs wait for their deadlines
