"""The HTTP server's life, as a process: what it does when it is told to stop, and with an address that is taken."""

import http.client
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import pytest

from services.gateway.http.http_protocol import IDLE_S
from services.gateway.listening import ListenError, listen

SERVER = """
import asyncio, sys
from services.gateway.http.http_protocol import IDLE_S
from services.gateway.listening import listen
from services.gateway.http.serving import serving
from services.process.signals import on_ending_signals

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in range(3):
        await send({"type": "http.response.body", "body": b"part ", "more_body": True})
        await asyncio.sleep(0.3 if scope["path"] == "/slow" else 0)
    await send({"type": "http.response.body", "body": b"end"})

async def main():
    listener = listen("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    told = asyncio.Event()
    on_ending_signals(told.set, told.set)
    async with serving(app, listener) as server:
        await told.wait()
        await server.stop(float(sys.argv[1]))

asyncio.run(main())
"""


@contextmanager
def server(drain_timeout_s: float = 600) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", SERVER, str(drain_timeout_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def test_sigterm_lets_an_answer_in_progress_end_and_the_exit_code_is_0():
    with server() as (process, url):
        with httpx2.stream("GET", f"{url}/slow", timeout=60) as response:
            parts = response.iter_text()
            assert next(parts).startswith("part")
            process.send_signal(signal.SIGTERM)
            assert "".join(parts).endswith("end")
        assert process.wait(timeout=60) == 0


def until_it_accepts_no_more(url: str) -> None:
    """Waits until the server has begun to stop."""
    address = (httpx2.URL(url).host, httpx2.URL(url).port or 0)
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline
        try:
            socket.create_connection(address, timeout=60).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.01)


def test_a_request_on_an_idle_connection_is_served_after_sigterm_and_its_answer_is_the_last():
    """Else a request that is on its way when the connection is closed would be lost."""
    with server() as (process, url):
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        connection.request("GET", "/")
        assert connection.getresponse().read().endswith(b"end")
        process.send_signal(signal.SIGTERM)
        until_it_accepts_no_more(url)
        connection.request("GET", "/")
        answer = connection.getresponse()
        assert (answer.getheader("connection"), answer.read()[-3:]) == ("close", b"end")
        assert process.wait(timeout=60) == 0


def test_a_stream_whose_head_was_sent_before_sigterm_leaves_its_connection_open_for_one_more_answer():
    with server() as (process, url):
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        connection.request("GET", "/slow")
        stream = connection.getresponse()
        process.send_signal(signal.SIGTERM)
        assert stream.read().endswith(b"end")
        until_it_accepts_no_more(url)
        connection.request("GET", "/")
        answer = connection.getresponse()
        assert (answer.getheader("connection"), answer.read()[-3:]) == ("close", b"end")
        assert process.wait(timeout=60) == 0


@pytest.mark.long
def test_a_client_that_keeps_its_connection_does_not_keep_the_server():
    with server() as (process, url):
        used, unused = (http.client.HTTPConnection(url.removeprefix("http://"), timeout=60) for _ in range(2))
        unused.connect()
        used.request("GET", "/")
        used.getresponse().read()
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=300) == 0, "its answers have ended, and all the time for them has not"
        assert time.monotonic() - begin > IDLE_S - 1, "a client may use its connection for a while"
        used.close()
        unused.close()


def test_a_taken_port_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=rf"^127\.0\.0\.1:{port} is in use already; choose another with --port$"):
            listen("127.0.0.1", port)


def test_an_address_of_another_machine_is_one_line():
    with pytest.raises(ListenError, match="cannot be listened on"):
        listen("192.0.2.1", 0)


def test_ipv6_addresses_are_taken_as_they_are():
    with listen("::1", 0) as listener:
        answered = threading.Thread(target=lambda: listener.accept()[0].close())
        answered.start()
        socket.create_connection(listener.getsockname()[:2], timeout=60).close()
        answered.join()
