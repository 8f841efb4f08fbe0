"""A port between a consumer and its producer: holds announcements, is silent, refuses, or leads to another one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc

from protos import kv_pb2, kv_pb2_grpc
from services.protocol.grpc_options import SERVER_OPTIONS


class Relay(kv_pb2_grpc.KvControlServicer):
    """Passes the messages of control streams on."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.holding = asyncio.Event()  # set when an announcement waits here
        self._may_pass = asyncio.Event()
        self._may_pass.set()
        self._silent = False

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        await self._listen("127.0.0.1:0")
        try:
            yield
        finally:
            await self._server.stop(None)

    def hold(self) -> None:
        """Keeps announcements."""
        self._may_pass.clear()

    def fall_silent(self) -> None:
        """Passes nothing on to the consumer any more; the connection lives."""
        self._silent = True

    def go_on(self) -> None:
        """Passes on what was kept."""
        self._may_pass.set()

    async def refuse(self) -> None:
        """Breaks the streams; who connects from now on is refused."""
        await self._server.stop(None)

    async def lead_to(self, target: str) -> None:
        """Breaks the streams; who connects from now on speaks to somebody else."""
        await self.refuse()
        self._target = target
        await self._listen(self.address)

    async def _listen(self, address: str) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        kv_pb2_grpc.add_KvControlServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(address)}"
        await self._server.start()

    async def Pair(
        self, request_iterator: AsyncIterator[kv_pb2.ConsumerMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[kv_pb2.ProducerMessage]:
        async with grpc.aio.insecure_channel(self._target) as channel:
            call = kv_pb2_grpc.KvControlStub(channel).Pair()
            up = asyncio.create_task(_pass_on(request_iterator, call))
            try:
                while isinstance(message := await call.read(), kv_pb2.ProducerMessage):
                    if message.HasField("announcement") and not self._may_pass.is_set():
                        self.holding.set()
                        await self._may_pass.wait()
                    if not self._silent:
                        yield message
            finally:
                up.cancel()
                await asyncio.gather(up, return_exceptions=True)


async def _pass_on(messages: AsyncIterator[kv_pb2.ConsumerMessage], call: grpc.aio.StreamStreamCall) -> None:
    async for message in messages:
        await call.write(message)
