"""A process that answers like an OpenAI server: openai_server.py PORT [--short] [--stay]

--short: one token less than asked for. --stay: starts a process that would outlive it, and says its id at /child.
"""

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Each answer ends its connection."""

    missing = 0
    child = 0

    def do_GET(self) -> None:
        if self.path == "/die":
            os._exit(9)
        pages = {"/v1/models": "{}", "/child": str(self.child), "/pid": str(os.getpid())}
        self.send_response(200 if self.path in pages else 404)
        self.end_headers()
        self.wfile.write(pages.get(self.path, "").encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = body["max_tokens"] - self.missing
        self.send_response(200)
        self.end_headers()
        for _ in range(tokens):
            self._event({"choices": [{"index": 0, "text": "a"}]})
        self._event({"choices": [], "usage": {"completion_tokens": tokens}})

    def _event(self, event: object) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


if __name__ == "__main__":
    if "--short" in sys.argv:
        Handler.missing = 1
    if "--stay" in sys.argv:
        Handler.child = subprocess.Popen(["sleep", "600"]).pid
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
