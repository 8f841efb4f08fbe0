"""GET /console, its files, /console/about, /console/feed, /console/requests/{request_id}."""

import asyncio
import math
import os
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import orjson

from services.config import Right
from services.gateway.api.caller import Authenticator
from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.records.owners_record import describe_to_owner
from services.gateway.api.records.request_records import KEPT, describe_request
from services.gateway.api.records.request_rows import KEPT_ROWS
from services.gateway.console.feed import Feed
from services.gateway.console.listener import Listener
from services.gateway.console.server_events import event
from services.gateway.console.sources import Sources
from services.gateway.console.static_files import (
    INDEX,
    INSTALL,
    PLOTLY,
    POLICY,
    StaticFile,
    etag_of,
    kind_of,
    plotly_file,
    static_files,
)
from services.gateway.console.view import View, view_of
from services.gateway.http.exchange import ClientGone, Exchange

SLOW_S = 20.0  # for a client to take what is written to it
PLOTLY_S = 3600  # for which a browser keeps plotly without asking again
_MAX_DIGITS = 15  # of a request's number
PIECE_BYTES = 64 << 10
GONE_S = 1.0  # for the server to hear that a connection is closed
FEED_S = 24 * 3600.0  # of one stream; consoles then begin another one

_HEADERS = {"content-security-policy": POLICY, "cache-control": "no-cache", "referrer-policy": "no-referrer"}


class Files:
    """The files that browsers load. They hold nothing of the gateway, and nobody is asked for a key."""

    def __init__(self) -> None:
        self._files = static_files()
        self._plotly = plotly_file()
        self._plotly_etag = "" if self._plotly is None else etag_of(self._plotly)

    @property
    def has_plotly(self) -> bool:
        """True where plotly is installed."""
        return self._plotly is not None

    @property
    def paths(self) -> frozenset[str]:
        """All paths at which there is a file, or where one would be."""
        return frozenset(["/console", "/console/", *(f"/console/{name}" for name in (*self._files, PLOTLY))])

    async def redirect(self, exchange: Exchange) -> None:
        """Sends browsers to the page's own path, below which its files are, whatever a proxy puts before it."""
        await exchange.respond(307, b"", headers={"location": "console/"})

    async def index(self, exchange: Exchange) -> None:
        """Sends the page."""
        await self._send(exchange, self._find(INDEX))

    async def file(self, exchange: Exchange) -> None:
        """Sends a file. Raises ApiError."""
        name = exchange.path_params["file"]
        await (self._send_plotly(exchange) if name == PLOTLY else self._send(exchange, self._find(name)))

    def _find(self, name: str) -> StaticFile:
        if (found := self._files.get(name)) is None:
            raise ApiError(404, "The console has no such file.", code="unknown_url")
        return found

    async def _send_plotly(self, exchange: Exchange) -> None:
        if self._plotly is None:
            message = f"Charts need plotly, which is not installed where the gateway runs: {INSTALL}."
            raise ApiError(404, message, code="not_installed")
        headers = {**_HEADERS, "etag": self._plotly_etag, "cache-control": f"max-age={PLOTLY_S}"}
        if exchange.header("if-none-match") == self._plotly_etag:
            await exchange.respond(304, b"", kind_of(PLOTLY), headers)
            return
        content = await asyncio.to_thread(self._plotly.read_bytes)
        await exchange.respond(200, content, kind_of(PLOTLY), headers)

    async def _send(self, exchange: Exchange, file: StaticFile) -> None:
        headers = {**_HEADERS, "etag": file.etag}
        if exchange.header("if-none-match") == file.etag:
            await exchange.respond(304, b"", file.kind, headers)
        else:
            await exchange.respond(200, file.content, file.kind, headers)


class ConsolePages:
    """Answers what consoles ask for at one port.

    keys, right: those that open this port; keys: None asks for none. api: the path of the API, from /console/.
    leaves_early: streams must not hold up the end of this port's server.
    """

    def __init__(
        self,
        sources: Sources,
        feed: Feed,
        *,
        has_plotly: bool,
        api: str,
        leaves_early: bool,
        keys: Authenticator | None = None,
        right: Right | None = None,
    ) -> None:
        self._sources = sources
        self._feed = feed
        self._version = version("baton-serve")  # is read from files
        self._has_plotly = has_plotly
        self._api = api
        self._leaves_early = leaves_early
        self._keys = keys
        self._right = right

    async def about(self, exchange: Exchange) -> None:
        """Sends what a console is to know first. Raises ApiError."""
        await exchange.respond(200, orjson.dumps(self._about(exchange)))

    async def request(self, exchange: Exchange) -> None:
        """Sends all that is known of one request, which the caller may see. Raises ApiError."""
        view, request_id = view_of(exchange.caller), exchange.path_params["request_id"]
        record = self._sources.records.search(request_id, _number_of(exchange), view.key_id)
        if record is None:
            raise ApiError(404, f"None of the last {KEPT} requests has this id.", code="unknown_request")
        described = describe_request(record) if view.sees_all else describe_to_owner(record)
        if record.running is not None:
            described["generated_tokens"] = record.running.num_generated
        await exchange.respond(200, orjson.dumps(described))

    async def listen(self, exchange: Exchange) -> None:
        """Sends the feed until the client leaves, or the stream is to end. Raises ApiError, ClientGone."""
        view = view_of(exchange.caller)
        listener = Listener(exchange.stream, view, lambda: self._is_valid(exchange, view), self._leaves_early)
        with self._feed.listening(listener):
            await exchange.start_events()
            async with exchange.while_connected(2 * FEED_S):
                why = await self._serve(exchange, listener)
            await _in_time(exchange, lambda: exchange.end_events(event("end", {"why": why})))

    async def _serve(self, exchange: Exchange, listener: Listener) -> str:
        """Sends a listener what it lacks, whenever it is behind. Returns why its stream is to end."""
        over = asyncio.get_running_loop().call_later(FEED_S, listener.end, "begin another stream")
        try:
            while listener.why_over is None:
                for part in self._feed.next_parts(listener, lambda: self._about(exchange)):
                    await _write(exchange, part)
                await listener.until_behind()
            return listener.why_over
        finally:
            over.cancel()

    def _about(self, exchange: Exchange) -> dict[str, Any]:
        sources, view = self._sources, view_of(exchange.caller)
        process = {"gateway": sources.dispatch.gateway_id(), "pid": os.getpid()} if view.sees_all else {}
        return {
            "version": self._version,
            **process,
            "models": list(sources.model_names),
            "sees": "all" if view.sees_all else "own",
            "key_id": exchange.caller.key_id,
            "has_plotly": self._has_plotly,
            "api": self._api,
            "text": sources.keeps_text,
            "kept_requests": KEPT_ROWS,
            "kept_records": KEPT,
            "slo": {"ttft_s": sources.ttft_slo_s},
        }

    def _is_valid(self, exchange: Exchange, view: View) -> bool:
        """True while the caller's key still opens this port and sees the same."""
        if self._keys is None:
            return True
        try:
            return view_of(self._keys.caller(exchange.header, self._right)) == view
        except ApiError:
            return False


def _number_of(exchange: Exchange) -> int | None:
    values = exchange.query().get("n", [])
    if not values:
        return None
    if not values[0].isascii() or not values[0].isdigit() or len(values[0]) > _MAX_DIGITS:
        raise invalid("'n' is the number of a request.", "n")
    return int(values[0])


async def _write(exchange: Exchange, events: bytes) -> None:
    """Writes events piece by piece, and waits for a client that is slow. Raises ClientGone; see `_in_time`."""
    for first in range(0, len(events), PIECE_BYTES):
        piece = events[first : first + PIECE_BYTES]
        await _in_time(exchange, partial(exchange.write, piece))


async def _in_time(exchange: Exchange, send: Callable[[], Awaitable[None]]) -> None:
    """Sends what waits for the client to read. One that has read nothing in SLOW_S is cut off: ClientGone."""
    left, before = exchange.stream.unwritten(), math.inf
    while left < before:
        try:
            async with asyncio.timeout(SLOW_S):
                await send()
                return
        except TimeoutError:
            left, before = exchange.stream.unwritten(), left
    exchange.stream.abort()
    async with exchange.while_connected(GONE_S):  # an answer that ends before the server knows is a defect in its log
        await asyncio.Event().wait()
    raise ClientGone
