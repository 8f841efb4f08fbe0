"""A small gateway for tests of workers: speaks the real protocol over real streams, and decides nothing by itself."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from itertools import count

import grpc
import numpy as np

from kvtransfer.ids import GatewayId
from services.protocol.capsule import Capsule
from services.protocol.frames import Failure, Frame, Load, Row, Timing
from services.protocol.messages import (
    BlockEvents,
    GatewayHello,
    GatewayMessage,
    HandTo,
    Submit,
    TakeFrom,
    WorkerHello,
    WorkerMessage,
    WorkerNews,
)
from services.protocol.sampling import SamplingParams
from services.protocol.versions import PROTOCOL_MINOR
from services.protocol.wire import deserialize_worker_message, serialize_gateway_message
from services.tls.grpc_ends import Channels
from services.tls.roles import CertificateRole


class Stream:
    """One stream to one worker, and all that came up it."""

    def __init__(self, call: grpc.aio.StreamStreamCall, address: str) -> None:
        self.call = call
        self.address = address
        self.hello: WorkerHello | None = None
        self.rows: dict[int, list[Row]] = defaultdict(list)
        self.failures: dict[int, Failure] = {}
        self.timings: dict[int, Timing] = {}
        self.events: list[BlockEvents] = []
        self.load = Load()
        self.told: list[WorkerNews] = []
        self._news = asyncio.Condition()

    async def send(self, message: GatewayMessage) -> None:
        await self.call.write(serialize_gateway_message(message))

    async def read(self) -> None:
        """Reads until the stream ends."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while (raw := await self.call.read()) is not grpc.aio.EOF:
                assert isinstance(raw, bytes)
                await self._take(deserialize_worker_message(raw))

    async def _take(self, message: WorkerMessage) -> None:
        match message:
            case WorkerHello():
                self.hello = message
            case BlockEvents():
                self.events.append(message)
            case WorkerNews():
                self.told.append(message)
            case Frame():
                assert not self.timings.keys() & {timing.handle for timing in message.timings}, "told twice"
                self.timings |= {timing.handle: timing for timing in message.timings}
                for row in message.rows():
                    self.rows[row.handle].append(row)
                self.failures |= {failure.handle: failure for failure in message.failures}
                self.load = message.load or self.load
        async with self._news:
            self._news.notify_all()

    async def until(self, condition, timeout_s: float = 120.0) -> None:
        async with asyncio.timeout(timeout_s), self._news:
            await self._news.wait_for(condition)

    def tokens(self, handle: int) -> list[int]:
        return [token for row in self.rows[handle] for token in row.tokens]

    def ended(self, handle: int) -> bool:
        return handle in self.failures or any(row.finish for row in self.rows[handle])

    def held_hashes(self) -> set[bytes]:
        held: set[bytes] = set()
        for sequence, event in enumerate(self.events, start=1):
            assert event.sequence == sequence
            assert event.snapshot == (sequence == 1)
            held |= set(event.added)
            held -= set(event.evicted)
        return held


class TestGateway:
    """One life of a gateway."""

    __test__ = False

    def __init__(self, id: int = 77, minor: int = PROTOCOL_MINOR) -> None:
        self.id = GatewayId(id)
        self.minor = minor
        self.handles = count(1)
        self.highest = 0

    @contextlib.asynccontextmanager
    async def connect(self, port: int, channels: Channels | None = None) -> AsyncIterator[Stream]:
        address = f"127.0.0.1:{port}"
        async with (channels or Channels()).open(address, CertificateRole.WORKER, ()) as channel:
            stream = Stream(channel.stream_stream("/baton.v1.Worker/Connect")(), address)
            await stream.send(GatewayHello(self.id, self.highest, protocol_minor=self.minor))
            reader = asyncio.create_task(stream.read())
            await stream.until(lambda: stream.hello and stream.events)
            yield stream
            stream.call.cancel()
            await reader

    def submit(self, prompt: list[int], max_tokens: int, *, handoff: HandTo | TakeFrom | None = None, handle: int = 0,
               seeds: tuple[int, ...] = (), **sampling) -> Submit:  # fmt: skip
        handle = handle or next(self.handles)
        params = SamplingParams(max_tokens=max_tokens, temperature=sampling.pop("temperature", 0.0), **sampling)
        capsule = Capsule(np.array(prompt, dtype=np.int32), len(prompt), params)
        submit = Submit(handle, capsule, timeout_s=300.0, request_id=f"r{handle}", handoff=handoff, seeds=seeds)
        self.highest = max(self.highest, submit.last_handle)
        return submit

    async def hand_off(self, prefill: Stream, decode: Stream, prompt: list[int], max_tokens: int, **sampling) -> int:
        """Submits to both, as a gateway does; returns the handle."""
        handle = next(self.handles)
        for _ in sampling.get("seeds", ()):
            next(self.handles)
        assert prefill.hello is not None
        assert decode.hello is not None
        to, source = HandTo(decode.hello.worker_id), TakeFrom(prefill.address, prefill.hello.worker_id)
        await prefill.send(self.submit(prompt, max_tokens, handoff=to, handle=handle, **sampling))
        await decode.send(self.submit(prompt, max_tokens, handoff=source, handle=handle, **sampling))
        return handle
