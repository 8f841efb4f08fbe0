"""Routes: which handler answers a path, under which name it is counted, and in which form it reports errors."""

from collections.abc import Awaitable, Callable

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from services.gateway.http.envelope import Envelope
from services.gateway.http.exchange import Exchange

Handler = Callable[[Exchange], Awaitable[None]]


def route(path: str, handler: Handler, method: str = "GET", envelope: Envelope | None = None) -> Route:
    """Returns the route of a path. envelope: None is OpenAI's."""
    name = path.removeprefix("/v1/").strip("/").partition("/{")[0].replace("/", ".")
    return Route(path, _Endpoint(name, handler, envelope), methods=[method])


class _Endpoint:
    """A handler in the form that the router calls."""

    def __init__(self, name: str, handler: Handler, envelope: Envelope | None) -> None:
        self._name = name
        self._handler = handler
        self._envelope = envelope

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["exchange"]
        exchange.record.endpoint = self._name
        exchange.path_params = scope["path_params"]
        if self._envelope is not None:
            exchange.envelope = self._envelope
        await self._handler(exchange)
