"""uvicorn's HTTP protocol, with a bound on the time that a request's head may take, and with the API's error texts.

Without the bound, a connection that sends nothing, or a byte now and then, stays open for ever. Beyond ASGI, an
application can write to a stream that it has begun without waiting (`STREAM_WRITER`).
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
    """Connections with unwritten data, all of which are flushed at the end of this turn of the loop.

    A frame brings tokens for many streams. If each were written as soon as its token was handled, every write would
    wake a client that had fallen asleep again; a write then cost twice as much.
    """

    def __init__(self) -> None:
        self._connections: list[GatheringTransport] = []

    def add(self, connection: "GatheringTransport") -> None:
        """Has `flush` of this connection called soon."""
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
    """A transport that joins all writes of one turn of the loop, such as a head and the first events.

    Other methods go to the wrapped transport at once, ahead of unwritten data, which is harmless for those that uvicorn
    calls.
    lost: the connection is lost, and nothing is written any more.
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
        """Writes a part of a body in HTTP's chunked encoding."""
        if not self._unwritten:
            self._pending.add(self)
        self._unwritten.append(b"%x\r\n%b\r\n" % (len(body), body))

    def flush(self) -> None:
        """Sends what is unwritten."""
        data = b"".join(self._unwritten)
        self._unwritten.clear()
        if data and not self.lost:
            self._transport.write(data)

    def close(self) -> None:
        """See asyncio.BaseTransport."""
        self.flush()
        self._transport.close()


class StreamWriter:
    """Writes to one answer that has begun, as ASGI's `send` does, without a coroutine for each part.

    write: writes a part of the body; call it only when `ready`.
    """

    def __init__(self, cycle: RequestResponseCycle, connection: GatheringTransport) -> None:
        self._cycle = weakref.ref(cycle)  # weak, since the cycle's scope holds this writer
        self.write = connection.write_chunk

    def ready(self) -> bool:
        """True while the client keeps up and the answer is in chunked encoding and incomplete."""
        cycle = self._cycle()
        if cycle is None or cycle.flow.write_paused:
            return False
        return bool(cycle.chunked_encoding) and not cycle.response_complete


class BoundedHttpProtocol(HttpToolsProtocol):
    """A connection. The head's time runs from the connection's start, and from each further request's first byte."""

    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, pending: PendingWrites, **kwargs: Any) -> None:
        """`pending`: one object for all connections. The other arguments are uvicorn's."""
        super().__init__(*args, **kwargs)
        self._pending = pending

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base class
        """See asyncio.Protocol."""
        self._connection = GatheringTransport(transport, self._pending)
        super().connection_made(self._connection)  # type: ignore[arg-type]  # has all that uvicorn uses of a transport
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._connection.lost = True
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Starts the timer at a request's first byte."""
        super().on_message_begin()
        if self._head_timer is None:
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        """Stops the timer: the request's head is complete."""
        self._stop_waiting()
        super().on_headers_complete()
        self.scope["extensions"] = {STREAM_WRITER: StreamWriter(self.cycle, self._connection)}  # type: ignore[dict-item]  # our own

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are no HTTP, and closes the connection."""
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
