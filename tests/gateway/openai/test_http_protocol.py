"""What is written to a connection, and when it goes out."""

import asyncio
from typing import Any, cast

from services.gateway.http.http_protocol import GatheringTransport, PendingWrites


class Line:
    """An asyncio.Transport that shows what reaches it."""

    def __init__(self, *, broken: bool = False) -> None:
        self.sent: list[bytes | str] = []
        self.broken = broken

    def write(self, data: bytes) -> None:
        if self.broken:
            raise RuntimeError("the handler is closed")
        self.sent.append(data)

    def close(self) -> None:
        self.sent.append("closed")


def gathering(line: Line, pending: PendingWrites) -> GatheringTransport:
    return GatheringTransport(cast(Any, line), pending)


async def test_what_is_written_in_one_turn_of_the_loop_goes_out_at_its_end_in_one_write():
    pending, lines = PendingWrites(), [Line(), Line()]
    for line in lines:
        transport = gathering(line, pending)
        transport.write(b"head ")
        transport.write_chunk(b"data: 1")
    assert [line.sent for line in lines] == [[], []]
    await asyncio.sleep(0)
    assert [line.sent for line in lines] == [[b"head 7\r\ndata: 1\r\n"]] * 2
    transport.write(b"end")
    await asyncio.sleep(0)
    assert line.sent[1:] == [b"end"]


async def test_closing_leaves_nothing_unwritten_and_a_lost_connection_is_left_alone():
    pending, closed, lost = PendingWrites(), Line(), Line(broken=True)
    for line in (closed, lost):
        (transport := gathering(line, pending)).write(b"last words")
        transport.lost = line is lost
        if line is closed:
            transport.close()
    assert closed.sent == [b"last words", "closed"]
    await asyncio.sleep(0)
    assert closed.sent == [b"last words", "closed"]


async def test_one_that_cannot_be_written_to_does_not_keep_others_waiting():
    pending, lines = PendingWrites(), [Line(broken=True), Line()]
    for line in lines:
        gathering(line, pending).write(b"x")
    await asyncio.sleep(0)
    assert lines[1].sent == [b"x"]
