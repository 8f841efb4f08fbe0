"""HTTP as uvicorn parses it, with a bound on how long a request's head may take and with the API's words for errors.

Without the bound a connection that says nothing, or a byte now and then, stays open for ever.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.openai.errors import invalid

HEAD_TIMEOUT_S = 20.0


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. The time runs from when it is made, and from the first byte of each further request."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base class
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
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
