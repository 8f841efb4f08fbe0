"""The check of each call: is the caller's certificate of a role that may use this method?

gRPC has verified the certificate by then. A method that the table does not name is refused to everybody.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from typing import Any

import grpc
import structlog

from services.tls.roles import CertificateRole

_TLS = "TLSv1.3"  # Python's gRPC has no setting for the lowest version: connections below it serve no call

log = structlog.get_logger()

Allowed = Mapping[str, Collection[CertificateRole] | None]  # by method, as /package.Service/Method; None: all roles


class RoleInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls that the table does not allow."""

    def __init__(self, allowed: Allowed) -> None:
        self._allowed = allowed

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Puts the check of the caller before the method, unless all roles may use it."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or self._allowed.get(method, ()) is None:
            return handler
        return _checked(handler, lambda context: self._check(method, context))

    async def _check(self, method: str, context: Any) -> None:
        """Aborts a call that may not be."""
        properties = context.auth_context()
        names = sorted(name.decode(errors="replace") for name in properties.get("peer_dns", ()))
        allowed = sorted(role.dns_name for role in self._allowed.get(method) or ())
        if properties.get("ssl_tls_version") != [_TLS.encode()]:
            code, why = grpc.StatusCode.UNAUTHENTICATED, f"only {_TLS} is spoken here"
        elif not names:
            code, why = grpc.StatusCode.UNAUTHENTICATED, "the certificate has no DNS name"
        elif not set(names) & set(allowed):
            who = " or ".join(allowed) or "nobody"
            code, why = grpc.StatusCode.PERMISSION_DENIED, f"{method} is for {who}, not for {', '.join(names)}"
        else:
            return
        log.warning("call refused", method=method, names=names, address=context.peer(), reason=why)
        await context.abort(code, why)


def _checked(handler: Any, check: Callable[[Any], Awaitable[None]]) -> Any:
    """Returns the same method, which checks its caller first."""
    kind = "_".join(
        "stream" if streams else "unary" for streams in (handler.request_streaming, handler.response_streaming)
    )
    function = getattr(handler, kind)
    make = getattr(grpc, f"{kind}_rpc_method_handler")

    async def answer(request: Any, context: Any) -> Any:
        await check(context)
        return await function(request, context)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        await check(context)
        async with aclosing(function(request, context)) as messages:
            async for message in messages:
                yield message

    behaviour = stream if inspect.isasyncgenfunction(function) else answer
    return make(behaviour, handler.request_deserializer, handler.response_serializer)
