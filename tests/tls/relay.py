"""Plain bytes in, TLS out: a client of whatever version of TLS the context has."""

import socket
import ssl
import threading
from contextlib import suppress
from typing import Self


class Relay:
    """Takes one connection, while its context lasts."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext, name: str) -> None:
        self._target, self._context, self._name = (host, port), context, name
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.version: str | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._thread.join(10)

    def _run(self) -> None:
        with suppress(OSError):
            client, _ = self._listener.accept()
            plain = socket.create_connection(self._target)
            with client, self._context.wrap_socket(plain, server_hostname=self._name) as server:
                self.version = server.version()
                server.settimeout(0.01)
                client.settimeout(0.01)
                while _carry(client, server) and _carry(server, client):
                    pass


def _carry(source: socket.socket, target: socket.socket) -> bool:
    """False when the source has ended."""
    try:
        data = source.recv(65536)
    except TimeoutError:
        return True
    target.sendall(data)
    return bool(data)
