"""A child for launcher tests: serves GET /ready on a port, after it said so. Several may serve on one port.

stand_in.py PORT [refuse | deaf | slow | once:FILE]
    refuse: ends at once with a line that says why        deaf: does not end on SIGTERM
    slow: never listens                                   once: as slow where the file is there, which it makes
"""

import json
import os
import signal
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from services.process import lifeline


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"pid": os.getpid()}).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a probe every tenth of a second is not worth a line."""


class SharingServer(HTTPServer):
    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()


def main(port: int, manner: str) -> None:
    lifeline.hold()
    print("reading weights", flush=True)
    if manner == "refuse":
        sys.exit("baton: missing tensor model.norm.weight")
    if manner == "deaf":
        signal.signal(signal.SIGTERM, lambda *_: print("told to end", flush=True))
    once = Path(manner.removeprefix("once:")) if manner.startswith("once:") else None
    if manner == "slow" or (once is not None and once.exists()):
        time.sleep(3600)
    if once is not None:
        once.touch()
    server = SharingServer(("127.0.0.1", port), Ready)
    print("listening", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
