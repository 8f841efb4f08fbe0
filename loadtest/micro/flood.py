"""A client for many streamed requests that costs as little as one in Python can.


Connections are kept alive, and an answer is only searched for its counts when it is over: the cores are left to the
server."""

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import uvloop

_LAST_CHUNK = b"0\r\n\r\n"
_EVENT = re.compile(rb'data: \{(?!.{0,200}?"choices": ?\[\])')  # one with a choice
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens": ?(\d+)')


@dataclass(slots=True)
class Tally:
    """Counts of a flood's answers."""

    seconds: float = 0.0
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    events: int = 0  # that have a choice in them
    errors: list[str] = field(default_factory=list)


def flood(port: int, path: str, bodies: Sequence[bytes], at_once: int) -> Tally:
    """POSTs all bodies to this port of loopback, `at_once` at a time, and waits for the answers to end."""
    return uvloop.run(_flood(port, path, bodies, at_once))


async def _flood(port: int, path: str, bodies: Sequence[bytes], at_once: int) -> Tally:
    tally = Tally()
    todo = [_request(port, path, body) for body in reversed(bodies)]
    connect = asyncio.get_running_loop().create_connection
    opened = [await connect(lambda: _Connection(todo, tally), "127.0.0.1", port) for _ in range(at_once)]
    connections = [connection for _, connection in opened]
    start = time.perf_counter()
    for transport, connection in opened:
        connection.begin(transport)
    await asyncio.gather(*(connection.done for connection in connections))
    tally.seconds = time.perf_counter() - start
    return tally


def _request(port: int, path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class _Connection(asyncio.Protocol):
    """Sends requests from `todo` one after the other until there are none left."""

    def __init__(self, todo: list[bytes], tally: Tally) -> None:
        self._todo = todo
        self._tally = tally
        self._answer = bytearray()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self, transport: asyncio.Transport) -> None:
        """Sends the first request."""
        self._transport = transport
        self._send_next()

    def _send_next(self) -> None:
        if self._todo:
            self._transport.write(self._todo.pop())
        else:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._answer += data
        if self._answer.endswith(_LAST_CHUNK) or not self._answer.startswith(b"HTTP/1.1 200"):
            self._note()
            self._answer.clear()
            self._send_next()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        if self._answer:
            self._tally.errors.append("an answer broke off")
        self.done.set_result(None)

    def _note(self) -> None:
        tally, answer = self._tally, bytes(self._answer)
        if not answer.startswith(b"HTTP/1.1 200") or not (tokens := _COMPLETION_TOKENS.findall(answer)):
            tally.errors.append(answer[-300:].decode(errors="replace"))
            return
        tally.requests += 1
        tally.output_tokens += int(tokens[-1])
        tally.prompt_tokens += int(_PROMPT_TOKENS.findall(answer)[-1])
        tally.events += len(_EVENT.findall(answer))
