"""TLS of connections that are not gRPC's: a server's to its clients, 1.3 and nothing older."""

import ssl

import structlog

from services.tls.certificate import Certificate
from services.tls.files import NOT_TAKEN, CertificateFiles

log = structlog.get_logger()


def server_context(files: CertificateFiles) -> ssl.SSLContext:
    """The context of a server that shows its clients the current certificate. Later connections get newer ones."""
    used = refused = files.current()
    first = newest = _context(used)

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


def _context(certificate: Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["http/1.1"])
    certificate.load_into(context)
    return context
