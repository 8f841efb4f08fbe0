"""The gRPC server for clients: Inference, health and reflection on one port."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from protos import inference_pb2, inference_pb2_grpc
from services.gateway.api.caller import Authenticator
from services.gateway.api.generation import Generator
from services.gateway.api.side_thread import SideThread
from services.gateway.grpc_api.authentication import AuthenticationInterceptor
from services.gateway.grpc_api.decoding import DecodingInterceptor
from services.gateway.listening import ListenError
from services.protocol.grpc_options import host_port
from services.tls.files import CertificateFiles
from services.tls.grpc_ends import open_port

_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_READY_INTERVAL_S = 0.5
_LAST_NEWS_S = 0.2  # for those who watch the health of a server that stops

log = structlog.get_logger()


class GrpcServer:
    """Serves from `start` to `stop`."""

    def __init__(
        self,
        servicer: inference_pb2_grpc.InferenceServicer,
        generator: Generator,
        side: SideThread,
        max_message_bytes: int,
        shares_port: bool = False,
        keys: Authenticator | None = None,
        tls: CertificateFiles | None = None,
    ) -> None:
        """shares_port: another gateway of the same user may serve at the same port, which is then never 0.

        keys: None asks for no key. tls: the certificate that clients see; None: plain text.
        """
        self._tls = tls
        options = (("grpc.max_receive_message_length", max_message_bytes), ("grpc.so_reuseport", int(shares_port)))
        interceptors: list[grpc.aio.ServerInterceptor] = [] if keys is None else [AuthenticationInterceptor(keys)]
        self._server = grpc.aio.server(options=options, interceptors=[*interceptors, DecodingInterceptor(side)])
        self._generator = generator
        self._health = _Health()
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._reflection = _Reflection((_INFERENCE, health.SERVICE_NAME, reflection.SERVICE_NAME))
        add_reflection: Any = reflection_pb2_grpc.add_ServerReflectionServicer_to_server
        add_reflection(self._reflection, self._server)

    async def start(self, host: str, port: int) -> int:
        """Opens the port, and returns its number; 0 takes a free one. Raises ListenError."""
        shown = host_port(host, port)
        try:
            port = open_port(self._server, shown, self._tls)
        except RuntimeError as error:
            raise ListenError(f"{shown} cannot be listened on for gRPC; choose another with --grpc-port") from error
        await self._server.start()
        log.info("gateway listening for gRPC", host=host, port=port)
        return port

    async def report_health(self) -> None:
        """Reports SERVING while a request would find a worker, until cancelled."""
        statuses = health_pb2.HealthCheckResponse
        while True:
            status = statuses.SERVING if self._generator.ready() else statuses.NOT_SERVING
            for service in ("", _INFERENCE):
                await self._health.set(service, status)
            await asyncio.sleep(_READY_INTERVAL_S)

    async def stop(self, within_s: float) -> None:
        """Refuses further calls; returns when those that run have ended, which are cut off after so many seconds.

        A further call can only shorten the time.
        """
        stopping = asyncio.create_task(self._server.stop(within_s))
        self._reflection.end()
        await self._health.end()
        await stopping


class _Health(health.aio.HealthServicer):
    """Ends the calls of those who watch it with the server: each would last, and be waited for, as long as it may."""

    def __init__(self) -> None:
        super().__init__()
        self._watches: set[asyncio.Task[None]] = set()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Tells each change of a service's health until the client leaves, or the server stops."""
        watch = asyncio.create_task(super().Watch(request, context))
        self._watches.add(watch)
        try:
            await asyncio.wait([watch])
        finally:
            watch.cancel()
            self._watches.discard(watch)

    async def end(self) -> None:
        """Is NOT_SERVING at once and for good; returns when all who watch have been told so."""
        await self.enter_graceful_shutdown()
        if self._watches:
            await asyncio.wait(self._watches, timeout=_LAST_NEWS_S)
        for watch in self._watches:
            watch.cancel()


class _Reflection(reflection.aio.ReflectionServicer):
    """Ends its calls with the server, once they are answered: a client may leave one open for as long as it lives."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(service_names=names)
        self._ended = asyncio.Event()

    async def ServerReflectionInfo(  # type: ignore[override]  # its stubs take it for a coroutine
        self, request_iterator: AsyncIterable[reflection_pb2.ServerReflectionRequest], context: Any
    ) -> AsyncIterator[reflection_pb2.ServerReflectionResponse]:
        """Answers each question until the client has no more, or the server stops."""
        answers: Any = super().ServerReflectionInfo(self._until_ended(request_iterator), context)
        async for answer in answers:
            yield answer

    def end(self) -> None:
        """Takes no further question."""
        self._ended.set()

    async def _until_ended(
        self, requests: AsyncIterable[reflection_pb2.ServerReflectionRequest]
    ) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        ended = asyncio.create_task(self._ended.wait())
        asked = aiter(requests)
        try:
            while True:
                request = asyncio.ensure_future(anext(asked, None))
                await asyncio.wait((request, ended), return_when=asyncio.FIRST_COMPLETED)
                if not request.done() or (question := request.result()) is None:
                    return
                yield question
        finally:
            ended.cancel()
            request.cancel()
