"""Connections between ranks on different hosts: messages over TCP, plain or with TLS, and a beat that shows life.

    ┌────────────────┬───────────────┐
    │ length, 4 bytes│ message       │     a length of 0 is a beat, which the receiver does not show
    └────────────────┴───────────────┘

A connection is lost when the other end closes it, and when nothing comes from it for `patience_s`, not even a beat: the
process was stopped then, or its host is cut off. TLS is computed beside the socket (memory BIOs), since one thread may
send while another receives, which OpenSSL does not allow at one end.
"""

import errno
import itertools
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from services.tls.certificate import words_of
from services.tls.rank_contexts import RankTls

T = TypeVar("T")
BEAT_S = 0.2
_LENGTH = struct.Struct("<I")
_PIECE_BYTES = 256 * 1024  # that are read, or encrypted, at once


class ConnectionLostError(Exception):
    """The connection is lost, or could not be made. The message is one line."""


class _Wire(Protocol):
    """A stream of bytes both ways. One thread reads and one writes at a time."""

    def read(self) -> bytes:
        """Returns the next bytes; none: the other end has closed. Raises OSError."""

    def write(self, data: bytes) -> None:
        """Writes all of it. Raises OSError."""


class Connection:
    """One end of a connection. All methods may be called on any thread."""

    def __init__(self, connected: socket.socket, wire: _Wire, patience: "_Patience", most_bytes: int) -> None:
        self.most_bytes = most_bytes  # of a message: a longer one that comes ends the connection
        self._patience = patience
        self._socket, self._wire = connected, wire
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._received = bytearray()  # and not yet returned
        self._closed = threading.Event()

    @property
    def local_host(self) -> str:
        """Returns the address of this host at which the other end reaches it."""
        return str(self._socket.getsockname()[0])

    @property
    def is_closed(self) -> bool:
        """Returns True once this end was closed."""
        return self._closed.is_set()

    def set_patience(self, patience_s: float | None) -> None:
        """Sets after how many seconds of silence, or of an end that reads nothing, the connection is lost; None: it is
        not, for who closes it himself.
        """
        self._patience.seconds = patience_s

    def beat(self) -> None:
        """Shows the other end from now on that this process lives, on a thread of its own."""
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def send(self, parts: Sequence[bytes]) -> None:
        """Sends the parts as one message, of one byte or more. Raises ConnectionLostError."""
        length = sum(map(len, parts))
        assert 0 < length < 1 << 32, f"a message of {length} bytes"
        self._write(b"".join((_LENGTH.pack(length), *parts)))

    def receive(self) -> bytearray:
        """Returns the next message when it is there. Raises ConnectionLostError."""
        with self._reading:
            while True:
                (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
                if length > self.most_bytes:
                    self._shut()
                    raise ConnectionLostError(f"a message of {length} bytes came, and {self.most_bytes} are allowed")
                if length:
                    return self._take(length)

    def close(self) -> None:
        """Closes the connection: whoever waits in a method of either end gets ConnectionLostError."""
        self._shut()
        with self._reading, self._writing:
            self._socket.close()

    def _shut(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # the other end was first

    def _take(self, length: int) -> bytearray:
        while len(self._received) < length:
            try:
                data = b"" if self._closed.is_set() else self._wire.read()
            except TimeoutError:
                raise ConnectionLostError(f"nothing came for {self._patience.seconds} s") from None
            except OSError as error:
                raise ConnectionLostError(_words(error)) from error
            if not data:
                raise ConnectionLostError("this end is closed" if self._closed.is_set() else "the other end has closed")
            self._received += data
        taken = self._received[:length]
        del self._received[:length]
        return taken

    def _write(self, data: bytes) -> None:
        with self._writing:
            if self._closed.is_set():
                raise ConnectionLostError("this end is closed")
            try:
                self._wire.write(data)
            except OSError as error:
                self._shut()  # part of the message may have gone
                lost = f"nothing was read for {self._patience.seconds} s" if isinstance(error, TimeoutError) else None
                raise ConnectionLostError(lost or _words(error)) from error

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            try:
                self._write(_LENGTH.pack(0))
            except ConnectionLostError:
                return  # it is closed now, which who receives is told


def connect(host: str, port: int, tls: RankTls | None, *, most_bytes: int, patience_s: float) -> Connection:
    """Connects to another rank. patience_s: for this too. Raises ConnectionLostError."""
    try:
        connected = socket.create_connection((host, port), patience_s)
    except OSError as error:
        raise ConnectionLostError(f"{host}:{port}: {_words(error)}") from error
    return _over(connected, tls, most_bytes, patience_s, is_server=False)


def accepted(connected: socket.socket, tls: RankTls | None, *, most_bytes: int, patience_s: float) -> Connection:
    """Returns this end of a connection that another rank has made. patience_s: for TLS's handshake too.

    Raises ConnectionLostError.
    """
    return _over(connected, tls, most_bytes, patience_s, is_server=True)


def _over(
    connected: socket.socket, tls: RankTls | None, most_bytes: int, patience_s: float, *, is_server: bool
) -> Connection:
    patience = _Patience(patience_s)
    try:
        connected.settimeout(BEAT_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain = _Plain(connected, patience)
        wire: _Wire = plain if tls is None else _Tls(plain, tls, patience_s, is_server=is_server)
    except OSError as error:
        connected.close()
        raise ConnectionLostError(_words(error)) from error
    except BaseException:
        connected.close()
        raise
    return Connection(connected, wire, patience, most_bytes)


@dataclass(slots=True)
class _Patience:
    """The seconds for which an end waits, which may change while it waits. A process that was stopped does not age."""

    seconds: float | None

    def waited(self, count: int) -> None:
        """Raises TimeoutError where so many waits of BEAT_S are too many."""
        if self.seconds is not None and count * BEAT_S >= self.seconds:
            raise TimeoutError


class _Plain:
    """Bytes as they are."""

    def __init__(self, connected: socket.socket, patience: _Patience) -> None:
        """connected: one whose waits are of BEAT_S."""
        self._socket, self._patience = connected, patience

    def read(self) -> bytes:
        """See `_Wire.read`."""
        return self._patiently(lambda: self._socket.recv(_PIECE_BYTES))

    def write(self, data: bytes) -> None:
        """See `_Wire.write`. It goes on as long as the other end reads anything."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._patiently(partial(self._socket.send, rest)) :]

    def _patiently(self, act: Callable[[], T]) -> T:
        for count in itertools.count(1):
            with suppress(TimeoutError):
                return act()
            self._patience.waited(count)
        raise AssertionError("endless")


class _Tls:
    """Bytes in TLS."""

    def __init__(self, plain: _Plain, tls: RankTls, most_s: float, *, is_server: bool) -> None:
        """Shakes hands, in so many seconds. Raises OSError where the other end is not trusted."""
        self._plain = plain
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        make = tls.server_end if is_server else tls.client_end
        self._end = make(self._incoming, self._outgoing)
        self._computing = threading.Lock()
        ends = time.monotonic() + most_s
        try:
            while not self._shake_hands():
                self._plain.write(self._outgoing.read())
                if not self._feed(self._plain.read()):
                    raise ConnectionResetError(errno.ECONNRESET, "the other end has closed")
                if time.monotonic() > ends:
                    raise TimeoutError
            if is_server:
                tls.check_client(self._end)
        finally:
            self._plain.write(self._outgoing.read())  # what is last, or why it is refused

    def read(self) -> bytes:
        """See `_Wire.read`."""
        while True:
            with self._computing:
                try:
                    return self._end.read(_PIECE_BYTES)
                except ssl.SSLWantReadError:
                    pass
            if not self._feed(self._plain.read()):
                return b""

    def write(self, data: bytes) -> None:
        """See `_Wire.write`."""
        rest = memoryview(data)
        while rest:
            with self._computing:
                rest = rest[self._end.write(rest[:_PIECE_BYTES]) :]
                encrypted = self._outgoing.read()
            self._plain.write(encrypted)

    def _shake_hands(self) -> bool:
        try:
            self._end.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def _feed(self, data: bytes) -> bool:
        with self._computing:
            self._incoming.write(data)
        return bool(data)


def _words(error: OSError) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else words_of(error)
