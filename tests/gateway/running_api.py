"""The API side behind a real HTTP server, over a scripted generator."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx2
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp
from structlog.contextvars import merge_contextvars
from structlog.processors import format_exc_info
from structlog.testing import capture_logs

from services.config import Pooling
from services.gateway.anthropic_api.routes import messages_routes
from services.gateway.api.caller import Authenticator
from services.gateway.api.dialects.chat_answers import ChatModel
from services.gateway.api.requests.request_defaults import RequestDefaults
from services.gateway.api.runners import make_runners
from services.gateway.api.served_models import ServedModel, ServedModels
from services.gateway.cohere_api.routes import cohere_routes
from services.gateway.console.feed import Feed
from services.gateway.console.routes import make_console
from services.gateway.console.sources import Sources
from services.gateway.grpc_api.server import GrpcServer
from services.gateway.grpc_api.servicer import InferenceServicer
from services.gateway.http.http_protocol import Shutdown, plain_http_answer
from services.gateway.http.limits import Limits
from services.gateway.http.serving import http_config
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai.app import AppParts, create_admin_app, create_app
from services.gateway.openai.responses.store import ResponseStore
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.model_output.forms import find_forms
from services.gateway.text.tokenizer import Tokenizer
from services.process.supervised import supervised
from services.protocol.model_files.cross_encoder import CrossEncoder
from services.protocol.model_files.info import GenerationDefaults, ModelInfo
from services.protocol.model_files.text_preparation import UNCHANGED, TextPreparation
from services.tls.contexts import server_context
from services.tls.files import CertificateFiles
from tests.gateway.console.scripted_fleet import ScriptedFleet
from tests.gateway.scripted_generator import Script, ScriptedGenerator, one_delta
from tests.gateway.tokenizer_files import CHATML, byte_level

MODEL = "m"
MAX_BODY_BYTES = 1 << 20


@dataclass
class Api:
    """A running gateway. `base_url` has no /v1. admin: a client of its admin port.

    applications: at the port for HTTP, and at the admin port. feed, fleet: the console's, and what it shows.
    """

    base_url: str
    generator: ScriptedGenerator
    tokenizer: Tokenizer
    http: httpx2.AsyncClient
    admin: httpx2.AsyncClient
    port: int
    logs: list[MutableMapping[str, Any]]
    start_grpc: Callable[[], Awaitable[int]]  # returns the port; the server ends with the rest
    applications: tuple[ASGIApp, ASGIApp]
    feed: Feed
    fleet: ScriptedFleet

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.backend.encode(text, add_special_tokens=False).ids

    async def chat(self, **fields: Any) -> httpx2.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx2.Response:
        return await self.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hi", **fields})


@asynccontextmanager
async def running_api(
    *,
    template: str | None = CHATML,
    response_template: object | None = None,
    defaults: GenerationDefaults | None = None,
    request_timeout_s: float = 300.0,
    strict_fields: bool = False,
    allowed_origins: tuple[str, ...] = (),
    tokenizer_info: dict[str, Any] | None = None,
    response_store: ResponseStore | None = None,
    trusts_templates: bool = False,
    tool_template: str | None = None,
    keys: Authenticator | None = None,
    tls: CertificateFiles | None = None,
    names: str = MODEL,
    aliases: Sequence[str] = (),
    adapters: Sequence[str] = (),
    request_defaults: RequestDefaults | None = None,
    root_path: str = "",
    max_logprobs: int = 20,
    keeps_text: bool = False,
    generates: bool = True,
    normalizes: bool = True,
    texts: TextPreparation = UNCHANGED,
    cross_encoder: CrossEncoder | None = None,
    special_tokens: Sequence[str] = (),
) -> AsyncIterator[Api]:
    """A gateway on a free port of loopback. tls: `http` is then a client that trusts nobody.

    adapters: names of further models, each the first one with the adapter of that name. special_tokens: of the
    tokenizer, further ones.
    """
    backend = byte_level()
    backend.add_special_tokens(list(special_tokens))
    tokenizer = Tokenizer(backend, {"bos_token": "<|bos|>"})
    generator = ScriptedGenerator(Script(one_delta(tokenizer.backend.encode("Hello", add_special_tokens=False).ids)))
    metrics = GatewayMetrics(CollectorRegistry())
    model = ModelInfo(tokenizer.vocab_size, 4096, defaults or GenerationDefaults(), max_logprobs=max_logprobs)
    pooling = Pooling.LAST if cross_encoder is None else cross_encoder.pooling
    model = replace(model, generates=generates, normalizes=normalizes, pooling=pooling, cross_encoder=cross_encoder)
    model = replace(model, texts=texts)
    chat_template = None
    if template is not None:
        chat_template = ChatTemplate(
            template, tokenizer.special_tokens, replaceable=trusts_templates, tool_use=tool_template
        )
    chat_model = ChatModel(chat_template, find_forms(response_template, template, tool_template=tool_template))
    models = ServedModels.of(model, names, aliases)
    adapted = {name: ServedModel(name, models.default.base, name) for name in adapters}
    models = replace(models, by_name={**models.by_name, **adapted})
    runners = make_runners(models, tokenizer, chat_model, generator, metrics, keeps_text=keeps_text)
    fleet = ScriptedFleet()
    sources = Sources(
        dispatch=fleet, records=runners.records, metrics=metrics, model_names=(MODEL,), keeps_text=keeps_text
    )
    console = make_console(sources, keys)
    limits = Limits(
        request_timeout_s=request_timeout_s,
        max_body_bytes=MAX_BODY_BYTES,
        strict_fields=strict_fields,
        defaults=request_defaults or RequestDefaults(),
    )
    parts = AppParts(
        runners=runners,
        generator=generator,
        metrics=metrics,
        describe_ledger=lambda: {"rows": []},
        limits=limits,
        allowed_origins=allowed_origins,
        other_apis=[*messages_routes(runners, limits), *cohere_routes(runners, limits)],
        response_store=response_store,
        tokenizer_info=tokenizer_info,
        keys=keys,
        root_path=root_path,
        console=console.at_api,
        admin_console=console.at_admin,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)  # a client that does not read is noticed soon
    port = listener.getsockname()[1]
    base_url = f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
    admin_listener = socket.create_server(("127.0.0.1", 0))
    admin_url = f"http://127.0.0.1:{admin_listener.getsockname()[1]}"
    parts = replace(parts, port=port, admin_port=admin_listener.getsockname()[1])
    app, admin_app = create_app(parts), create_admin_app(parts)
    grpc_servers: list[GrpcServer] = []

    async def start_grpc() -> int:
        servicer = InferenceServicer(runners, metrics, request_timeout_s, strict_fields=strict_fields, keys=keys)
        grpc_servers.append(GrpcServer(servicer, generator, runners.side, MAX_BODY_BYTES, keys=keys, tls=tls))
        return await grpc_servers[-1].start("127.0.0.1", 0)

    members = (runners.processes.run(), supervised("the feed", console.feed.run))
    beside = [asyncio.create_task(each) for each in members]
    try:
        with capture_logs(processors=[merge_contextvars, format_exc_info]) as logs:
            async with (
                _serving(app, listener, None if tls is None else server_context(tls, plain_http_answer())),
                _serving(admin_app, admin_listener),
                # Where it verifies, a client reads all authorities of this machine, which takes longer than most tests.
                httpx2.AsyncClient(base_url=base_url, timeout=120, verify=tls is not None) as http,
                httpx2.AsyncClient(base_url=admin_url, timeout=120, verify=False) as admin,
            ):
                both = (app, admin_app)
                yield Api(
                    base_url, generator, tokenizer, http, admin, port, logs, start_grpc, both, console.feed, fleet
                )
            for line in logs:
                print(line.get("exception", ""), end="")  # pytest shows it where a test fails
    finally:
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)
        for grpc_server in grpc_servers:
            await grpc_server.stop(0)
        listener.close()
        admin_listener.close()


class _Server(uvicorn.Server):
    """Ends as soon as its clients are gone: uvicorn looks ten times a second, which is longer than most tests take."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.told = asyncio.Event()

    async def main_loop(self) -> None:
        """Ticks until it is told to stop."""
        ticking = asyncio.create_task(super().main_loop())
        await self.told.wait()
        ticking.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Does as uvicorn does where a client or an answer is left."""
        for _ in range(20):  # turns of the loop, in which it hears that clients are gone
            await asyncio.sleep(0)
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
        for server in self.servers:
            server.close()


@asynccontextmanager
async def _serving(app: ASGIApp, listener: socket.socket, tls: ssl.SSLContext | None = None) -> AsyncIterator[None]:
    server = _Server(http_config(app, 5, Shutdown(), tls))  # a test that failed may have left a client behind
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.told.set()
        await serving


def post_bytes(path: str, fields: dict[str, Any]) -> bytes:
    """A request as it goes over the wire, for clients that misbehave."""
    body = json.dumps({"model": MODEL, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def events(response: httpx2.Response) -> list[Any]:
    """The data of each server-sent event; the last one may be "[DONE]"."""
    found = []
    for block in response.text.split("\n\n")[:-1]:
        assert block.startswith("data: ")
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found
