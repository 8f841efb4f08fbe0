"""The port of a rank above 0 of a worker of several hosts: its health, and the bytes of its blocks for consumers.

The rank's own thread runs steps; gRPC has a loop and a thread of its own here.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvtransfer.transports.byte_stream import BlockSource
from protos import kv_pb2_grpc
from services.protocol.grpc_options import SERVER_OPTIONS, host_port
from services.protocol.model_files.base import ModelError
from services.tls.files import CertificateFiles
from services.tls.grpc_ends import Channels, open_port
from services.tls.role_check import RoleInterceptor
from services.worker.callers import CALLERS
from services.worker.kv_bytes import GrpcByteChannel, KvBytesServicer

_DONE_S = 60.0  # for what the loop does in milliseconds
_Result = TypeVar("_Result")


class RankPort:
    """Listens until it is closed. Says that the rank does not serve, until it does."""

    def __init__(
        self, host: str, port: int, tls: CertificateFiles | None = None, health_port: int | None = None
    ) -> None:
        """Opens the port, and one for health alone, as plain text, where it is named. Raises ModelError where that is
        not possible.
        """
        self._host, self._channels, self._tls = host, Channels(tls), tls
        self._bytes = KvBytesServicer(None)
        self._servers: list[grpc.aio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rank port", daemon=True)
        self._thread.start()
        try:
            self.port = self._run(self._open(port, health_port))
        except BaseException:
            self.close()
            raise

    def serves(self) -> None:
        """Says that the rank has loaded, as all others have or will have."""
        self._run(self._health.set("", health_pb2.HealthCheckResponse.SERVING))

    def read_from(self, source: BlockSource) -> None:
        """Lets consumers read these blocks from now on."""
        self._loop.call_soon_threadsafe(setattr, self._bytes, "source", source)

    def dial(self, address: str) -> GrpcByteChannel:
        """Makes a channel to another worker's port, for reads of this rank."""
        return GrpcByteChannel(address, self._loop, self._channels)

    def close(self) -> None:
        """Closes the port, and ends the thread."""
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self, wanted: int, health_port: int | None) -> int:
        self._health = health.aio.HealthServicer()
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        server = grpc.aio.server(
            options=SERVER_OPTIONS, interceptors=[] if self._tls is None else [RoleInterceptor(CALLERS)]
        )
        kv_pb2_grpc.add_KvBytesServicer_to_server(self._bytes, server)
        port = await self._listen(server, wanted, self._tls)
        if health_port is not None:
            await self._listen(grpc.aio.server(options=SERVER_OPTIONS), health_port, None)
        return port

    async def _listen(self, server: grpc.aio.Server, wanted: int, tls: CertificateFiles | None) -> int:
        address = host_port(self._host, wanted)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            port = open_port(server, address, tls)
        except RuntimeError as error:
            raise ModelError(f"cannot listen on {address}: is the port in use?") from error
        await server.start()
        self._servers.append(server)
        return port

    async def _stop(self) -> None:
        for server in self._servers:
            await server.stop(None)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _run(self, coroutine: Coroutine[None, None, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_DONE_S)
