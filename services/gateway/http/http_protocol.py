"""uvicorn's HTTP protocol, with bounds on all of a request but its body, and with the API's error texts.

Without the bounds, a connection that sends nothing, or a byte now and then, stays open for ever, and a header or a
trailer of 100 MB holds the event loop for seconds. Bytes are counted as they come, whatever they are a part of. A
connection whose client still sends is closed so that the client can read the answer: TCP resets one that is closed with
unread data, and the client's machine then throws the answer away.

A body that turns out to be none, or too large around its content, is the application's to refuse, which then waits for
it (`REQUEST_BODY`). Trailers are read and thrown away. So is a wish to speak another protocol: the request goes on.

A server that stops loses no request: a connection is closed after an answer whose head says so, or when it has been
idle for so long that its client uses it no more.

Beyond ASGI, an application can write to a stream that it has begun without waiting (`STREAM_WRITER`). Clients of
HTTP/1.0, which know no chunks, get an answer of unknown length as plain bytes up to the connection's end.
"""

import asyncio
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NoReturn

import httptools
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.gateway.api.errors import ApiError, invalid

HEAD_TIMEOUT_S = 20.0
MAX_HEAD_BYTES = 64 << 10  # of a request: its path, its headers and its trailers, and what chunks are wrapped in
MAX_PIPELINED = 100  # requests that wait on one connection for the answer before theirs
LINGER_S = 20.0  # for a client that still sends when it has its answer
# Of TLS, for a client to say goodbye too. The event loop alone would wait for 30 s, and so would a server that stops.
GOODBYE_S = 1.0
# Of a connection when the server stops. httpx's clients, the official OpenAI client among them, send nothing on one
# that was idle for 5 s; on one that is closed before, a request may be on its way.
IDLE_S = 5.5

log = structlog.get_logger()

_CLIENT_HELLO = b"\x16\x03"  # a TLS record with a handshake begins with it

STREAM_WRITER = "baton.stream_writer"  # in the scope's extensions: a StreamWriter
REQUEST_BODY = "baton.request_body"  # in the scope's extensions: a RequestBody


class Shutdown:
    """Tells all connections of a server that it stops."""

    begun = False


class PendingWrites:
    """Connections with unwritten data, all of which are flushed at the end of this turn of the loop.

    A frame brings tokens for many streams. If each were written as soon as its token was handled, every write would
    wake a client that had fallen asleep again; a write then cost twice as much.
    """

    def __init__(self) -> None:
        self._connections: list[GatheringTransport] = []

    def add(self, connection: "GatheringTransport") -> None:
        """Arranges that `flush` of this connection is called soon."""
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
    lingering: the answer is complete and the client still sends, which nobody reads.
    """

    __slots__ = ("_half_read", "_pending", "_transport", "_unwritten", "lingering", "lost")

    def __init__(
        self, transport: asyncio.Transport, pending: PendingWrites, half_read: Callable[[], bool] = lambda: False
    ) -> None:
        """half_read: returns True while the client still sends its request."""
        self._transport = transport
        self._pending = pending
        self._half_read = half_read
        self._unwritten: list[bytes] = []
        self.lost = False
        self.lingering = False

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
        """See asyncio.BaseTransport. A client that still sends gets the end of the answer, and LINGER_S to read it."""
        self.flush()
        if self.lost or self.lingering or not self._half_read():
            self._transport.close()
            return
        self.lingering = True
        if self._transport.can_write_eof():  # TLS cannot: its client knows by the answer's head that it is the last one
            self._transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)

    def close_now(self) -> None:
        """Closes a connection that has no answer for its client to read."""
        self._transport.close()
        if self._transport.get_extra_info("sslcontext") is not None:
            asyncio.get_running_loop().call_later(GOODBYE_S, self._transport.abort)


class TlsClients:
    """Clients of one server that begin TLS where it speaks plain text: the log has it once."""

    def __init__(self) -> None:
        self._said = False

    def refusal(self) -> ApiError:
        """Returns the error for one of them. Its library shows a wrong version; who looks at the bytes reads this."""
        if not self._said:
            log.warning("a client begins TLS at a port for plain text; its URL begins with http://")
        self._said = True
        return invalid("This port speaks plain HTTP, and the client began TLS: its URL begins with http://.", None)


class StreamWriter:
    """Writes to one answer that has begun, as ASGI's `send` does, without a coroutine for each part.

    write: writes a part of the body; call it only when `ready`. abort: closes the connection, unwritten data or not.
    unwritten: returns how many bytes wait for the client to read.
    """

    def __init__(self, cycle: RequestResponseCycle, connection: GatheringTransport) -> None:
        self._cycle = weakref.ref(cycle)  # weak, since the cycle's scope holds this writer
        self.write = connection.write_chunk
        self.abort: Callable[[], None] = connection.abort
        self.unwritten: Callable[[], int] = connection.get_write_buffer_size

    def ready(self) -> bool:
        """True while the client keeps up and the answer is in chunked encoding and incomplete."""
        cycle = self._cycle()
        if cycle is None or cycle.flow.write_paused:
            return False
        return bool(cycle.chunked_encoding) and not cycle.response_complete


@dataclass(slots=True)
class RequestBody:
    """The body of a request, as far as the protocol knows. refusal: why no more of it comes, while it is incomplete."""

    refusal: ApiError | None = None


class BoundedHttpProtocol(HttpToolsProtocol):
    """A connection. The head's time runs from the connection's start, and from each further request's first byte."""

    _head_timer: asyncio.TimerHandle | None = None
    _in_head = False  # the first byte of a request has come, and its head is incomplete
    _in_body = False  # a request's head is complete, and its body is not
    _refused = False  # what has come is no request, or one that is too large around its body
    _refusal: ApiError | None = None  # the parser was stopped for this
    _num_begun = 0  # requests that began in one part
    # Of the incomplete request:
    _framing_bytes = 0  # that are no content of its body, as far as they came in parts of their own
    _content_bytes = 0  # of one part, and what may be wrapped around them
    _chunk_bytes = 0  # content of the incomplete chunk
    _named_bytes = 0  # its path, its headers and its trailers

    def __init__(
        self, *args: Any, pending: PendingWrites, stopping: Shutdown, tls_clients: TlsClients, **kwargs: Any
    ) -> None:
        """`pending`, `stopping`, `tls_clients`: one object for all connections. The other arguments are uvicorn's."""
        super().__init__(*args, **kwargs)
        self._pending = pending
        self._stopping = stopping
        self._tls_clients = tls_clients
        self._idle_since = self.loop.time()
        self._body = RequestBody()  # of the last request whose head is complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base class
        """See asyncio.Protocol."""
        self._connection = GatheringTransport(transport, self._pending, lambda: self._in_body or self._refused)
        super().connection_made(self._connection)  # type: ignore[arg-type]  # has all that uvicorn uses of a transport
        self._wait_for_head()
        if self._stopping.begun:
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._connection.lost = True
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol. The parser gets no more than a whole head at once."""
        self._unset_keepalive_if_required()
        for start in range(0, len(data), MAX_HEAD_BYTES):
            if self._refused or self._connection.lingering or self.transport.is_closing():
                return
            self._parse(data[start : start + MAX_HEAD_BYTES])
        answers = self.cycle is not None and not self.cycle.response_complete
        if not (answers or self._head_timer or self.timeout_keep_alive_task):  # the rest of a body, or empty lines
            self._wait_for_head()

    def _parse(self, part: bytes) -> None:
        between_requests = not (self._in_head or self._in_body)
        self._num_begun = self._content_bytes = 0
        self._feed(part)
        if self._refused or not (self._in_head or self._in_body):
            return
        # After another request in the same part, the first bytes of this one are not counted.
        if self._num_begun == 0 or (between_requests and self._num_begun == 1):
            self._framing_bytes += len(part) - self._content_bytes
        if self._framing_bytes > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())

    def _feed(self, part: bytes) -> None:
        while part:
            try:
                self.parser.feed_data(part)
                return
            except httptools.HttpParserUpgrade as upgrade:  # the parser has left out its body
                part = self._head_without_upgrade() + part[upgrade.args[0] :]
            except httptools.HttpParserError:
                self._refuse(self._refusal or self._no_request(part))
                return

    def _no_request(self, part: bytes) -> ApiError:
        if part.startswith(_CLIENT_HELLO):
            return self._tls_clients.refusal()
        return invalid("Invalid HTTP request received.", None)

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """Starts the timer at a request's first byte. Raises ApiError, which stops the parser."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop_parser(invalid(f"More than {MAX_PIPELINED} requests wait on this connection.", None))
        super().on_message_begin()
        self._in_head = True
        self._num_begun += 1
        self._framing_bytes = self._content_bytes = self._chunk_bytes = self._named_bytes = 0
        if self._head_timer is None:
            self._wait_for_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header, and throws a trailer away. Raises ApiError, which stops the parser."""
        self._named_bytes += len(name) + len(value) + 4
        if self._named_bytes > MAX_HEAD_BYTES:
            self._stop_parser(_head_too_large())
        if not self._in_body:
            super().on_header(name, value)
        elif name.lower() == b"connection":  # the parser heeds it, and refuses others of the kind itself
            self._stop_parser(invalid("A trailer says how the connection goes on.", None))

    def on_headers_complete(self) -> None:
        """Stops the timer: the request's head is complete. Raises ApiError, which stops the parser."""
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            return  # the parser reads this head again, without its wish
        self._stop_waiting()
        self._in_head = False
        self._named_bytes += len(self.url)
        if self._named_bytes > MAX_HEAD_BYTES:
            self._stop_parser(_head_too_large())
        super().on_headers_complete()
        self._in_body, self._body = True, RequestBody()
        if self._stopping.begun:
            self.cycle.keep_alive = False  # the answer's head says so
        writer = StreamWriter(self.cycle, self._connection)
        self.scope["extensions"] = {STREAM_WRITER: writer, REQUEST_BODY: self._body}  # type: ignore[dict-item]  # our own

    def on_body(self, body: bytes) -> None:
        """Takes a part of the body's content."""
        self._content_bytes += len(body)
        self._chunk_bytes += len(body)
        super().on_body(body)

    def on_chunk_complete(self) -> None:
        """Allows the chunk the length of a size and two line ends beside its content, where that is not tiny."""
        self._content_bytes += min(len(f"{self._chunk_bytes:x}") + 4, self._chunk_bytes // 8)
        self._chunk_bytes = 0

    def on_message_complete(self) -> None:
        """Notes that the client has sent all of its request."""
        if not self._in_body:
            return  # the parser reads this request's head again
        self._in_body = False
        super().on_message_complete()
        if self.cycle.response_complete:  # long before, maybe
            self._stop_waiting()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """Notes that the connection is idle from now on."""
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def shutdown(self) -> None:
        """Lets the connection close after the next answer's head that can say so, or when it was idle for IDLE_S.

        uvicorn calls it when it stops. It would close idle connections, and those whose stream ends, at once.
        """
        idle_s = min(IDLE_S, (self.config.timeout_graceful_shutdown or 0) / 2)
        self.timeout_keep_alive = idle_s  # type: ignore[assignment]  # is given to asyncio as it is
        if self.cycle is not None and not self.cycle.response_complete:
            if not self.cycle.response_started:
                self.cycle.keep_alive = False
        elif not self._in_head:
            self._unset_keepalive_if_required()
            left_s = max(0.0, self._idle_since + idle_s - self.loop.time())
            self.timeout_keep_alive_task = self.loop.call_later(left_s, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """Closes a connection that has been idle for too long."""
        if not self.transport.is_closing():
            self._connection.close_now()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        super()._start_asgi_task(cycle, _unchunked(cycle, app) if cycle.scope["http_version"] == "1.0" else app)  # type: ignore[arg-type]

    def _stop_parser(self, refusal: ApiError) -> NoReturn:
        self._refusal = refusal
        raise refusal

    def _refuse(self, error: ApiError) -> None:
        """Answers bytes that are no request, and closes the connection; the application answers for a body."""
        self._refused, self._in_head = True, False
        self._stop_waiting()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
            if self._in_body:
                self._body.refusal = error
                self.cycle.message_event.set()
            return  # also where the answer before would have this one in its middle
        if self._in_body:  # whose answer is complete
            self.transport.close()
            return
        self.transport.write(last_answer(error))
        self.transport.close()

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._connection.close_now)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def last_answer(error: ApiError) -> bytes:
    """Returns the bytes of an answer after which the connection is closed."""
    body, phrase = error.envelope(), HTTPStatus(error.status).phrase
    head = f"HTTP/1.1 {error.status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    head += "x-content-type-options: nosniff\r\nconnection: close\r\n\r\n"
    return head.encode() + body


def plain_http_answer() -> bytes:
    """Returns the answer to a plain HTTP request at a port for TLS."""
    return last_answer(invalid("This port speaks TLS, and the client plain HTTP: its URL begins with https://.", None))


def _head_too_large() -> ApiError:
    message = f"The request's path, headers and trailers are larger than {MAX_HEAD_BYTES} bytes."
    return ApiError(431, message, code="request_header_fields_too_large")


def _unchunked(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """Returns an application whose answer ends with the connection where it does not say its length."""
    cycle.chunked_encoding = False  # chosen before uvicorn does

    async def unchunked(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_plain(message: Message) -> None:
            if message["type"] == "http.response.body":
                cycle.expected_content_length = len(message.get("body", b""))  # uvicorn writes what it expects
            await send(message)

        await app(scope, receive, send_plain)

    return unchunked
