"""What a client keeps of an answer, and what it says of one that is not whole."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from loadtest.client.drive import Outcome, drive
from loadtest.http_stream import Address, Answer, HttpError, ask

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n'
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@asynccontextmanager
async def serving(pieces: Sequence[bytes]) -> AsyncIterator[Address]:
    """A server that answers everything with these bytes, and then hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1])


async def driven(*pieces: bytes) -> Outcome:
    async with serving(pieces) as address:
        (outcome,) = await drive(address, "m", [[1, 2]], 2, 1, 10.0)
        return outcome


def lines(*pieces: bytes) -> list[tuple[float, bytes]]:
    """Of an answer whose pieces came one second after the other."""
    return list(Answer(list(pieces), [float(at) for at in range(len(pieces))]).lines())


def test_a_line_has_the_time_of_the_piece_that_completed_it():
    two = chunk(b"one\n") + chunk(b"two\nthr")
    whole = CHUNKED + two + chunk(b"ee\n") + LAST_CHUNK
    cut = len(CHUNKED) + len(two) + 4  # inside the third chunk
    assert lines(whole[:cut], whole[cut:]) == [(0.0, b"one"), (0.0, b"two"), (1.0, b"three")]


@pytest.mark.parametrize("head", [HEAD + b"\r\n", HEAD + b"Content-Length: 8\r\n\r\n"], ids=["to the end", "length"])
def test_a_body_without_chunks_has_times_too(head: bytes):
    assert lines(head + b"on", b"e\r\nt", b"wo") == [(1.0, b"one"), (2.0, b"two")]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200",
        CHUNKED + b"5\r\nab",
        CHUNKED + chunk(b"ab\n"),
        CHUNKED + b"2\r\nabc\r\n" + LAST_CHUNK,
        HEAD + b"Content-Length: 9\r\n\r\nab",
    ],
)
def test_what_broke_off_is_an_error(raw: bytes):
    with pytest.raises(HttpError, match="broke off"):
        lines(raw)


async def test_a_server_that_hangs_up_at_once_gave_no_answer():
    async with serving([]) as address:
        answer = await ask(address, "/", None)
    with pytest.raises(HttpError, match="broke off"):
        answer.body()


async def test_every_event_with_a_choice_has_its_time():
    outcome = await driven(CHUNKED + chunk(TOKEN), chunk(TOKEN), chunk(USAGE) + chunk(b"data: [DONE]\n\n") + LAST_CHUNK)
    assert (outcome.error, outcome.output_tokens, len(outcome.parts_s)) == (None, 2, 2)
    assert outcome.sent_s < outcome.parts_s[0] <= outcome.parts_s[1]


@pytest.mark.parametrize(
    ("events", "error"),
    [
        (TOKEN + b'data: {"error": {"message": "worker lost"}}\n\n', "worker lost"),
        (TOKEN, "no token or no usage"),
        (USAGE, "no token or no usage"),
    ],
)
async def test_an_answer_that_ends_well_may_still_be_none(events: bytes, error: str):
    outcome = await driven(CHUNKED + chunk(events) + LAST_CHUNK)
    assert error in str(outcome.error)


async def test_a_broken_stream_is_an_error_though_tokens_came():
    outcome = await driven(CHUNKED + chunk(TOKEN) + chunk(TOKEN) + chunk(USAGE))
    assert "broke off" in str(outcome.error)
