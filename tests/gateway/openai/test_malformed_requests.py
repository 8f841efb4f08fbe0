"""Requests that are no HTTP, or too large around their bodies, as they look on the wire."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from itertools import repeat

import pytest
import pytest_asyncio

from services.gateway.http import http_protocol
from services.gateway.http.http_protocol import MAX_HEAD_BYTES, MAX_PIPELINED
from tests.gateway.running_api import Api, running_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

KIB = 1 << 10
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b'{"model":"m","prompt":"x"}'
LAST = b"0\r\n\r\n"


def chunk(content: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(content), extension, content)


WHOLE = CHUNKED + chunk(BODY)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api() as running:
        yield running


class Talk:
    """A connection, and what the server said on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The status, the headers and the body of the next answer."""
        async with asyncio.timeout(120):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:-2])
            body = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, body

    async def closed(self) -> bool:
        """True once the server has ended its side, without a further byte."""
        async with asyncio.timeout(120):
            return await self.reader.read() == b""


async def talk(port: int, *parts: bytes) -> Talk:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await writer.drain()
    return Talk(reader, writer)


async def assert_refused(port: int, status: int, *parts: bytes) -> None:
    """Refused with an envelope, and the connection closed."""
    connection = await talk(port, *parts)
    found, headers, body = await connection.answer()
    assert found == status, body
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert headers["connection"] == "close"
    assert await connection.closed()
    connection.writer.close()


BAD_CHUNKS = {
    "no number": b"zz\r\n{}\r\n",
    "negative": b"-1\r\n{}\r\n",
    "plus": b"+2\r\n{}\r\n",
    "with 0x": b"0x2\r\n{}\r\n",
    "of more than 64 bits": b"f" * 17 + b"\r\n{}",
    "a space before it": b" 2\r\n{}\r\n",
    "none": b"\r\n{}\r\n",
    "no line end after its content": b"2\r\n{}0\r\n\r\n",
    "LF alone after its size": b"2\n{}\r\n",
    "LF alone after its content": b"2\r\n{}\n0\r\n",
    "CR alone after its size": b"2\r{}\r\n",
    "a NUL in its extension": b"2;a=\0\r\n{}\r\n",
    "a folded trailer": chunk(BODY) + b"0\r\nX-A: b\r\n c\r\n\r\n",
    "a trailer without a colon": chunk(BODY) + b"0\r\nX A b\r\n\r\n",
    "a length in a trailer": chunk(BODY) + b"0\r\nContent-Length: 3\r\n\r\n",
    "a coding in a trailer": chunk(BODY) + b"0\r\nTransfer-Encoding: identity\r\n\r\n",
    "the connection's end in a trailer": chunk(BODY) + b"0\r\nConnection: close\r\n\r\n",
    "a NUL in a trailer": chunk(BODY) + b"0\r\nX-A: \0\r\n\r\n",
}


@pytest.mark.parametrize("bad", BAD_CHUNKS.values(), ids=BAD_CHUNKS)
@pytest.mark.parametrize("apart", [False, True], ids=["with its head", "after its head"])
async def test_a_malformed_chunk_gets_400_at_once(api: Api, bad: bytes, apart: bool):
    if not apart:
        await assert_refused(api.port, 400, CHUNKED + bad)
        return
    connection = await talk(api.port, CHUNKED + b"2\r\n{")
    await asyncio.sleep(0.01)  # its handler waits for the body by now
    connection.writer.write(b"}\r\n" + bad)
    assert (await connection.answer())[0] == 400
    assert await connection.closed()
    connection.writer.close()


@pytest.mark.parametrize(
    "coding", [b"xchunked", b"chunked, identity", b"identity", b"chunked\r\nTransfer-Encoding: chunked"]
)
async def test_a_body_whose_end_nobody_can_tell_gets_400_at_once(api: Api, coding: bytes):
    await assert_refused(api.port, 400, POST + b"Transfer-Encoding: %b\r\n\r\n" % coding + chunk(BODY) + LAST)


@pytest.mark.parametrize(
    "start", [b"GET / HTTP/3.0\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"CONNECT x:1 HTTP/1.1\r\n\r\n"]
)
async def test_another_protocol_gets_400(api: Api, start: bytes):
    await assert_refused(api.port, 400, start)


async def test_a_malformed_chunk_is_refused_as_any_request_is_by_its_api(api: Api):
    """The answer has the request's id and its vendor's envelope, and is counted."""
    head = CHUNKED.replace(b"/v1/completions", b"/v1/messages").replace(b"Host: x", b"Host: x\r\nX-Request-Id: mine")
    connection = await talk(api.port, head + b"zz\r\n")
    status, headers, body = await connection.answer()
    assert (status, headers["request-id"], json.loads(body)["type"]) == (400, "mine", "error")
    connection.writer.close()


ENDLESS: dict[str, tuple[bytes, Iterator[bytes]]] = {
    "trailer": (WHOLE + b"0\r\nX: ", repeat(b"a" * 16 * KIB)),
    "name of a trailer": (WHOLE + b"0\r\n", repeat(b"a" * 16 * KIB)),
    "trailers": (WHOLE + b"0\r\n", repeat(b"X-A: b\r\n" * 2 * KIB)),
    "extension": (CHUNKED + b"2;", repeat(b"a" * 16 * KIB)),
    "extensions": (CHUNKED, repeat(chunk(b" " * 16, b";a=" + b"b" * 4 * KIB) * 4)),
    "extension of the last chunk": (WHOLE + b"0;", repeat(b"a" * 16 * KIB)),
    "zeros of a size": (CHUNKED, repeat(b"0" * 16 * KIB)),
    "tiny chunks": (CHUNKED, repeat(chunk(b" ") * 2 * KIB)),
}


@pytest.mark.parametrize(("head", "rest"), ENDLESS.values(), ids=ENDLESS)
@pytest.mark.parametrize("port", ["api", "admin"])
async def test_what_comes_around_a_body_is_bounded_while_it_comes(
    api: Api, port: str, head: bytes, rest: Iterator[bytes]
):
    """431 after no more than twice the bound, for a client that would go on for ever."""
    number = api.port if port == "api" else api.admin.base_url.port
    assert number is not None
    connection = await talk(
        number, head if port == "api" else head.replace(b"POST /v1/completions", b"GET /debug/ledger")
    )
    sent, read = 0, asyncio.create_task(connection.reader.read())  # to the end
    async with asyncio.timeout(120):
        while not read.done() and sent < 3 * MAX_HEAD_BYTES:
            part = next(rest)
            connection.writer.write(part)
            sent += len(part)
            await asyncio.sleep(0.01)
        answer = await read
    assert sent <= 2 * MAX_HEAD_BYTES + 32 * KIB
    if port == "api":
        assert b"HTTP/1.1 431" in answer
        assert b'"code":"request_header_fields_too_large"' in answer
    else:
        assert answer.count(b"HTTP/1.1 ") == 1  # 200, which did not wait for a body
    connection.writer.close()


async def test_a_head_and_its_trailers_have_one_bound_together(api: Api):
    half = b"X-A: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\n"
    with_half = POST + half + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(BODY) + b"0\r\n"
    await assert_refused(api.port, 431, with_half + half + b"\r\n")
    connection = await talk(api.port, with_half + half[:-KIB] + b"\r\n\r\n", WHOLE + LAST)
    assert [(await connection.answer())[0] for _ in range(2)] == [200, 200]
    connection.writer.close()


@pytest.mark.parametrize(
    "trailer",
    [
        b"Content-Type: text/plain",
        b"Content-Encoding: gzip",
        b"X-Request-Id: theirs",
        b"X-Api-Key: k",
        b"Authorization: Bearer k",
        b"Expect: 100-continue",
        b"Upgrade: h2c",
    ],
)
async def test_a_trailer_is_no_header(api: Api, trailer: bytes):
    """Neither in the request that it belongs to, nor in the next one."""
    head = WHOLE.replace(b"Host: x", b"Host: x\r\nX-Request-Id: mine")
    connection = await talk(api.port, (head + b"0\r\n" + trailer + b"\r\n\r\n") * 2)
    for _ in range(2):
        status, headers, body = await connection.answer()
        assert (status, headers["x-request-id"]) == (200, "mine"), body
    connection.writer.close()


async def test_a_body_in_chunks_of_some_size_may_be_as_large_as_any(api: Api):
    body = BODY + b" " * 512 * KIB
    pieces = b"".join(chunk(body[at : at + 64]) for at in range(0, len(body), 64))  # 40 KiB of sizes and line ends
    connection = await talk(api.port, CHUNKED + pieces + LAST)
    assert (await connection.answer())[0] == 200
    connection.writer.close()


async def test_requests_that_wait_on_one_connection_have_a_bound(api: Api):
    connection = await talk(api.port, (GET + b"\r\n") * 4000)
    answers = await asyncio.wait_for(connection.reader.read(), 120)  # to the end of the connection
    assert answers.count(b"HTTP/1.1 200 OK") == MAX_PIPELINED + 1
    connection.writer.close()


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
async def test_a_wish_for_another_protocol_is_left_out(api: Api, protocol: bytes):
    """Java's client sends one with its first request, whatever that is; its body and what follows are not lost."""
    wish = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAA\r\n" % protocol
    with_body = POST + wish + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    connection = await talk(api.port, with_body + GET + wish + b"\r\n" + POST + wish, WHOLE[len(POST) :] + LAST)
    assert [(await connection.answer())[0] for _ in range(3)] == [200, 200, 200]
    connection.writer.close()


@pytest.mark.parametrize("rest", [b"\r\n", b"2\r\n  \r\n"], ids=["empty lines", "the body of an answered request"])
async def test_a_connection_that_drips_after_an_answer_is_closed(
    api: Api, rest: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.3)
    begun = GET if rest == b"\r\n" else GET + b"Transfer-Encoding: chunked\r\n"
    connection = await talk(api.port, begun + b"\r\n")
    assert (await connection.answer())[0] == 200
    ended = asyncio.create_task(connection.closed())
    async with asyncio.timeout(120):
        while not ended.done():
            connection.writer.write(rest)
            await asyncio.sleep(0.02)
    connection.writer.close()


async def test_a_client_may_send_its_body_after_the_answer_and_then_go_on(api: Api, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    connection = await talk(api.port, GET + b"Content-Length: 4\r\n\r\n")
    assert (await connection.answer())[0] == 200
    connection.writer.write(b"rest")
    await asyncio.sleep(0.4)
    connection.writer.write(GET + b"\r\n")
    assert (await connection.answer())[0] == 200
    connection.writer.close()
