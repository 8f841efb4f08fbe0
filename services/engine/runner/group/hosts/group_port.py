"""The port at which rank 0 waits for the others. Anybody may come to it: strangers keep nobody out, and learn nothing
but that they are refused.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import structlog

from services.engine.runner.group.connection import Connection, ConnectionLostError, accepted
from services.engine.runner.group.hosts.host_messages import (
    MOST_GREETING_BYTES,
    Hello,
    Refused,
    RefusedError,
    StrangeMessageError,
)
from services.engine.runner.group.hosts.place import HostPlace
from services.protocol.model_files.base import ModelError

GREETING_S = 5.0  # for TLS, and again for the first message
_MOST_GREETED = 64  # at once; more are not answered
_PAUSE_S = 0.1

log = structlog.get_logger()


class GroupPort:
    """Listens until it is closed, and hears the first message of whoever connects."""

    def __init__(self, place: HostPlace, welcome: Callable[[Connection, Hello], None]) -> None:
        """Opens the port. Raises ModelError where that is not possible.

        welcome: has the connection from then on; called on a thread that it may keep. What it raises of RefusedError
        is told to the other end.
        """
        self._tls, self._welcome = place.tls, welcome
        self._greeted = threading.Semaphore(_MOST_GREETED)
        self._closed = threading.Event()
        try:
            found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            self._listening = socket.create_server(address[:2], family=family, backlog=_MOST_GREETED)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ModelError(f"--group {place.address} is where rank 0 listens: {reason}") from error
        threading.Thread(target=self._accept, name="group port", daemon=True).start()

    def close(self) -> None:
        """Closes the port."""
        self._closed.set()
        with suppress(OSError):  # it may be closed
            self._listening.shutdown(socket.SHUT_RDWR)  # which ends the wait of the other thread
        self._listening.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connected, address = self._listening.accept()
            except OSError as error:
                if not self._closed.wait(_PAUSE_S):  # who came has left, or no descriptor is left
                    log.warning("nobody comes through the group's port", reason=str(error))
                continue
            if self._greeted.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(connected, str(address[0])), daemon=True).start()
            else:
                connected.close()

    def _greet(self, connected: socket.socket, host: str) -> None:
        """Hears who it is."""
        try:
            try:
                connection, hello = self._hear(connected)
            finally:
                self._greeted.release()
        except (ConnectionLostError, StrangeMessageError) as error:
            log.warning("a stranger at the group's port", host=host, reason=str(error))
            return
        try:
            self._welcome(connection, hello)
        except (RefusedError, ConnectionLostError) as error:
            log.warning("a rank is refused", rank=hello.rank, host=host, reason=str(error))
            if isinstance(error, RefusedError):
                _refuse(connection, error)
            connection.close()

    def _hear(self, connected: socket.socket) -> tuple[Connection, Hello]:
        connection = accepted(connected, self._tls, most_bytes=MOST_GREETING_BYTES, patience_s=GREETING_S)
        late = threading.Timer(GREETING_S, connection.close)  # bytes that drip prolong every wait but this one
        late.daemon = True
        late.start()
        try:
            return connection, Hello.unpack(connection.receive())
        except RefusedError as error:
            connection.close()
            raise StrangeMessageError("a refusal first") from error
        except BaseException:
            connection.close()
            raise
        finally:
            late.cancel()


def _refuse(connection: Connection, error: RefusedError) -> None:
    try:
        connection.send(Refused(reason=str(error), again=error.again).pack())
    except ConnectionLostError as lost:
        log.warning("a refusal was not heard", reason=str(lost))
