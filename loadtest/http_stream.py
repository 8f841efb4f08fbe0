"""One streamed HTTP request, at little cost: the client shares its cores with the server that it measures.

Just enough of HTTP/1.1 for a server's event stream: a POST or GET on a connection of its own; a body in chunks, of
known length, or up to the end of the connection.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

_MAX_LINE_BYTES = 1 << 20


class HttpError(Exception):
    """The server could not be reached, did not speak HTTP, or answered with another status than 200."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is."""

    host: str
    port: int


async def lines(address: Address, path: str, body: bytes | None) -> AsyncIterator[bytes]:
    """Lines of the answer, as they come. With a body it is a POST of JSON. Raises HttpError."""
    try:
        reader, writer = await asyncio.open_connection(address.host, address.port, limit=_MAX_LINE_BYTES)
    except OSError as error:
        raise HttpError(f"{address.host}:{address.port}: {error}") from error
    try:
        writer.write(_request(address, path, body))
        status, headers = await _head(reader)
        pieces = _body(reader, headers)
        if status != 200:
            text = b"".join([piece async for piece in pieces])
            raise HttpError(f"status {status}: {text.decode(errors='replace')[:300]}")
        rest = b""
        async for piece in pieces:
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                yield line.removesuffix(b"\r")
        if rest:
            yield rest
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        raise HttpError(f"the answer broke off: {error!r}") from error
    finally:
        writer.close()


def _request(address: Address, path: str, body: bytes | None) -> bytes:
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {address.host}:{address.port}\r\n"
    head += "Connection: close\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}\r\n".encode() + (body or b"")


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status_line = await reader.readuntil(b"\r\n")
    headers = {}
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip().lower()
    return int(status_line.split()[1]), headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(1 << 16):
            yield piece
