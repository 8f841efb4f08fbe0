"""The gateway's HTTP application: routes, one log line and one count for every request, and errors as envelopes."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.api.errors import ApiError, internal_error
from services.gateway.api.generation import Generator
from services.gateway.api.request_record import IGNORED_FIELDS
from services.gateway.api.request_records import RequestRecords
from services.gateway.api.request_runner import Runners
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai import operations
from services.gateway.openai.chat import ChatFormat
from services.gateway.openai.completions import CompletionFormat
from services.gateway.openai.endpoint import GenerationEndpoint, Limits
from services.gateway.openai.exchange import STATUS_CLIENT_GONE, ClientGone, Exchange
from services.gateway.openai.neutral import CHAT_NEUTRAL, COMPLETIONS_NEUTRAL
from services.gateway.openai.openapi import DescribedRoute, Operation, describe_api
from services.gateway.openai.pages import Documents, Models, Probes, RecentRequests
from services.gateway.openai.render import RenderEndpoint
from services.gateway.openai.tokens import Tokens

log = structlog.get_logger()

Handler = Callable[[Exchange], Awaitable[None]]


def create_app(
    *,
    runners: Runners,
    generator: Generator,
    metrics: GatewayMetrics,
    describe_ledger: Callable[[], object],
    limits: Limits,
    allowed_origins: Sequence[str] = (),
    tokenizer_info: Mapping[str, object] | None = None,
) -> ASGIApp:
    """Returns an ASGI application. `describe_ledger` returns the JSON values that /debug/ledger shows.

    allowed_origins: of pages whose scripts may use the API from a browser. tokenizer_info: what /tokenizer_info shows;
    None: there is no such page.
    """
    models, probes = Models(runners.chat.model, generator), Probes(generator, metrics, describe_ledger)
    tokens = Tokens(runners, limits)
    requests = RecentRequests(runners.records)
    chat = GenerationEndpoint(runners.chat, ChatFormat(runners.tokenizer), limits, runners.records)
    completions = GenerationEndpoint(runners.completions, CompletionFormat(runners.tokenizer), limits, runners.records)
    render_chat = RenderEndpoint(runners.chat, CHAT_NEUTRAL, limits, several=False)
    render_completions = RenderEndpoint(runners.completions, COMPLETIONS_NEUTRAL, limits, several=True)
    routes = [
        _route("/v1/chat/completions", chat, "POST", operations.CHAT),
        _route("/v1/completions", completions, "POST", operations.COMPLETIONS),
        _route("/v1/chat/completions/render", render_chat, "POST", operations.RENDER_CHAT),
        _route("/v1/completions/render", render_completions, "POST", operations.RENDER_COMPLETIONS),
        _route("/v1/models", models.list, "GET", operations.MODELS),
        _route("/v1/models/{model:path}", models.retrieve, "GET", operations.MODEL),
        _route("/tokenize", tokens.tokenize, "POST", operations.TOKENIZE),
        _route("/detokenize", tokens.detokenize, "POST", operations.DETOKENIZE),
        _route("/version", probes.version, "GET", operations.VERSION),
        _route("/load", probes.load, "GET", operations.LOAD),
        _route("/ping", probes.health, "GET", operations.HEALTH),
        _route("/health", probes.health, "GET", operations.HEALTH),
        _route("/ready", probes.ready, "GET", operations.READY),
        _route("/metrics", probes.metrics, "GET", operations.METRICS),
        _route("/debug/ledger", probes.ledger, "GET", operations.LEDGER),
        _route("/debug/requests", requests.list, "GET", operations.REQUESTS),
        _route("/debug/requests/{request_id:path}", requests.retrieve, "GET", operations.REQUEST),
    ]
    routes += _document_routes(routes, limits, tokenizer_info)
    app = Application(Router(routes, redirect_slashes=False), metrics, runners.records)
    if not allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=allowed_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["server-timing", "x-request-id", IGNORED_FIELDS],
    )


class Application:
    """Gives every HTTP request its Exchange, and sees to it that each is answered and counted."""

    def __init__(self, router: Router, metrics: GatewayMetrics, records: RequestRecords) -> None:
        self._router = router
        self._metrics = metrics
        self._records = records

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        # With an app in its scope the router raises for unknown paths, instead of answering in plain text.
        inner = {**scope, "app": self, "exchange": exchange}
        with structlog.contextvars.bound_contextvars(request_id=exchange.record.request_id):
            self._metrics.in_flight.inc()
            try:
                await self._answer(exchange, self._router(inner, receive, send))
            finally:
                self._metrics.in_flight.dec()
                self._records.end(exchange.record)

    async def _answer(self, exchange: Exchange, handling: Awaitable[None]) -> None:
        try:
            await handling
        except ClientGone:
            exchange.record.status = STATUS_CLIENT_GONE
        except ApiError as error:
            if error.status >= 500 and exchange.record.generates:
                log.warning("request failed", reason=str(error.__cause__ or error.message))
            await exchange.fail(error)
        except HTTPException as error:
            await exchange.fail(_from_router(error))
        except Exception:
            log.exception("request failed")
            await exchange.fail(internal_error())


class _Endpoint:
    """A handler in the form that the router calls."""

    def __init__(self, handler: Handler, described: DescribedRoute) -> None:
        self._name = described.path.removeprefix("/v1/").strip("/").partition("/{")[0].replace("/", ".")
        self._handler = handler
        self.described = described

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["exchange"]
        exchange.record.endpoint = self._name
        exchange.path_params = scope["path_params"]
        await self._handler(exchange)


def _route(path: str, handler: Handler, method: str, operation: Operation) -> Route:
    return Route(path, _Endpoint(handler, DescribedRoute(path, method, operation)), methods=[method])


def _document_routes(
    routes: Sequence[Route], limits: Limits, tokenizer_info: Mapping[str, object] | None
) -> list[Route]:
    """Returns the routes that describe all `routes`, themselves among them."""
    described = [route.endpoint.described for route in routes if isinstance(route.endpoint, _Endpoint)]
    own = [("/openapi.json", operations.OPENAPI), ("/docs", operations.DOCS)]
    if tokenizer_info is not None:
        own.append(("/tokenizer_info", operations.TOKENIZER_INFO))
    described += [DescribedRoute(path, "GET", operation) for path, operation in own]
    document = describe_api(described, limits.max_body_bytes, limits.strict_fields)
    documents = Documents(document, tokenizer_info)
    handlers = (documents.openapi, documents.page, documents.tokenizer_info)
    return [_route(path, handler, "GET", operation) for (path, operation), handler in zip(own, handlers, strict=False)]


def _from_router(error: HTTPException) -> ApiError:
    headers: Mapping[str, str] = error.headers or {}
    if error.status_code == 405:
        return ApiError(
            405, f"This path takes {headers.get('Allow')} only.", headers={"allow": headers.get("Allow", "")}
        )
    return ApiError(error.status_code, "There is nothing at this path.", code="unknown_url")
