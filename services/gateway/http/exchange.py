"""One HTTP request and its answer, over plain ASGI.

Streams write straight to the server: no middleware wraps `send`, so a chunk costs what the server makes it cost.
"""

import asyncio
import zlib
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from time import monotonic
from urllib.parse import parse_qs

import structlog
from starlette.types import Receive, Scope, Send

from services.gateway.api.caller import ANYBODY, Caller
from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.records.request_phases import server_timing
from services.gateway.api.records.request_record import IGNORED_FIELDS, TOOLS, RequestRecord, sane_or_new_id
from services.gateway.http.cut_short import cut_short
from services.gateway.http.envelope import Envelope, OpenAIEnvelope
from services.gateway.http.http_protocol import REQUEST_BODY, STREAM_WRITER, RequestBody, StreamWriter

BODY_TIMEOUT_S = 60.0

# A browser must not take an answer, which may have a client's words in it, for a page or a script.
NO_SNIFFING = (b"x-content-type-options", b"nosniff")

_MAX_QUERY_FIELDS = 64

STATUS_CLIENT_GONE = 499  # never sent, for logs and metrics alone


class ClientGone(Exception):
    """The client closed its connection, or did not read its answer until the request's time was over."""


class Exchange:
    """One HTTP request, which is read and then answered once.

    record: its id is the client's X-Request-Id where that is a sane one, else a new one; sent back with every answer.
    stream: writes further events without waiting.
    envelope: the form of errors.
    caller: whose request it is.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.envelope: Envelope = OpenAIEnvelope()
        self.caller: Caller = ANYBODY
        self.path_params: Mapping[str, str] = {}
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._query: bytes = scope["query_string"]
        self.stream: StreamWriter = scope["extensions"][STREAM_WRITER]
        self._request_body: RequestBody = scope["extensions"][REQUEST_BODY]
        self._receive = receive
        self._send = send
        self._started = False
        self.record = RequestRecord(sane_or_new_id(self._headers.get(b"x-request-id", b"").decode("latin-1")))

    def header(self, name: str) -> str:
        """The value of a header of the request, its name in small letters; empty: it has none."""
        return self._headers.get(name.encode(), b"").decode("latin-1").strip()

    @property
    def has_body(self) -> bool:
        """True for a request with a body, which may not have come yet."""
        return bool(self.header("transfer-encoding")) or self.header("content-length") not in ("", "0")

    def take_request_id(self, wanted: str | None) -> None:
        """Gives the request the id that its body names, where no header does. wanted: None where it names none."""
        if wanted is not None and not self.header("x-request-id"):
            self.record.request_id = wanted
            structlog.contextvars.bind_contextvars(request_id=wanted)

    def query(self) -> dict[str, list[str]]:
        """Returns the values of the path's query by name. Raises ApiError where there are too many."""
        try:
            return parse_qs(self._query.decode("latin-1"), keep_blank_values=True, max_num_fields=_MAX_QUERY_FIELDS)
        except ValueError as error:
            raise invalid(f"The query has more than {_MAX_QUERY_FIELDS} fields.", None) from error

    async def read_json(self, limit: int) -> bytes:
        """Returns the whole body, unzipped. Raises ClientGone, and ApiError if it is no JSON, too large or too slow.

        limit: in bytes, as it comes and as it is read.
        """
        media_type = self._headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if media_type != b"application/json":
            raise ApiError(415, "The body must be JSON, with 'Content-Type: application/json'.")
        encoding = self.header("content-encoding").lower()
        if encoding not in ("", "identity", "gzip"):
            raise ApiError(415, "The body's Content-Encoding must be gzip, or there must be none.")
        announced = self._headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await self._read_body(limit)
        except TimeoutError:
            message = f"The body did not come within {BODY_TIMEOUT_S:g} seconds."
            raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from None
        if not body:
            raise invalid("The body is empty; it must be a JSON object.", None)
        if encoding == "gzip":
            return await asyncio.to_thread(unzipped, bytes(body), limit)
        return bytes(body)

    async def _read_body(self, limit: int) -> bytearray:
        body = bytearray()
        more = True
        while more:
            chunk, more = await self._read()
            body += chunk
            if len(body) > limit:
                raise _too_large(limit)
        return body

    async def _read(self) -> tuple[bytes, bool]:
        """Returns the next part of the body, and whether there is more. Raises ClientGone, and ApiError for no body."""
        message = await self._receive()
        self.check_body()
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message.get("body", b""), message.get("more_body", False)

    def check_body(self) -> None:
        """Raises ApiError where what has come of the body is none."""
        if self._request_body.refusal is not None:
            raise self._request_body.refusal

    def while_connected(self, at_most_s: float) -> AbstractAsyncContextManager[None]:
        """Cancels the `async with` block and raises ClientGone when the client is gone, and also after `at_most_s`.

        The request's body must have been read.
        """
        return cut_short(self._until_gone, ClientGone, at_most_s)

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def respond(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Sends the whole answer at once."""
        more = {"content-type": content_type, "content-length": str(len(body)), **(headers or {})}
        await self._start(status, more)
        await self._send({"type": "http.response.body", "body": body})

    async def start_events(self) -> None:
        """Begins an answer that is a stream of server-sent events."""
        # X-Accel-Buffering: nginx would collect tokens otherwise.
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        await self._start(200, {**headers, "x-accel-buffering": "no"})

    async def write(self, events: bytes) -> None:
        """Sends more events, in one write. Waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_events(self, events: bytes) -> None:
        """Sends the last events."""
        await self._send({"type": "http.response.body", "body": events})

    async def fail(self, error: ApiError) -> None:
        """Answers with an error, which becomes the last event where a stream has begun."""
        envelope, request_id = self.envelope, self.record.request_id
        self.record.status = envelope.status(error)
        self.record.error = error.code or error.type
        if self._started:
            await self.end_events(envelope.event(error, request_id))
            return
        await self.respond(self.record.status, envelope.body(error, request_id), headers=error.headers)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self._started = True
        self.record.status = status
        pairs = [(name.encode(), self.record.request_id.encode()) for name in self.envelope.id_headers]
        pairs.append(NO_SNIFFING)
        if self.record.first_token is not None:
            pairs.append((b"server-timing", server_timing(self.record, monotonic()).encode()))
        if self.record.num_ignored_fields:
            pairs.append((IGNORED_FIELDS.encode(), self.record.shown_ignored_fields.encode()))
        if self.record.tools_inserted:
            pairs.append((TOOLS.encode(), b"inserted"))
        for name, value in self.envelope.limit_headers(self.record.limits_left):
            pairs.append((name.encode(), value.encode()))
        pairs += [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})


def unzipped(body: bytes, limit: int) -> bytes:
    """Returns what a gzip file holds. Raises ApiError for one that is none, or holds more than `limit` bytes."""
    unzip = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # gzip's header and checksum
    try:
        found = unzip.decompress(body, limit + 1)
    except zlib.error as error:
        raise invalid("The body is not what its Content-Encoding says.", None) from error
    if len(found) > limit:
        raise _too_large(limit)
    if not unzip.eof:
        raise invalid("The body is not what its Content-Encoding says: it ends too early.", None)
    return found


def _too_large(limit: int) -> ApiError:
    message = f"The body is larger than {limit} bytes."
    return ApiError(413, message, code="request_too_large", headers={"connection": "close"})
