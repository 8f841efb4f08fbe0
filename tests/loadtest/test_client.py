"""The client against a real HTTP server that answers like an OpenAI server, well or badly."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from loadtest.__main__ import main


@dataclass
class FakeServer:
    """Streams one event a token; what it was asked is in `bodies`."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    stall: bool = False

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return JSONResponse({"error": {"message": "too busy"}}, self.status)
        return StreamingResponse(self.events(body["max_tokens"]), media_type="text/event-stream")

    async def events(self, tokens: int) -> AsyncIterator[str]:
        for _ in range(tokens):
            await asyncio.sleep(60 if self.stall else 0)
            event = json.dumps({"choices": [{"index": 0, "text": "é\n"}]})
            yield f"data: {event[:9]}"  # an event may come in two chunks
            yield f"{event[9:]}\n\n"
        yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': tokens}})}\n\n"
        yield "data: [DONE]\n\n"

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "the-model"}]})

    async def metrics(self, request: Request) -> Response:
        moved = 1000 * len(self.bodies)
        return PlainTextResponse(
            f'# TYPE baton_handoffs_total counter\nbaton_handoffs_total{{outcome="completed"}} {len(self.bodies)}\n'
            f"# TYPE baton_kv_bytes_moved_total counter\nbaton_kv_bytes_moved_total {moved}\n"
        )

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/metrics", self.metrics),
            ]
        )


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    listening = socket.create_server(("127.0.0.1", 0))
    fake.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    config = uvicorn.Config(fake.app(), log_level="error", timeout_graceful_shutdown=1, loop="asyncio")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, args=([listening],))
    thread.start()
    yield fake
    running.should_exit = True
    thread.join()
    listening.close()


def run(server: FakeServer, *arguments: str) -> int:
    return main(
        ["--url", server.url, "--admin-url", server.url, "--requests", "5", "--input", "7", "--output", "3", *arguments]
    )


def test_it_asks_for_what_was_said_and_reports_every_token(server: FakeServer, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    assert run(server, "--warmup", "2", "--json", str(result)) == 0
    assert len(server.bodies) == 7
    for body in server.bodies:
        assert body["model"] == "the-model"
        assert len(body["prompt"]) == 7
        assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (3, 0, True)
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 7
    numbers = json.loads(result.read_text())
    assert (numbers["requests"], numbers["failed"], numbers["output_tokens"]) == (5, 0, 15)
    assert numbers["ttft_ms"]["p50"] > 0
    assert numbers["handed_off"] == 1.0
    assert numbers["kv_bytes_moved"] == 5000  # without those of the warm-up


def test_the_same_seed_asks_the_same(server: FakeServer) -> None:
    for seed in ("1", "1", "2"):
        run(server, "--warmup", "0", "--seed", seed)
    prompts = [sorted(tuple(body["prompt"]) for body in server.bodies[at : at + 5]) for at in (0, 5, 10)]
    assert prompts[0] == prompts[1] != prompts[2]


def test_errors_are_told_and_counted(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.status = 503
    assert run(server) == 1
    assert "5 failed" in (text := capsys.readouterr().out)
    assert "status 503" in text
    assert "too busy" in text


def test_it_ends_by_itself_when_the_server_does_not(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.stall = True
    assert run(server, "--timeout", "0.3", "--warmup", "0") == 1
    assert "not finished after 0.3 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "url", ["http://192.0.2.1:8000", "https://192.0.2.1:8000", "http://example.org", "ftp://127.0.0.1", "nonsense"]
)
def test_load_is_for_this_machine_only(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", url]) == 2
    assert capsys.readouterr().err.startswith(f"loadtest: {url}: ")


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.startswith("loadtest: 127.0.0.1:1: ")
