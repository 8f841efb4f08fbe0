"""The gateway's HTTP application: routes, one log line and one count for every request, and errors as envelopes."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.api.errors import ApiError, internal_error
from services.gateway.api.generation import Generator
from services.gateway.api.request_record import IGNORED_FIELDS, TOOLS
from services.gateway.api.request_records import RequestRecords
from services.gateway.api.request_runner import READING_GRACE_S, Runners
from services.gateway.http.exchange import STATUS_CLIENT_GONE, ClientGone, Exchange
from services.gateway.http.limits import Limits
from services.gateway.http.operation import DescribedRoute
from services.gateway.http.routes import described, route
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai import operations
from services.gateway.openai.chat import ChatFormat
from services.gateway.openai.completions import CompletionFormat
from services.gateway.openai.embeddings import EmbeddingEndpoint
from services.gateway.openai.endpoint import GenerationEndpoint
from services.gateway.openai.neutral import CHAT_NEUTRAL, COMPLETIONS_NEUTRAL
from services.gateway.openai.openapi import describe_api
from services.gateway.openai.pages import Documents, Models, Probes, RecentRequests
from services.gateway.openai.render import RenderEndpoint
from services.gateway.openai.responses.background_kept import BackgroundResponses
from services.gateway.openai.responses.endpoint import ResponsesEndpoint
from services.gateway.openai.responses.kept import KeptResponses
from services.gateway.openai.responses.pages import ResponsePages
from services.gateway.openai.responses.running import RunningResponses
from services.gateway.openai.responses.store import ResponseStore
from services.gateway.openai.tokens import Tokens

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class AppParts:
    """The parts that the application is made of.

    describe_ledger: returns the JSON values that /debug/ledger shows.
    allowed_origins: of pages whose scripts may use the API from a browser.
    other_apis: the routes of other vendors' APIs.
    response_store: None keeps no responses.
    tokenizer_info: what /tokenizer_info shows; None: there is no such page.
    """

    runners: Runners
    generator: Generator
    metrics: GatewayMetrics
    describe_ledger: Callable[[], object]
    limits: Limits
    allowed_origins: Sequence[str] = ()
    other_apis: Sequence[Route] = ()
    response_store: ResponseStore | None = None
    tokenizer_info: Mapping[str, object] | None = None


def create_app(parts: AppParts) -> ASGIApp:
    """Returns an ASGI application."""
    runners, limits, generator, metrics = parts.runners, parts.limits, parts.generator, parts.metrics
    models, probes = Models(runners.chat.model, generator), Probes(generator, metrics, parts.describe_ledger)
    tokens = Tokens(runners, limits)
    requests = RecentRequests(runners.records)
    chat = GenerationEndpoint(runners.chat, ChatFormat(runners.tokenizer), limits, runners.records)
    completions = GenerationEndpoint(runners.completions, CompletionFormat(runners.tokenizer), limits, runners.records)
    embeddings = EmbeddingEndpoint(runners.embeddings, limits, runners.records)
    render_chat = RenderEndpoint(runners.chat, CHAT_NEUTRAL, limits, several=False)
    render_completions = RenderEndpoint(runners.completions, COMPLETIONS_NEUTRAL, limits, several=True)
    routes = [
        route("/v1/chat/completions", chat, operations.CHAT, "POST"),
        route("/v1/completions", completions, operations.COMPLETIONS, "POST"),
        route("/v1/chat/completions/render", render_chat, operations.RENDER_CHAT, "POST"),
        route("/v1/completions/render", render_completions, operations.RENDER_COMPLETIONS, "POST"),
        route("/v1/embeddings", embeddings, operations.EMBEDDINGS, "POST"),
        *parts.other_apis,
        *_response_routes(runners, limits, parts.response_store),
        route("/v1/models", models.list, operations.MODELS),
        route("/v1/models/{model:path}", models.retrieve, operations.MODEL),
        route("/tokenize", tokens.tokenize, operations.TOKENIZE, "POST"),
        route("/detokenize", tokens.detokenize, operations.DETOKENIZE, "POST"),
        route("/version", probes.version, operations.VERSION),
        route("/load", probes.load, operations.LOAD),
        route("/ping", probes.health, operations.HEALTH),
        route("/health", probes.health, operations.HEALTH),
        route("/ready", probes.ready, operations.READY),
        route("/metrics", probes.metrics, operations.METRICS),
        route("/debug/ledger", probes.ledger, operations.LEDGER),
        route("/debug/requests", requests.list, operations.REQUESTS),
        route("/debug/requests/{request_id:path}", requests.retrieve, operations.REQUEST),
    ]
    routes += _document_routes(routes, limits, parts.tokenizer_info)
    app = Application(Router(routes, redirect_slashes=False), metrics, runners.records)
    if not parts.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=parts.allowed_origins,
        allow_methods=["DELETE", "GET", "POST"],
        allow_headers=["*"],
        expose_headers=["server-timing", "x-request-id", "request-id", IGNORED_FIELDS, TOOLS],
    )


def _response_routes(runners: Runners, limits: Limits, store: ResponseStore | None) -> list[Route]:
    kept, running = KeptResponses(store, runners.side), RunningResponses()
    background = None if store is None else BackgroundResponses(store, runners.side)
    create = ResponsesEndpoint(runners, limits, kept, background, running)
    pages = ResponsePages(kept, running, limits.request_timeout_s + READING_GRACE_S)
    return [
        route("/v1/responses", create, operations.RESPONSES, "POST"),
        route("/v1/responses/{response_id}", pages.retrieve, operations.RESPONSE),
        route("/v1/responses/{response_id}", pages.delete, operations.DELETE_RESPONSE, "DELETE"),
        route("/v1/responses/{response_id}/cancel", pages.cancel, operations.CANCEL_RESPONSE, "POST"),
        route("/v1/responses/{response_id}/input_items", pages.input_items, operations.INPUT_ITEMS),
    ]


def _document_routes(
    routes: Sequence[Route], limits: Limits, tokenizer_info: Mapping[str, object] | None
) -> list[Route]:
    """Returns the routes that describe all `routes`, themselves among them."""
    own = [("/openapi.json", operations.OPENAPI), ("/docs", operations.DOCS)]
    if tokenizer_info is not None:
        own.append(("/tokenizer_info", operations.TOKENIZER_INFO))
    all_routes = [*described(routes), *(DescribedRoute(path, "GET", operation) for path, operation in own)]
    document = describe_api(all_routes, limits.max_body_bytes, limits.strict_fields)
    documents = Documents(document, tokenizer_info)
    handlers = (documents.openapi, documents.page, documents.tokenizer_info)
    return [route(path, handler, operation) for (path, operation), handler in zip(own, handlers, strict=False)]


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


def _from_router(error: HTTPException) -> ApiError:
    headers: Mapping[str, str] = error.headers or {}
    if error.status_code == 405:
        return ApiError(
            405, f"This path takes {headers.get('Allow')} only.", headers={"allow": headers.get("Allow", "")}
        )
    return ApiError(error.status_code, "There is nothing at this path.", code="unknown_url")
