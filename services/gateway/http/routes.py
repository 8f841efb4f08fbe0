"""Routes: which handler answers a path, under which name it is counted, in which form it reports errors, and what it
accepts and answers.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from services.gateway.http.envelope import Envelope
from services.gateway.http.exchange import Exchange
from services.gateway.http.operation import DescribedRoute, Operation

SAME_ORIGIN = "/console/api"  # below it, at the admin port, paths of the API are there for the console's pages

Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Pages:
    """Routes for people with a browser. open_paths: at which no key is asked for; at others below `beginning` any known
    key will do, and the handlers look at what it may see.
    """

    routes: Sequence[Route] = ()
    open_paths: frozenset[str] = frozenset()
    beginning: str | None = None


NO_PAGES = Pages()


def route(
    path: str, handler: Handler, operation: Operation, method: str = "GET", envelope: Envelope | None = None
) -> Route:
    """Returns the route of a path. operation: what /openapi.json says of the route; envelope: None is OpenAI's."""
    return Route(path, _Endpoint(handler, DescribedRoute(path, method, operation), envelope), methods=[method])


def described(routes: Iterable[BaseRoute]) -> Iterator[DescribedRoute]:
    """Yields what `route` was told of these routes."""
    for each in routes:
        if isinstance(each, Route) and isinstance(each.endpoint, _Endpoint):
            yield each.endpoint.described


def announce(routes: Sequence[BaseRoute], scope: Scope) -> None:
    """Gives a request that no handler will see the name and the form of errors of the route that it is for."""
    found = (each.endpoint for each in routes if isinstance(each, Route) and each.matches(scope)[0] is not Match.NONE)
    endpoint = next(found, None)
    if isinstance(endpoint, _Endpoint):
        endpoint.announce(scope["exchange"])


class _Endpoint:
    """A handler in the form that the router calls."""

    def __init__(self, handler: Handler, described: DescribedRoute, envelope: Envelope | None) -> None:
        path = described.path.removeprefix(SAME_ORIGIN)  # the same handler under another path counts as one
        name = path.removeprefix("/v1/").strip("/").partition("/{")[0].replace("/", ".")
        self._name = name or "root"
        self.described = described
        self._handler = handler
        self._envelope = envelope

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["exchange"]
        self.announce(exchange)
        exchange.check_body()
        exchange.path_params = scope["path_params"]
        await self._handler(exchange)

    def announce(self, exchange: Exchange) -> None:
        """Gives a request this route's name and form of errors."""
        exchange.record.endpoint = self._name
        if self._envelope is not None:
            exchange.envelope = self._envelope
