"""Serves an ASGI app at a socket until it is told to stop; answers in progress may then end."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from services.gateway.http.http_protocol import BoundedHttpProtocol, PendingWrites, Shutdown, TlsClients

# Clients should close idle connections: where the server does, the client's next request may be on its way and is lost.
# Clients and proxies close them after 5 to 60 s.
KEEP_ALIVE_S = 75
_UNTOLD_DRAIN_S = 0.2  # of a server that is left without a word, as when the process fails


def http_config(
    app: ASGIApp, drain_timeout_s: float, stopping: Shutdown, tls: ssl.SSLContext | None = None
) -> uvicorn.Config:
    """uvicorn's settings for the gateway. drain_timeout_s: until answers in progress are cut off."""
    return uvicorn.Config(
        app,
        http=partial(BoundedHttpProtocol, pending=PendingWrites(), stopping=stopping, tls_clients=TlsClients()),  # type: ignore[arg-type]  # called as a class is
        loop="none",  # there is one already
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,  # the process has configured logging
        log_level="warning",
        timeout_graceful_shutdown=drain_timeout_s,  # type: ignore[arg-type]  # is given to asyncio as it is
        timeout_keep_alive=KEEP_ALIVE_S,
        server_header=False,
        proxy_headers=False,  # nothing here asks for the client's address
        ssl_context_factory=None if tls is None else lambda _config, _default: tls,
    )


@asynccontextmanager
async def serving(
    app: ASGIApp, listener: socket.socket, tls: ssl.SSLContext | None = None
) -> AsyncIterator["HttpServer"]:
    """Serves until the `async with` block ends, or until the server is stopped in it. tls: None: plain text."""
    stopping = Shutdown()
    server = HttpServer(http_config(app, _UNTOLD_DRAIN_S, stopping, tls), stopping)
    server.begin(listener)
    try:
        yield server
    finally:
        await server.stop(_UNTOLD_DRAIN_S)


class HttpServer(uvicorn.Server):
    """Serves at one socket from `begin` to `stop`."""

    def __init__(self, config: uvicorn.Config, stopping: Shutdown) -> None:
        super().__init__(config)
        self._stopping = stopping

    def begin(self, listener: socket.socket) -> None:
        """Serves from now on."""
        self._serving = asyncio.create_task(self.serve(sockets=[listener]))

    async def stop(self, within_s: float) -> None:
        """Accepts no more connections; returns when answers have ended, which are cut off after so many seconds.

        A further call returns when the first one does; with 0 it cuts answers off.
        """
        if self.should_exit:
            self.force_exit = self.force_exit or within_s == 0
        else:
            self.config.timeout_graceful_shutdown = within_s  # type: ignore[assignment]  # is given to asyncio as it is
            self.should_exit = True
        await asyncio.shield(self._serving)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts no more connections, and waits until those that there are have ended."""
        self._stopping.begun = True  # also for those that are accepted, and not known yet
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield
