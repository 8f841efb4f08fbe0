"""Serves an ASGI app on one address until a signal says stop; answers in progress may then end."""

import asyncio
import errno
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import structlog
import uvicorn
from starlette.types import ASGIApp

from services.gateway.openai.http_protocol import BoundedHttpProtocol, PendingWrites

# After the first signal, how long answers in progress may take to end.
DRAIN_S = 30
# Idle connections are for clients to close: one that we close may just be getting the client's next request, which is
# then lost. Clients and proxies let go after 5 to 60 s.
KEEP_ALIVE_S = 75
BACKLOG = 2048

log = structlog.get_logger()


class ListenError(Exception):
    """The address cannot be listened on: one line for the person who named it."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ListenError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        why = "is in use already" if error.errno == errno.EADDRINUSE else f"cannot be listened on: {error.strerror}"
        raise ListenError(f"{host}:{port} {why}") from error


def http_config(app: ASGIApp) -> uvicorn.Config:
    """How the gateway speaks HTTP."""
    return uvicorn.Config(
        app,
        http=partial(BoundedHttpProtocol, pending=PendingWrites()),  # type: ignore[arg-type]  # called as a class is
        loop="none",  # there is one already
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,  # the process has configured logging
        log_level="warning",
        timeout_graceful_shutdown=DRAIN_S,
        timeout_keep_alive=KEEP_ALIVE_S,
        server_header=False,
        proxy_headers=False,  # nothing here asks for the client's address
    )


async def serve(app: ASGIApp, listener: socket.socket, on_stopping: Callable[[], object] = lambda: None) -> None:
    """Answers HTTP until SIGTERM or SIGINT, then until answers in progress ended, at most DRAIN_S.

    `on_stopping` is called between the two.
    """
    server = _Server(http_config(app), on_stopping)
    await server.serve(sockets=[listener])


class _Server(uvicorn.Server):
    """Stops when told by a signal, and leaves it at that: uvicorn would raise the signal again at the end."""

    def __init__(self, config: uvicorn.Config, on_stopping: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_stopping = on_stopping

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first signal lets answers in progress end, a second one does not wait for them."""
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
        """See capture_signals."""
        log.info("stopping", signal=signal.Signals(sig).name, at_once=self.should_exit)
        if self.should_exit:
            self.force_exit = True
        else:
            self.should_exit = True
            self._on_stopping()
