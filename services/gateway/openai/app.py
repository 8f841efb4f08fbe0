"""The gateway's HTTP applications: the API's routes, and those of the admin port."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from services.config import Right
from services.gateway.api.caller import Authenticator
from services.gateway.api.dialects.chat_batch import BatchChatRequest
from services.gateway.api.dialects.completions import CompletionRequest
from services.gateway.api.dialects.embedding_inputs import EmbeddingRequest, PoolingRequest
from services.gateway.api.dialects.scoring import RerankRequest, ScoreRequest
from services.gateway.api.generation import Generator
from services.gateway.api.records.limits_left import LIMIT_HEADERS
from services.gateway.api.records.request_record import IGNORED_FIELDS, TOOLS
from services.gateway.api.requests.chat import ChatRequest
from services.gateway.api.runners import Runners
from services.gateway.http.application import Application, Gate
from services.gateway.http.limits import Limits
from services.gateway.http.operation import DescribedRoute
from services.gateway.http.root_path import RootPath
from services.gateway.http.routes import NO_PAGES, SAME_ORIGIN, Pages, described, route
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai import operations
from services.gateway.openai.chat import ChatFormat
from services.gateway.openai.chat_batch import BatchChatFormat
from services.gateway.openai.completions import CompletionFormat
from services.gateway.openai.docs_page import SCRIPT, STYLE, docs_page
from services.gateway.openai.embeddings import EmbeddingEndpoint, embedding_list, pooling_list
from services.gateway.openai.endpoint import GenerationEndpoint
from services.gateway.openai.generate import GenerateEndpoint
from services.gateway.openai.openapi import describe_api
from services.gateway.openai.pages import Documents, Models, Probes, RecentRequests
from services.gateway.openai.render import (
    RENDER_CHAT_NEUTRAL,
    RENDER_COMPLETIONS_NEUTRAL,
    RenderChatRequest,
    RenderCompletionRequest,
    RenderEndpoint,
)
from services.gateway.openai.responses.routes import response_routes
from services.gateway.openai.responses.store import ResponseStore
from services.gateway.openai.scoring import ScoringEndpoint, ranked_list, score_list
from services.gateway.openai.tokens import Tokens

# At these nobody is asked for a key: they say whether the gateway serves, and to scrapers of metrics how. A browser has
# no key to open a page with; the page of the API has a field for it.
_DOCS_PATHS = ("/openapi.json", "/docs", f"/docs/{STYLE}", f"/docs/{SCRIPT}")
OPEN_PATHS = frozenset({"/", "/health", "/ping", "/ready", *_DOCS_PATHS})
OPEN_ADMIN_PATHS = frozenset({"/health", "/metrics", "/ready"})
# Beginnings of paths.
_AT_ADMIN_PORT, _AT_API_PORT = ("/metrics", "/debug/"), ("/v1/", "/v2/", "/docs", "/openapi.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class AppParts:
    """The parts that the application is made of.

    describe_ledger: returns the JSON values that /debug/ledger shows.
    allowed_origins: of pages whose scripts may use the API from a browser.
    other_apis: the routes of other vendors' APIs.
    response_store: None keeps no responses.
    tokenizer_info: what /tokenizer_info shows; None: there is no such page.
    keys: None asks for no key.
    root_path: where a proxy shows the API; empty: at /.
    console, admin_console: the pages of the console at the API's port and at the admin port.
    port, admin_port: for those who ask at the other one.
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
    keys: Authenticator | None = None
    root_path: str = ""
    console: Pages = NO_PAGES
    admin_console: Pages = NO_PAGES
    port: int = 0
    admin_port: int = 0


def create_app(parts: AppParts) -> ASGIApp:
    """Returns the ASGI application at the API's port."""
    runners, limits, generator = parts.runners, parts.limits, parts.generator
    models, probes = Models(runners.models, generator), _probes(parts)
    tokens = Tokens(runners, limits)
    chat = _chat(parts)
    batch = GenerationEndpoint(runners, limits, BatchChatRequest, BatchChatFormat(runners.tokenizer))
    completions = GenerationEndpoint(runners, limits, CompletionRequest, CompletionFormat(runners.tokenizer))
    embeddings = EmbeddingEndpoint(runners, limits, EmbeddingRequest, embedding_list)
    pooling = EmbeddingEndpoint(runners, limits, PoolingRequest, pooling_list)
    chat_runner, completion_runner = runners.of(ChatRequest), runners.of(CompletionRequest)
    render_chat = RenderEndpoint(chat_runner, RenderChatRequest, RENDER_CHAT_NEUTRAL, limits, several=False)
    render_completions = RenderEndpoint(
        completion_runner, RenderCompletionRequest, RENDER_COMPLETIONS_NEUTRAL, limits, several=True
    )
    routes = [
        route("/v1/chat/completions", chat, operations.CHAT, "POST"),
        route("/v1/chat/completions/batch", batch, operations.CHAT_BATCH, "POST"),
        route("/v1/completions", completions, operations.COMPLETIONS, "POST"),
        route("/v1/chat/completions/render", render_chat, operations.RENDER_CHAT, "POST"),
        route("/v1/completions/render", render_completions, operations.RENDER_COMPLETIONS, "POST"),
        route("/inference/v1/generate", GenerateEndpoint(runners, limits), operations.GENERATE, "POST"),
        route("/v1/embeddings", embeddings, operations.EMBEDDINGS, "POST"),
        route("/pooling", pooling, operations.POOLING, "POST"),
        *_score_routes(parts),
        *parts.other_apis,
        *response_routes(runners, limits, parts.response_store),
        route("/v1/models", models.list, operations.MODELS),
        route("/v1/models/{model:path}", models.retrieve, operations.MODEL),
        route("/tokenize", tokens.tokenize, operations.TOKENIZE, "POST"),
        route("/detokenize", tokens.detokenize, operations.DETOKENIZE, "POST"),
        route("/version", probes.version, operations.VERSION),
        route("/load", probes.load, operations.LOAD),
        route("/", probes.health, operations.ROOT),
        route("/ping", probes.health, operations.HEALTH),
        route("/health", probes.health, operations.HEALTH),
        route("/ready", probes.ready, operations.READY),
    ]
    routes += _document_routes(routes, parts)
    routes += parts.console.routes
    admin_port = f"the admin port, {parts.admin_port}: see --admin-port"
    elsewhere = dict.fromkeys(_AT_ADMIN_PORT, admin_port)
    if not parts.console.routes:
        elsewhere["/console"] = admin_port
    gate = _gate(parts, Right.API, OPEN_PATHS, parts.console)
    router = Router(routes, redirect_slashes=False)
    pages = parts.console.beginning
    app: ASGIApp = Application(router, parts.metrics, parts.runners, gate, elsewhere, pages=pages)
    if parts.root_path:
        app = RootPath(app, parts.root_path)
    return _with_origins(app, parts.allowed_origins)


def _score_routes(parts: AppParts) -> list[Route]:
    rerank = ScoringEndpoint(parts.runners, parts.limits, RerankRequest, ranked_list)
    score = ScoringEndpoint(parts.runners, parts.limits, ScoreRequest, score_list)
    return [
        *(route(path, rerank, operations.RERANK, "POST") for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
        *(route(path, score, operations.SCORE, "POST") for path in ("/v1/score", "/score")),
    ]


def _with_origins(app: ASGIApp, allowed: Sequence[str]) -> ASGIApp:
    if not allowed:
        return app
    return CORSMiddleware(
        app,
        allow_origins=allowed,
        allow_methods=["DELETE", "GET", "POST"],
        allow_headers=["*"],
        expose_headers=[
            "server-timing",
            "x-request-id",
            "request-id",
            "metadata",
            IGNORED_FIELDS,
            TOOLS,
            *LIMIT_HEADERS,
        ],
    )


def create_admin_app(parts: AppParts) -> ASGIApp:
    """Returns the ASGI application at the admin port: what those need who run the gateway, and no client."""
    probes, requests = _probes(parts), RecentRequests(parts.runners.records)
    chat, models = _chat(parts), Models(parts.runners.models, parts.generator)
    routes = [
        route("/health", probes.health, operations.HEALTH),
        route("/ready", probes.ready, operations.READY),
        route("/metrics", probes.metrics, operations.METRICS),
        route("/debug/ledger", probes.ledger, operations.LEDGER),
        route("/debug/requests", requests.list, operations.REQUESTS),
        route("/debug/requests/{request_id:path}", requests.retrieve, operations.REQUEST),
        route(f"{SAME_ORIGIN}/v1/chat/completions", chat, operations.CHAT, "POST"),
        route(f"{SAME_ORIGIN}/v1/models", models.list, operations.MODELS),
        *parts.admin_console.routes,
    ]
    elsewhere = dict.fromkeys(_AT_API_PORT, f"the port for clients, {parts.port}: see --port")
    gate = _gate(parts, Right.ADMIN, OPEN_ADMIN_PATHS, parts.admin_console, {f"{SAME_ORIGIN}/": Right.API})
    router = Router(routes, redirect_slashes=False)
    return Application(router, parts.metrics, parts.runners, gate, elsewhere, for_clients=False)


def _gate(
    parts: AppParts, right: Right, open_paths: frozenset[str], console: Pages, second: Mapping[str, Right] | None = None
) -> Gate | None:
    if parts.keys is None:
        return None
    return Gate(parts.keys, right, open_paths | console.open_paths, console.beginning, second or {})


def _chat(parts: AppParts) -> GenerationEndpoint[ChatRequest]:
    return GenerationEndpoint(parts.runners, parts.limits, ChatRequest, ChatFormat(parts.runners.tokenizer))


def _probes(parts: AppParts) -> Probes:
    return Probes(parts.generator, parts.metrics, parts.describe_ledger)


def _document_routes(routes: Sequence[Route], parts: AppParts) -> list[Route]:
    """Returns the routes of the documents, which describe `routes` and these routes themselves."""
    limits, page = parts.limits, docs_page()
    own = {"/openapi.json": operations.OPENAPI, "/docs": operations.DOCS}
    if page.files:
        own |= {f"/docs/{STYLE}": operations.DOCS_STYLE, f"/docs/{SCRIPT}": operations.DOCS_SCRIPT}
    if parts.tokenizer_info is not None:
        own["/tokenizer_info"] = operations.TOKENIZER_INFO
    all_routes = [*described(routes), *(DescribedRoute(path, "GET", operation) for path, operation in own.items())]
    # A stranger is not told which model there is.
    open_paths, name = (None, parts.runners.models.default.name) if parts.keys is None else (OPEN_PATHS, "MODEL")
    document = describe_api(all_routes, limits.max_body_bytes, limits.strict_fields, open_paths, name, parts.root_path)
    documents = Documents(document, page, parts.tokenizer_info)
    handlers = {
        "/openapi.json": documents.openapi,
        "/docs": documents.page,
        f"/docs/{STYLE}": documents.style,
        f"/docs/{SCRIPT}": documents.script,
        "/tokenizer_info": documents.tokenizer_info,
    }
    return [route(path, handlers[path], operation) for path, operation in own.items()]
