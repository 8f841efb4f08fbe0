"""The HTTP server's life, as a process: what it does with signals and with an address that is taken."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import pytest

from services.gateway.listening import ListenError, listen

SERVER = """
import asyncio
from services.gateway.listening import listen
from services.gateway.openai.serving import serve

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in range(3):
        await send({"type": "http.response.body", "body": b"part ", "more_body": True})
        await asyncio.sleep(0.3 if scope["path"] == "/slow" else 0)
    await send({"type": "http.response.body", "body": b"end"})

async def main():
    listener = listen("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    await serve(app, listener, 30)

asyncio.run(main())
"""


@contextmanager
def server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def test_sigterm_lets_an_answer_in_progress_end_and_the_exit_code_is_0():
    with server() as (process, url), httpx2.stream("GET", f"{url}/slow", timeout=60) as response:
        parts = response.iter_text()
        assert next(parts).startswith("part")
        process.send_signal(signal.SIGTERM)
        assert "".join(parts).endswith("end")
        assert process.wait(timeout=60) == 0


def test_a_taken_port_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=rf"^127\.0\.0\.1:{port} is in use already$"):
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
