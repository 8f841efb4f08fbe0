"""HTTP as uvicorn parses it, with a bound on how long a request's head may take and with the API's words for errors.

Without the bound a connection that says nothing, or a byte now and then, stays open for ever. Beyond ASGI, an
application may write to a stream that it has begun without waiting (`STREAM_WRITER`).
"""

import asyncio
import weakref
from typing import Any

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.gateway.api.errors import invalid

HEAD_TIMEOUT_S = 20.0

log = structlog.get_logger()

STREAM_WRITER = "baton.stream_writer"  # in the scope's extensions: a StreamWriter


class PendingWrites:
    """Connections with something to write, until this turn of the loop is over.

    A frame brings tokens for many streams. Written one after the other, between the work on each, every write would
    wake a client that had fallen asleep again: measured, that made a write cost twice as much.
    """

    def __init__(self) -> None:
        self._connections: list[GatheringTransport] = []

    def add(self, connection: "GatheringTransport") -> None:
        """Has its `flush` called soon."""
        if not self._connections:
            asyncio.get_running_loop().call_soon(self._flush)
        self._connections.append(connection)

    def _flush(self) -> None:
        connections, self._connections = self._connections, []
        for connection in connections:
            try:
                connection.flush()
            except Exception:  # must not keep the others from being written
                log.exception("a connection could not be written to")


class GatheringTransport:
    """A transport that sends what is written to it in one turn of the loop as one: a head and first events.

    What else a transport can do passes by what is still unwritten; uvicorn asks for nothing of the kind.
    lost: the connection; nothing is written any more.
    """

    __slots__ = ("_pending", "_transport", "_unwritten", "lost")

    def __init__(self, transport: asyncio.Transport, pending: PendingWrites) -> None:
        self._transport = transport
        self._pending = pending
        self._unwritten: list[bytes] = []
        self.lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """See asyncio.WriteTransport."""
        if not self._unwritten:
            self._pending.add(self)
        self._unwritten.append(data)

    def write_chunk(self, body: bytes) -> None:
        """The same, in HTTP's chunked encoding."""
        if not self._unwritten:
            self._pending.add(self)
        self._unwritten.append(b"%x\r\n%b\r\n" % (len(body), body))

    def flush(self) -> None:
        """What was written goes out."""
        data = b"".join(self._unwritten)
        self._unwritten.clear()
        if data and not self.lost:
            self._transport.write(data)

    def close(self) -> None:
        """See asyncio.BaseTransport."""
        self.flush()
        self._transport.close()


class StreamWriter:
    """Writes to one answer that has begun. What ASGI's `send` does, without a coroutine for each piece.

    write: some of the body, where it is ready.
    """

    def __init__(self, cycle: RequestResponseCycle, connection: GatheringTransport) -> None:
        self._cycle = weakref.ref(cycle)  # whose scope holds this
        self.write = connection.write_chunk

    def ready(self) -> bool:
        """False: the client has not read enough of what came before, or the answer is none of that kind."""
        cycle = self._cycle()
        if cycle is None or cycle.flow.write_paused:
            return False
        return bool(cycle.chunked_encoding) and not cycle.response_complete


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. The time runs from when it is made, and from the first byte of each further request."""

    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, pending: PendingWrites, **kwargs: Any) -> None:
        """`pending`: of all connections. The rest is uvicorn's."""
        super().__init__(*args, **kwargs)
        self._pending = pending

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base class
        """See asyncio.Protocol."""
        self._connection = GatheringTransport(transport, self._pending)
        super().connection_made(self._connection)  # type: ignore[arg-type]  # as good as one
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._connection.lost = True
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request's first byte."""
        super().on_message_begin()
        if self._head_timer is None:
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        """A request's head is there."""
        self._stop_waiting()
        super().on_headers_complete()
        self.scope["extensions"] = {STREAM_WRITER: StreamWriter(self.cycle, self._connection)}  # type: ignore[dict-item]  # our own

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP, and lets go of whoever sent it."""
        body = invalid(msg, None).envelope()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
