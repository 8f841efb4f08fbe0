"""TLS of connections that are not gRPC's: a server's to its clients, 1.3 and nothing older.

A client that sends a plain HTTP request instead gets an answer in plain HTTP that says so, and the log has it once.
"""

import ssl
from collections.abc import Callable
from typing import Any

import structlog

from services.tls.certificate import Certificate
from services.tls.files import NOT_TAKEN, CertificateFiles

log = structlog.get_logger()


class _Connection(ssl.SSLObject):
    """A connection that answers a plain HTTP request within the handshake, which then waits for the client to close.

    What the client sends until then is thrown away: it has shown no key, and nothing else bounds it.
    """

    refuse: Callable[[], bytes]  # returns the answer, and logs
    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO
    _refused = False

    def do_handshake(self) -> None:
        """See ssl.SSLObject."""
        if self._refused:
            self.incoming.read()
            raise ssl.SSLWantReadError  # until the client or the time for handshakes ends the connection
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if error.reason != "HTTP_REQUEST":
                raise
            self._refused = True
            self.outgoing.write(self.refuse())
            raise ssl.SSLWantReadError from error  # the event loop sends what is to go out


class _ServerContext(ssl.SSLContext):
    """A context whose connections know how to answer plain HTTP."""

    sslobject_class = _Connection
    refuse: Callable[[], bytes]

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """See ssl.SSLContext."""
        connection = super().wrap_bio(incoming, outgoing, *args, **kwargs)
        assert isinstance(connection, _Connection)
        connection.incoming, connection.outgoing, connection.refuse = incoming, outgoing, self.refuse
        return connection


def server_context(files: CertificateFiles, plain_http_answer: bytes) -> ssl.SSLContext:
    """The context of a server that shows its clients the current certificate. Later connections get newer ones.

    plain_http_answer: for a client that sends plain HTTP, with its head.
    """
    used = refused = files.current()
    first = newest = _context(used)
    num_plain = 0

    def refuse() -> bytes:
        nonlocal num_plain
        num_plain += 1
        if num_plain == 1:
            log.warning("a client speaks plain HTTP at a port for TLS; its URL begins with https://")
        return plain_http_answer

    first.refuse = refuse

    def choose(connection: ssl.SSLObject, _name: str | None, _first: ssl.SSLContext) -> None:
        nonlocal used, newest, refused
        if (certificate := files.current()) is not used:
            try:
                newest, used = _context(certificate), certificate
            except Exception as error:  # no descriptor is left, say; the next connection tries again
                if certificate is not refused:
                    log.error(NOT_TAKEN, reason=repr(error))
                refused = certificate
        connection.context = newest

    first.sni_callback = choose  # called at the start of each handshake, with and without a name
    return first


def _context(certificate: Certificate) -> _ServerContext:
    context = _ServerContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["http/1.1"])
    certificate.load_into(context)
    return context
