"""The key that each call brings, asked for before the call's message is read. Health is open to everybody."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health

from services.config import Right
from services.gateway.api.caller import Authenticator
from services.gateway.api.errors import ApiError

OPEN_SERVICES = frozenset({health.SERVICE_NAME})
Header = Callable[[str], str]  # from the name of a header to the client's value, or to an empty text
CODES = {401: grpc.StatusCode.UNAUTHENTICATED, 403: grpc.StatusCode.PERMISSION_DENIED}


class AuthenticationInterceptor(grpc.aio.ServerInterceptor):
    """Ends all calls without a key that opens the API, of all servicers of a server, those to unknown methods too."""

    def __init__(self, keys: Authenticator) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Refuses the call where its key does not open the API, and passes it on otherwise."""
        service = handler_call_details.method.rpartition("/")[0].lstrip("/")
        if service not in OPEN_SERVICES:
            try:
                self._keys.caller(header_of(handler_call_details.invocation_metadata), Right.API)
            except ApiError as error:
                return _refusing(error)
        return await continuation(handler_call_details)


def header_of(metadata: Any) -> Header:
    """Returns the headers in a call's metadata."""
    sent = dict(metadata or ())
    return lambda name: str(sent.get(name, ""))


def _refusing(error: ApiError) -> "grpc.RpcMethodHandler[Any, Any]":
    async def refuse(_: Any, context: Any) -> None:
        await context.abort(CODES[error.status], error.message)

    return grpc.stream_stream_rpc_method_handler(refuse)  # of all kinds the one that waits for no message
