"""A hub on loopback: the few endpoints that a download needs, over directories on disk."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN = "hf_of-somebody-who-asked"


@dataclass
class Repository:
    """A model repository with one commit, on the branch main."""

    directory: Path
    gated: bool = False  # its files need the token, the list of them does not

    @property
    def commit(self) -> str:
        return hashlib.sha1(str(self.directory).encode()).hexdigest()

    def files(self) -> dict[str, bytes]:
        paths = (path for path in self.directory.rglob("*") if path.is_file())
        return {str(path.relative_to(self.directory)): path.read_bytes() for path in paths}


@dataclass
class Hub:
    """What it serves, and which files were taken from it."""

    url: str
    repositories: dict[str, Repository]
    taken: list[str] = field(default_factory=list)


@contextmanager
def serving(repositories: dict[str, Repository]) -> Iterator[Hub]:
    """A hub with these models, until the context ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = hub = Hub(f"http://127.0.0.1:{server.server_port}", repositories)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: pytest's output is for the tests."""

    def _answer(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        parts = self.path.partition("?")[0].strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        owner, name, what, revision, *rest = parts if len(parts) > 3 else (*parts, "revision", "main")
        repository = hub.repositories.get(f"{owner}/{name}")
        if repository is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", repository.commit):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif is_api:
            self._send(200, json.dumps(_describe(repository, f"{owner}/{name}", what)).encode())
        elif repository.gated and self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        else:
            if self.command == "GET":
                hub.taken.append(rest[-1])
            content = repository.files()["/".join(rest)]
            tag = hashlib.sha1(content).hexdigest()
            self._send(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": repository.commit})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _describe(repository: Repository, id: str, what: str) -> object:
    files = repository.files()
    if what == "revision":
        return {"id": id, "sha": repository.commit, "siblings": [{"rfilename": name} for name in files]}
    return [
        {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        for name, content in files.items()
    ]
