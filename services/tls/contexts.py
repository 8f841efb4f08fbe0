"""TLS of connections that are not gRPC's: a server's to its clients, 1.3 and nothing older."""

import ssl
from contextlib import suppress

from services.tls.files import CertificateFiles


def server_context(files: CertificateFiles) -> ssl.SSLContext:
    """The context of a server that shows its clients the current certificate. Later connections get newer ones."""
    used = files.current()
    newest = _context(files)

    def choose(connection: ssl.SSLObject, _name: str | None, _first: ssl.SSLContext) -> None:
        nonlocal used, newest
        if (certificate := files.current()) is not used:
            with suppress(OSError):  # the files change right now; the next connection tries again
                used, newest = certificate, _context(files)
        connection.context = newest

    first = _context(files)
    first.sni_callback = choose  # called at the start of each handshake, with and without a name
    return first


def _context(files: CertificateFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(files.paths.chain, files.paths.key)
    return context
