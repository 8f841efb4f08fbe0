"""One HTTP request and its answer, at little cost: the client shares its cores with the server that it measures.

Bytes are only kept, with the time when they came, and parsed when the answer is over. The module knows as much of
HTTP/1.1 as a server's event stream needs: a POST or GET on a connection of its own, whose end ends the answer; a body
in chunks, of known length, or up to the end of the connection.
"""

import asyncio
import socket
import ssl
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import cast

_SLOW_BUFFER_BYTES = 4096  # of a slow reader's socket
_LARGEST_BYTES = 64 << 20  # of an answer
CONNECT_TIMEOUT_S = 10.0  # of `reached`: for a look at a host's name, and for a connection to one IP


class HttpError(Exception):
    """The server could not be reached, did not speak HTTP, or answered with another status than 200.

    HttpError
    ├── NoConnection      nobody took the connection: the request was not sent
    └── StatusError       the answer has another status than 200
    """


class NoConnection(HttpError):
    """A server could not be reached."""


class StatusError(HttpError):
    """An answer with another status than 200. `text`: its body."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}: {text[:300]}")
        self.status, self.text = status, text


@dataclass(frozen=True, slots=True)
class Address:
    """The server's host and port. api_key: sent with each request; tls: None: plain text.

    prefix: of the path of each request, for a server behind a proxy that routes by it. ip: where the host was found;
    None: each connection looks for it.
    """

    host: str
    port: int
    api_key: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None
    prefix: str = ""
    ip: str | None = None

    @property
    def authority(self) -> str:
        """Host and port, as the header Host has them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(slots=True)
class Answer:
    """All bytes that came on a connection. `times_s`: when each piece came, on perf_counter's clock.

    connected_s: when there was a connection, with its TLS; None: there was none.
    """

    pieces: list[bytes] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    connected_s: float | None = None

    @property
    def num_bytes(self) -> int:
        """The size of all pieces."""
        return sum(map(len, self.pieces))

    def lines(self) -> Iterator[tuple[float, bytes]]:
        """Yields the body's lines, each with the time when it was complete. Raises HttpError."""
        try:
            yield from self._lines()
        except (IndexError, ValueError) as error:
            raise HttpError(f"the answer broke off, or is no HTTP: {error!r}") from error

    def body(self) -> bytes:
        """Returns all lines of the body. Raises HttpError."""
        return b"\n".join([line for _, line in self.lines()])

    def _lines(self) -> Iterator[tuple[float, bytes]]:
        raw, ends = b"".join(self.pieces), list(accumulate(map(len, self.pieces)))
        status, headers, start = _head(raw)
        if headers.get("transfer-encoding") == "chunked":
            parts = _chunks(raw, start)
        else:
            parts = _plain_parts(ends, start, int(headers.get("content-length", len(raw) - start)))
        if status != 200:
            text = b"".join([raw[begin:end] for begin, end in parts])
            raise StatusError(status, text.decode(errors="replace"))
        line = b""
        for begin, end in parts:
            *whole, line = (line + raw[begin:end]).split(b"\n")
            came_s = self.times_s[bisect_left(ends, end)]
            for one in whole:
                yield came_s, one.removesuffix(b"\r")
        if line:
            yield self.times_s[-1], line


async def ask(
    address: Address, path: str, body: bytes | None, answer: Answer | None = None, rest_s: float = 0.0
) -> Answer:
    """Sends a GET, or a POST of a JSON body, and returns the answer when its connection has ended. Raises HttpError.

    answer: filled as pieces come, so that the caller has those of a request that fails or is cancelled.
    rest_s: a slow reader's pause after each piece, in seconds; its pieces are small.
    """
    answer = Answer() if answer is None else answer
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    try:
        transport, _ = await _connected(address, lambda: _Recorder(answer, over, rest_s))
    except OSError as error:
        raise NoConnection(f"{address.authority}: {error}") from error
    answer.connected_s = time.perf_counter()
    try:
        transport.write(_request(address, path, body))
        await over
    except OSError as error:
        raise HttpError(f"the answer broke off: {error!r}") from error
    finally:
        transport.close()
    return answer


async def reached(address: Address) -> Address:
    """The address with the IP at which its host takes connections: no request looks for it then. Raises HttpError.

    Looking for the host, and each of its IPs, has `CONNECT_TIMEOUT_S`.
    """
    error: OSError | None = None
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            found = await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as unknown:  # a TimeoutError is one
        raise NoConnection(f"{address.authority}: {_in_words(unknown)}") from unknown
    for ip in dict.fromkeys(str(info[4][0]) for info in found):
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                transport, _ = await _connected(replace(address, ip=ip), asyncio.Protocol)
        except OSError as refused:
            error = refused
            continue
        transport.close()
        return replace(address, ip=ip)
    raise NoConnection(f"{address.authority}: {_in_words(error)}") from error


def _in_words(error: OSError | None) -> str:
    return f"no answer within {CONNECT_TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else str(error)


async def _connected(
    address: Address, protocol: Callable[[], asyncio.Protocol]
) -> tuple[asyncio.Transport, asyncio.Protocol]:
    """Connects to an address. Raises OSError."""
    name = address.host if address.tls is not None else None  # that of the server's certificate
    return await asyncio.get_running_loop().create_connection(
        protocol, address.ip or address.host, address.port, ssl=address.tls, server_hostname=name
    )


class _Recorder(asyncio.Protocol):
    def __init__(self, answer: Answer, over: "asyncio.Future[None]", rest_s: float) -> None:
        self._answer = answer
        self._over = over
        self._rest_s = rest_s
        self._room = _LARGEST_BYTES
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        if self._rest_s:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._answer.times_s.append(time.perf_counter())
        self._answer.pieces.append(data)
        self._room -= len(data)
        if self._room < 0:
            self._end(HttpError(f"the answer has more than {_LARGEST_BYTES >> 20} MiB"))
            self._transport.abort()
        if self._rest_s:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(self._rest_s, self._read_on)

    def _read_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._end(exc)

    def _end(self, error: Exception | None) -> None:
        if self._over.done():  # nobody waits any more
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)


def _request(address: Address, path: str, body: bytes | None) -> bytes:
    method, path = "GET" if body is None else "POST", address.prefix + path
    head = f"{method} {path} HTTP/1.1\r\nHost: {address.authority}\r\n"
    head += "Connection: close\r\n"
    if address.api_key is not None:
        head += f"Authorization: Bearer {address.api_key}\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}\r\n".encode() + (body or b"")


def _head(raw: bytes) -> tuple[int, dict[str, str], int]:
    """Parses the status and the headers, and finds where the body begins. Raises ValueError, IndexError."""
    end = raw.index(b"\r\n\r\n")
    status_line, *lines = raw[:end].decode("latin-1").split("\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip().lower()
    return int(status_line.split()[1]), headers, end + 4


def _chunks(raw: bytes, at: int) -> Iterator[tuple[int, int]]:
    """Finds the bytes of each chunk. Raises ValueError when the last chunk is missing."""
    while True:
        line_end = raw.index(b"\r\n", at)
        size = int(raw[at:line_end].split(b";")[0], 16)
        if size < 0:
            raise ValueError(f"a chunk of {size} bytes")
        if size == 0:
            return
        begin = line_end + 2
        end = raw.index(b"\r\n", begin + size, begin + size + 2)
        yield begin, end
        at = end + 2


def _plain_parts(ends: Iterable[int], start: int, length: int) -> Iterator[tuple[int, int]]:
    """Finds the body's bytes, piece by piece. Raises ValueError when there are fewer than `length`."""
    edges = [start, *(end for end in ends if end > start)]
    if edges[-1] < start + length:
        raise ValueError(f"{edges[-1] - start} of {length} bytes")
    return pairwise(edges)
