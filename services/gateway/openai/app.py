"""The gateway's HTTP application: routes, one log line and one count for every request, and errors as envelopes."""

import time
from collections.abc import Awaitable, Callable, Mapping
from time import monotonic

import structlog
from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.generation import Generator
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai.chat import ChatDialect
from services.gateway.openai.completions import CompletionDialect
from services.gateway.openai.endpoint import GenerationEndpoint, Limits, ServedModel
from services.gateway.openai.errors import ApiError, internal_error
from services.gateway.openai.exchange import STATUS_CLIENT_GONE, ClientGone, Exchange
from services.gateway.openai.pages import Models, Probes
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.model_dir import ModelInfo

DEFAULT_MAX_BODY_BYTES = 8 << 20

Handler = Callable[[Exchange], Awaitable[None]]


def create_app(
    *,
    model: ModelInfo,
    served_model_name: str,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    generator: Generator,
    metrics: GatewayMetrics,
    describe_ledger: Callable[[], object],
    request_timeout_s: float,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
) -> ASGIApp:
    """An ASGI application. `describe_ledger` returns what /debug/ledger shows, in plain JSON values."""
    served = ServedModel(
        name=served_model_name, vocab_size=model.vocab_size, defaults=model.generation, created=int(time.time())
    )
    limits = Limits(request_timeout_s=request_timeout_s, max_body_bytes=max_body_bytes)
    chat, completions = ChatDialect(tokenizer, chat_template), CompletionDialect(tokenizer)
    models, probes = Models(served, generator), Probes(generator, metrics, describe_ledger)
    routes = [
        _route("/v1/chat/completions", GenerationEndpoint(chat, served, tokenizer, generator, metrics, limits), "POST"),
        _route(
            "/v1/completions", GenerationEndpoint(completions, served, tokenizer, generator, metrics, limits), "POST"
        ),
        _route("/v1/models", models.list),
        _route("/v1/models/{model:path}", models.retrieve),
        _route("/health", probes.health),
        _route("/ready", probes.ready),
        _route("/metrics", probes.metrics),
        _route("/debug/ledger", probes.ledger),
    ]
    return Application(Router(routes, redirect_slashes=False), metrics)


class Application:
    """Gives every HTTP request its Exchange, and takes care of how it ends."""

    def __init__(self, router: Router, metrics: GatewayMetrics) -> None:
        self._router = router
        self._metrics = metrics
        self._log = structlog.get_logger()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        # With an app in its scope the router raises for what it does not know, instead of answering in plain text.
        inner = {**scope, "app": self, "exchange": exchange}
        with structlog.contextvars.bound_contextvars(request_id=exchange.request_id):
            self._metrics.in_flight.inc()
            try:
                await self._answer(exchange, self._router(inner, receive, send))
            finally:
                self._metrics.in_flight.dec()
                self._note_end(exchange)

    async def _answer(self, exchange: Exchange, handling: Awaitable[None]) -> None:
        try:
            await handling
        except ClientGone:
            exchange.record.status = STATUS_CLIENT_GONE
        except ApiError as error:
            if error.status >= 500 and exchange.record.endpoint in _GENERATING:
                self._log.warning("request failed", reason=str(error.__cause__ or error.message))
            await exchange.fail(error)
        except HTTPException as error:
            await exchange.fail(_from_router(error))
        except Exception:
            self._log.exception("request failed")
            await exchange.fail(internal_error())

    def _note_end(self, exchange: Exchange) -> None:
        record = exchange.record
        self._metrics.requests.labels(record.endpoint, str(record.status)).inc()
        if record.endpoint not in _GENERATING:
            return
        self._log.info(
            "request",
            endpoint=record.endpoint,
            status=record.status,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            generated_tokens=record.generated_tokens,
            finish_reason=record.finish_reason,
            ttft_s=None if record.ttft_s is None else round(record.ttft_s, 6),
            duration_s=round(monotonic() - exchange.arrived, 6),
        )


_GENERATING = frozenset({ChatDialect.endpoint, CompletionDialect.endpoint})


class _Endpoint:
    """A handler as the router calls it."""

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
