"""A server of OpenAI's API in this process, whose pace is known, and which notes what it was asked."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class BenchServer:
    """Streams one event a token. What it was asked is in `bodies`, when in `times_s`, by perf_counter.

    status: of all answers; refuses: statuses of answers, by the number of the request; text: of each token; usage:
    whether it counts tokens; role_first: whether a chat begins with an event that has no token; open, most_open:
    requests at a time. other_metrics: at /metrics, instead of a Baton's; metrics_end: after so many requests there are
    none.
    """

    url: str = ""
    first_s: float = 0.0
    gap_s: float = 0.0
    text: str = "word "
    usage: bool = True
    role_first: bool = False
    status: int = 200
    refuses: Mapping[int, int] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    metrics_keys: list[str | None] = field(default_factory=list)
    metrics_end: int = 1 << 30
    other_metrics: bytes | None = None
    open: int = 0
    most_open: int = 0

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.paths.append(request.url.path)
        self.keys.append(request.headers.get("authorization"))
        self.times_s.append(time.perf_counter())
        if (status := self.refuses.get(len(self.bodies) - 1, self.status)) != 200:
            return JSONResponse({"error": {"message": f"no: {body.get('prompt') or body.get('messages')}"}}, status)
        events = self.events(body, is_chat="messages" in body)
        return StreamingResponse(events, media_type="text/event-stream")

    async def events(self, body: dict[str, Any], is_chat: bool) -> AsyncIterator[str]:
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        try:
            if self.role_first:
                yield self._event({"delta": {"role": "assistant", "content": ""}})
            await asyncio.sleep(self.first_s)
            tokens = body["max_tokens"]
            for number in range(tokens):
                if number:
                    await asyncio.sleep(self.gap_s)
                event = self._event({"delta": {"content": self.text}} if is_chat else {"text": self.text})
                yield event[:9]  # an event may come in two chunks
                yield event[9:]
            if self.usage:
                usage = {"completion_tokens": tokens, "prompt_tokens": 11}
                yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.open -= 1

    def _event(self, choice: dict[str, Any]) -> str:
        return f"data: {json.dumps({'choices': [{'index': 0, 'finish_reason': None, **choice}]})}\n\n"

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "the-model", "owned_by": "somebody"}]})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": "1.2.3"})

    async def metrics(self, request: Request) -> Response:
        count = len(self.bodies)
        self.metrics_keys.append(request.headers.get("authorization"))
        if self.other_metrics is not None:
            return Response(self.other_metrics)
        if count >= self.metrics_end:
            return PlainTextResponse("gone", 503)
        return PlainTextResponse(
            f'# TYPE baton_handoffs_total counter\nbaton_handoffs_total{{outcome="completed"}} {count}\n'
            f"# TYPE baton_kv_bytes_moved_total counter\nbaton_kv_bytes_moved_total {1000 * count}\n"
        )

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self.generate, methods=["POST"]),
                Route("/v1/chat/completions", self.generate, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/version", self.version),
                Route("/metrics", self.metrics),
            ]
        )


AnyServer = TypeVar("AnyServer", bound=BenchServer)


@contextmanager
def serving(server: AnyServer) -> Iterator[AnyServer]:
    """The server, at its `url`, while the block runs."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        server.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = uvicorn.Config(server.app(), log_level="error", timeout_graceful_shutdown=1, loop="asyncio")
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, args=([listening],))
        thread.start()
        try:
            yield server
        finally:
            running.should_exit = True
            thread.join()
