"""What a client keeps of an answer, and what it says of one that is not whole."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager

import pytest

from loadtest import http_stream
from loadtest.bench import server as bench_server
from loadtest.bench.drive import Pacing, drive
from loadtest.bench.endpoints import Chat, Common, Completions, Endpoint
from loadtest.bench.outcome import Outcome
from loadtest.bench.outcomes import Outcomes
from loadtest.bench.reading import read
from loadtest.bench.script import Script, Turn
from loadtest.http_stream import Address, Answer, HttpError, NoConnection, ask, reached

COMPLETIONS = Completions(Common("m"))
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


async def driven(*pieces: bytes, endpoint: Endpoint = COMPLETIONS) -> Outcomes:
    async with serving(pieces) as address:
        return await drive(address, endpoint, [Script((Turn("said", 2),))], Pacing(timeout_s=10.0))


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
    outcomes = await driven(
        CHUNKED + chunk(TOKEN), chunk(TOKEN), chunk(USAGE) + chunk(b"data: [DONE]\n\n") + LAST_CHUNK
    )
    found = outcomes.good
    assert (found.output_tokens.tolist(), outcomes.gaps.number, outcomes.without_usage) == ([2], 1, 0)
    assert found.sent_s < found.first_s <= found.last_s
    assert 0 < found.connect_s < found.ttft_s


async def test_an_answer_without_usage_counts_by_its_parts():
    outcomes = await driven(CHUNKED + chunk(TOKEN) + chunk(TOKEN) + LAST_CHUNK)
    assert (outcomes.good.output_tokens.tolist(), outcomes.without_usage) == ([2], 1)


@pytest.mark.parametrize(
    ("events", "kind", "text"),
    [
        (TOKEN + b'data: {"error": {"message": "worker lost"}}\n\n', "error in the stream", "worker lost"),
        (USAGE, "no token", "no token"),
        (b"data: {no\n\n", "broke off", "an event is no JSON"),
    ],
)
async def test_an_answer_that_ends_well_may_still_be_none(events: bytes, kind: str, text: str):
    outcomes = await driven(CHUNKED + chunk(events) + LAST_CHUNK)
    assert outcomes.failures == {kind: 1}
    assert text in outcomes.failure_texts[0]


@pytest.mark.parametrize(
    "event",
    [
        '{"choices": [null, {}]}',
        '{"choices": ["a"]}',
        '{"choices": {"0": {}}}',
        '{"choices": [{"delta": ["a"]}]}',
        '{"choices": [], "usage": "much"}',
        '{"choices": [], "usage": {"completion_tokens": "7"}}',
        '{"choices": [], "usage": {"completion_tokens": -7}}',
        '{"choices": [], "usage": {"completion_tokens": 7, "prompt_tokens": 1.5}}',
        pytest.param("[" * 5000, id="too deep"),
    ],
)
async def test_an_odd_event_is_a_failure_of_its_request_alone(event: str):
    token = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
    events = chunk(f"data: {event}\n\n".encode()) + chunk(token)
    outcomes = await driven(CHUNKED + events + LAST_CHUNK, endpoint=Chat(Common("m")))
    assert outcomes.failures == {"broke off": 1}, outcomes.failure_texts


@pytest.mark.parametrize("call", ["null", '"f"', '{"function": "f"}', '{"function": ["f"]}'])
def test_an_odd_call_of_a_tool_is_one_too(call: str):
    answer = Answer([CHUNKED, chunk(f'data: {{"choices": [{{"delta": {{"tool_calls": [{call}]}}}}]}}\n\n'.encode())])
    answer.times_s = [0.0, 1.0]
    read(answer, outcome := Outcome(ended_s=2.0), Chat(Common("m")), wants_text=True)
    assert outcome.failure is not None
    assert outcome.failure.kind == "broke off"
    assert outcome.parts_s == [1.0, 2.0]  # its first part, and its end


def test_a_chunk_of_fewer_than_no_bytes_is_no_http():
    with pytest.raises(HttpError, match="a chunk of -12 bytes"):
        lines(CHUNKED + chunk(b"0123456\n") + b"-c\r\n0\r\n\r\n")


async def test_a_broken_stream_is_an_error_though_tokens_came():
    outcomes = await driven(CHUNKED + chunk(TOKEN) + chunk(TOKEN) + chunk(USAGE))
    assert outcomes.failures == {"broke off": 1}


async def test_a_refusal_is_told_by_its_status():
    outcomes = await driven(b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nwait")
    assert outcomes.failures == {"status 429": 1}
    assert outcomes.failure_texts == ["status 429: wait"]
    assert outcomes.failed.status.tolist() == [429]


async def test_a_space_behind_data_is_not_asked_for():
    outcomes = await driven(CHUNKED + chunk(TOKEN.replace(b"data: ", b"data:")) + chunk(USAGE) + LAST_CHUNK)
    assert outcomes.good.output_tokens.tolist() == [2]


async def test_a_host_is_looked_for_once_and_where_somebody_listens():
    """`localhost` is the address of IPv6 too, at which this server is not."""
    async with serving([CHUNKED + LAST_CHUNK]) as address:
        found = await reached(Address("localhost", address.port))
        assert (found.host, found.ip) == ("localhost", "127.0.0.1")
        assert (await ask(found, "/", None)).body() == b""
    with pytest.raises(NoConnection, match="localhost"):
        await reached(Address("localhost", address.port))


async def test_a_host_that_takes_no_connection_is_waited_for_for_some_time_only(monkeypatch: pytest.MonkeyPatch):
    """Its queue of connections is full, so that Linux leaves further ones without an answer."""
    monkeypatch.setattr(http_stream, "CONNECT_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as waiting:
        for _ in range(2):
            waiting.enter_context(client := socket.socket()).setblocking(False)
            client.connect_ex(server.getsockname())
        with pytest.raises(NoConnection, match=r"no answer within 0\.2 s"):
            await reached(Address("127.0.0.1", server.getsockname()[1]))


async def test_a_server_that_is_silent_is_named_with_the_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_server, "ANSWER_TIMEOUT_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(HttpError, match=r"does not answer at /v1/models within 0\.2 s"),
    ):
        await bench_server.first_model(Address("127.0.0.1", silent.getsockname()[1]))


async def test_the_path_has_the_prefix_and_the_header_an_address_of_ipv6_in_brackets():
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await ask(Address("::1", port, prefix="/models/chat", ip="127.0.0.1"), "/v1/models", None)
    assert asked[0].startswith(b"GET /models/chat/v1/models HTTP/1.1\r\nHost: [::1]:%d\r\n" % port)


async def test_an_answer_that_never_ends_takes_no_more_than_a_bound():
    endless = CHUNKED + chunk(b"x" * (4 << 20)) * 17
    async with serving([endless]) as address:
        with pytest.raises(HttpError, match="more than 64 MiB"):
            await ask(address, "/", None)
