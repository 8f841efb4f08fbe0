"""A web server with the console's own files and a made-up feed: `python -m tests.console.stand_in` shows it.

It answers in the place of a gateway where a test wants more than a small machine can run: see made_up.py.
"""

import contextlib
import json
import mimetypes
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from services.gateway.console.static_files import PLOTLY, POLICY, plotly_file
from tests.console.made_up import MadeUpFeed

STATIC = Path(__file__).parents[2] / "services" / "gateway" / "console" / "static"


class StandIn(ThreadingHTTPServer):
    """Serves on a free port of loopback until it is shut down. `feed` goes on for each second that somebody listens."""

    daemon_threads = True

    def __init__(self, feed: MadeUpFeed, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.feed = feed
        self.ending = False

    @property
    def url(self) -> str:
        """The console's address."""
        return f"http://127.0.0.1:{self.server_port}/console/"


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        path = self.path.removeprefix("/console/")
        file = STATIC / (path or "index.html")
        if path == "feed":
            self._answer(200, "text/event-stream")
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._write_feed()
        elif path == PLOTLY and self.server.feed.has_plotly and (plotly := plotly_file()) is not None:
            self._send(plotly)
        elif "/" not in path and file.is_file():
            self._send(file)
        else:
            self._answer(404, "application/json")
            self.wfile.write(b'{"error": {"message": "Nothing is here."}}')

    def _send(self, file: Path) -> None:
        self._answer(200, mimetypes.guess_type(file.name)[0] or "text/plain")
        self.wfile.write(file.read_bytes())

    def _answer(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-security-policy", POLICY)
        self.end_headers()

    def _write_feed(self) -> None:
        feed = self.server.feed
        for name, data in feed.beginning():
            self._event(name, data)
        while not self.server.ending:
            time.sleep(1)
            for name, data in feed.next_second():
                self._event(name, data)

    def _event(self, name: str, data: object) -> None:
        self.wfile.write(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the browser's own log says what failed."""


@contextlib.contextmanager
def serving(feed: MadeUpFeed, port: int = 0) -> Iterator[StandIn]:
    """A stand-in that serves this feed; the context ends it."""
    server = StandIn(feed, port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ending = True
        server.shutdown()
        server.server_close()
        thread.join(10)


if __name__ == "__main__":
    with serving(MadeUpFeed(time.time()), 8099) as stand_in:
        print(stand_in.url, flush=True)
        threading.Event().wait()
