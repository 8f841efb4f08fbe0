"""Requests that are too large, and clients of HTTP/1.0, as they look on the wire."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.gateway.http import http_protocol
from services.gateway.http.http_protocol import MAX_HEAD_BYTES
from services.protocol.outcomes import FinishReason
from tests.gateway.running_api import MAX_BODY_BYTES, Api, post_bytes, running_api
from tests.gateway.scripted_generator import Script, delta_per_token

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1 << 20
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    async with running_api() as running:
        yield running


def write_then_read(port: int, *parts: bytes) -> bytes:
    """Sends everything before it reads, as most clients do. Raises ConnectionError where the server resets."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
        answer = b""
        while more := connection.recv(65_536):
            answer += more
        return answer


async def answer_to(api: Api, *parts: bytes) -> tuple[int, bytes]:
    answer = await asyncio.to_thread(write_then_read, api.port, *parts)
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def header_of(size: int) -> bytes:
    name = b"X-Large: "
    return name + b"a" * (size - len(name) - 2) + b"\r\n"


async def test_a_head_over_the_limit_gets_431_while_it_still_comes_and_the_client_can_read_it(api: Api):
    status, body = await answer_to(api, GET + b"X-Large: ", *[b"a" * MIB] * 32)  # it never ends
    assert status == 431
    assert json.loads(body)["error"]["code"] == "request_header_fields_too_large"
    assert str(MAX_HEAD_BYTES) in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "head",
    [
        GET + header_of(MAX_HEAD_BYTES + 1) + b"\r\n",
        GET + header_of(1000) * 70 + b"\r\n",
        GET + b"a:\r\n" * 20_000 + b"\r\n",
        b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["one header", "many headers", "many tiny headers", "path"],
)
async def test_a_whole_head_over_the_limit_gets_431(api: Api, head: bytes):
    answer = await asyncio.to_thread(write_then_read, api.port, head)
    assert b"HTTP/1.1 431 " in answer


async def test_a_second_request_s_head_over_the_limit_leaves_the_first_answer_whole(api: Api):
    large = GET + header_of(MAX_HEAD_BYTES + 1) + b"\r\n"
    answer = await asyncio.to_thread(write_then_read, api.port, GET + b"\r\n" + large)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b'{"status":"ok"}')
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(GET + b"\r\n")
    await reader.readuntil(b'{"status":"ok"}')
    writer.write(large)
    assert b" 431 " in await reader.readline()
    writer.close()


async def test_a_head_within_the_limit_is_none_of_the_server_s_business(api: Api):
    large = GET + header_of(MAX_HEAD_BYTES - 100) + b"\r\n"
    last = GET + b"Connection: close\r\n\r\n"
    assert (await answer_to(api, large[:20_000], large[20_000:], last))[0] == 200
    long_body = post_bytes("/v1/completions", {"prompt": "x" * 300_000, "max_tokens": 1})
    answer = await asyncio.to_thread(write_then_read, api.port, long_body + large + long_body + large + last)
    assert answer.count(b"HTTP/1.1 200 ") + answer.count(b"HTTP/1.1 400 ") == 5


async def test_others_notice_nothing_of_a_large_head(api: Api):
    refused = asyncio.create_task(answer_to(api, GET + b"X-Large: ", *[b"a" * MIB] * 64))
    while not refused.done():
        assert (await api.http.get("/health")).status_code == 200
    assert (await refused)[0] == 431


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_client_that_sends_all_of_a_body_over_the_limit_can_read_the_413(api: Api, chunked: bool):
    if chunked:
        parts = [POST + b"Transfer-Encoding: chunked\r\n\r\n", *[b"%x\r\n%b\r\n" % (MIB, b"x" * MIB)] * 100]
    else:
        parts = [POST + b"Content-Length: %d\r\n\r\n" % (100 * MIB), *[b"x" * MIB] * 100]
    status, body = await answer_to(api, *parts)
    assert status == 413
    assert str(MAX_BODY_BYTES) in json.loads(body)["error"]["message"]


async def test_a_client_that_goes_on_sending_is_cut_off(api: Api, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_protocol, "LINGER_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(POST + b"Content-Length: %d\r\n\r\n" % (1 << 40))
    assert b" 413 " in await reader.readline()

    async def send_on() -> None:
        while True:
            writer.write(b"x" * 65_536)
            await writer.drain()

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(send_on(), 60)


async def test_a_stream_over_http_1_0_is_plain_bytes_until_the_connection_ends(api: Api):
    api.generator.script = Script(delta_per_token(api.tokens("größer"), FinishReason.LENGTH))
    request = post_bytes("/v1/completions", {"prompt": "x", "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0")
    answer = await asyncio.to_thread(write_then_read, api.port, request)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert b"connection: close" in head.lower()
    assert body.endswith(b"data: [DONE]\n\n")
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n")[:-2]]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == "größer"


async def test_a_whole_answer_over_http_1_0_says_its_length(api: Api):
    request = GET.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n"
    head, _, body = (await asyncio.to_thread(write_then_read, api.port, request)).partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(body) in head.lower() + b"\r\n"
    assert body == b'{"status":"ok"}'
