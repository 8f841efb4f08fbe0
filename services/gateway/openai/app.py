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
from services.gateway.openai.chat import ChatFormat
from services.gateway.openai.completions import CompletionFormat
from services.gateway.openai.embeddings import EmbeddingEndpoint
from services.gateway.openai.endpoint import GenerationEndpoint, Limits
from services.gateway.openai.exchange import STATUS_CLIENT_GONE, ClientGone, Exchange
from services.gateway.openai.pages import Models, Probes, RecentRequests
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
) -> ASGIApp:
    """Returns an ASGI application. `describe_ledger` returns the JSON values that /debug/ledger shows.

    allowed_origins: of pages whose scripts may use the API from a browser.
    """
    models, probes = Models(runners.chat.model, generator), Probes(generator, metrics, describe_ledger)
    tokens = Tokens(runners, limits)
    requests = RecentRequests(runners.records)
    chat = GenerationEndpoint(runners.chat, ChatFormat(runners.tokenizer), limits, runners.records)
    completions = GenerationEndpoint(runners.completions, CompletionFormat(runners.tokenizer), limits, runners.records)
    embeddings = EmbeddingEndpoint(runners.embeddings, limits, runners.records)
    routes = [
        _route("/v1/chat/completions", chat, "POST"),
        _route("/v1/completions", completions, "POST"),
        _route("/v1/embeddings", embeddings, "POST"),
        _route("/v1/models", models.list),
        _route("/v1/models/{model:path}", models.retrieve),
        _route("/tokenize", tokens.tokenize, "POST"),
        _route("/detokenize", tokens.detokenize, "POST"),
        _route("/version", probes.version),
        _route("/load", probes.load),
        _route("/ping", probes.health),
        _route("/health", probes.health),
        _route("/ready", probes.ready),
        _route("/metrics", probes.metrics),
        _route("/debug/ledger", probes.ledger),
        _route("/debug/requests", requests.list),
        _route("/debug/requests/{request_id:path}", requests.retrieve),
    ]
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

    def __init__(self, name: str, handler: Handler) -> None:
        self._name = name
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["exchange"]
        exchange.record.endpoint = self._name
        exchange.path_params = scope["path_params"]
        await self._handler(exchange)


def _route(path: str, handler: Handler, method: str = "GET") -> Route:
    name = path.removeprefix("/v1/").strip("/").partition("/{")[0].replace("/", ".")
    return Route(path, _Endpoint(name, handler), methods=[method])


def _from_router(error: HTTPException) -> ApiError:
    headers: Mapping[str, str] = error.headers or {}
    if error.status_code == 405:
        return ApiError(
            405, f"This path takes {headers.get('Allow')} only.", headers={"allow": headers.get("Allow", "")}
        )
    return ApiError(error.status_code, "There is nothing at this path.", code="unknown_url")
