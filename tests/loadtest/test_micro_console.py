"""The listeners whose cost `python -m loadtest micro console` measures do listen."""

import asyncio
import socket
import threading

import pytest

from loadtest.cannot_run import CannotRun
from loadtest.micro import console
from tests.gateway.running_api import running_api
from tests.loadtest.bench_server import BenchServer, serving


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_OPENED_S", 0.3)


async def test_listeners_get_the_feed_of_a_gateway() -> None:
    async with running_api() as api:
        assert api.admin.base_url.port is not None
        assert await asyncio.to_thread(console.listen, api.admin.base_url.port, 2, 1.5) > 100


def test_another_answer_than_a_feed_is_no_measurement() -> None:
    with serving(BenchServer()) as server, pytest.raises(CannotRun, match=r"no feed: .* 404 Not Found"):
        console.listen(int(server.url.rpartition(":")[2]), 1, 0.3)


def test_a_feed_that_says_nothing_is_no_measurement() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def begin() -> None:
            connection, _ = listening.accept()
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            ended.wait(30)
            connection.close()

        ended, thread = threading.Event(), threading.Thread(target=begin)
        thread.start()
        with pytest.raises(CannotRun, match="says nothing"):
            console.listen(listening.getsockname()[1], 1, 0.3)
        ended.set()
        thread.join()
