"""Serves ASGI apps, each on one address: one until a signal, answers in progress may then end; another beside it."""

import asyncio
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import FrameType

import structlog
import uvicorn
from starlette.types import ASGIApp

from services.gateway.http.http_protocol import BoundedHttpProtocol, PendingWrites, Shutdown

# Clients should close idle connections: where the server does, the client's next request may be on its way and is lost.
# Clients and proxies close them after 5 to 60 s.
KEEP_ALIVE_S = 75
_BESIDE_DRAIN_S = 0.2  # of a server whose answers take milliseconds

log = structlog.get_logger()


def http_config(
    app: ASGIApp, drain_timeout_s: float, stopping: Shutdown, tls: ssl.SSLContext | None = None
) -> uvicorn.Config:
    """uvicorn's settings for the gateway. drain_timeout_s: until answers in progress are cut off."""
    return uvicorn.Config(
        app,
        http=partial(BoundedHttpProtocol, pending=PendingWrites(), stopping=stopping),  # type: ignore[arg-type]  # called as a class is
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


async def serve(
    app: ASGIApp,
    listener: socket.socket,
    drain_timeout_s: float,
    on_stopping: Callable[[], object] = lambda: None,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then until answers in progress ended, at most `drain_timeout_s`.

    `on_stopping` is called between the two. tls: None: plain text.
    """
    stopping = Shutdown()
    server = _SignalledServer(http_config(app, drain_timeout_s, stopping, tls), stopping, on_stopping)
    await server.serve(sockets=[listener])


@asynccontextmanager
async def serving_beside(
    app: ASGIApp, listener: socket.socket, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Callable[[], None]]:
    """Serves until the `async with` block ends, whatever signals come; or until what it yields is called.

    tls: None: plain text.
    """
    stopping = Shutdown()
    server = _Server(http_config(app, _BESIDE_DRAIN_S, stopping, tls), stopping)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield server.stop
    finally:
        server.stop()
        await serving


class _Server(uvicorn.Server):
    """Stops when it is told to. Signals are left to others."""

    def __init__(self, config: uvicorn.Config, stopping: Shutdown) -> None:
        super().__init__(config)
        self._stopping = stopping

    def stop(self) -> None:
        """Has the server stop soon."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts no more connections, and waits until those that there are have ended."""
        self._stopping.begun = True  # also for those that are accepted, and not known yet
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


class _SignalledServer(_Server):
    """Stops at a signal, and does not raise the signal again at the end, as uvicorn does."""

    def __init__(self, config: uvicorn.Config, stopping: Shutdown, on_stopping: Callable[[], object]) -> None:
        super().__init__(config, stopping)
        self._on_stopping = on_stopping

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Lets answers in progress end at the first signal, and cuts them off at the second."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stops at the first signal, and at once at the second."""
        log.info("stopping", signal=signal.Signals(sig).name, at_once=self.should_exit)
        if self.should_exit:
            self.force_exit = True
        else:
            self.stop()
            self._on_stopping()
