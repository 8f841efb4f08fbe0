"""The bytes of each call to the message of its type, where they are one and it is not too large.

gRPC itself would answer bytes that are no message with the name of an exception's class, and log its traceback.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from services.gateway.api.side_thread import SideThread
from services.gateway.grpc_api.message_size import TooManyFields, check_size

_SMALL_BYTES = 16 << 10  # are decoded in less than a millisecond, whatever they hold

log = structlog.get_logger()


class DecodingInterceptor(grpc.aio.ServerInterceptor):
    """Decodes the requests of all servicers of a server.

    A servicer that takes one request either returns its answer or writes answers to the context.
    """

    def __init__(self, side: SideThread) -> None:
        self._side = side

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler: Any = await continuation(handler_call_details)
        return handler if handler is None else _decoding(handler, handler_call_details.method, self._side)


def _decoding(handler: Any, method: str, side: SideThread) -> "grpc.RpcMethodHandler[Any, Any]":
    """Returns a handler that gets bytes, for one that gets messages."""

    async def of_one(data: bytes, context: Any) -> Any:
        request = await _decoded(handler, data, context, method, side)
        return await (handler.unary_stream or handler.unary_unary)(request, context)

    async def of_several(parts: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        async def requests() -> AsyncIterator[Any]:
            async for data in parts:
                yield await _decoded(handler, data, context, method, side)

        async for answer in handler.stream_stream(requests(), context):
            yield answer

    serializer = handler.response_serializer
    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(of_several, None, serializer)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(of_one, None, serializer)
    return grpc.unary_unary_rpc_method_handler(of_one, None, serializer)


async def _decoded(handler: Any, data: bytes, context: Any, method: str, side: SideThread) -> Any:
    """Returns the message. Ends the call where there is none, or one that is too large."""
    from_bytes = handler.request_deserializer  # of the message's class
    try:
        if len(data) > _SMALL_BYTES:
            await side.run(check_size, data, from_bytes.__self__.DESCRIPTOR)
        return from_bytes(data)
    except TooManyFields as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except DecodeError as error:
        log.warning("request failed", method=method, reason=str(error))
        await context.abort(grpc.StatusCode.INTERNAL, "The bytes of this call are no message of its type.")
