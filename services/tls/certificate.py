"""A certificate with its key, tried as the other side of a connection sees it.

Both sides shake hands in memory: only that tells whether TLS can use the key, whether the certificate is in its time
and by its authority, and which names are seen.

    FileRefused
    └── TlsError   a certificate that cannot be used; the message is one line for a person
"""

import os
import ssl
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from services.files.followed import FileRefused

# X509_V_ERR_... of OpenSSL
_NOT_YET_VALID, _EXPIRED, _INVALID_PURPOSE = 9, 10, 26

# The kinds of keys with which gRPC's library (BoringSSL) signs and checks a handshake by default, each as the
# AlgorithmIdentifier of a certificate's key. No other part of a certificate has these bytes.
_KEYS_OF_GRPC = tuple(
    bytes.fromhex(identifier)
    for identifier in (
        "300d06092a864886f70d0101010500",  # RSA
        "301306072a8648ce3d020106082a8648ce3d030107",  # P-256
        "301006072a8648ce3d020106052b81040022",  # P-384
    )
)


class TlsError(FileRefused):
    """A certificate cannot be used. The message is one line for a person."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate with its key, as PEM, and those who sign the certificates of the other side."""

    chain: bytes
    key: bytes = field(repr=False)
    authorities: bytes | None = None  # None: the other side shows no certificate

    def load_into(self, context: ssl.SSLContext, password: str = "") -> None:
        """Loads this certificate into a context, which shows it to others. Raises OSError.

        password: of the key; empty: a key with a password is refused, not asked for.
        """
        with as_file(self.chain) as chain, as_file(self.key) as key:
            context.load_cert_chain(chain, key, password)


@dataclass(frozen=True, slots=True)
class Seen:
    """The certificate as the other side saw it. names: its DNS names."""

    names: frozenset[str]
    der: bytes

    @property
    def is_for_grpc(self) -> bool:
        """True where gRPC can use the kind of key."""
        return any(identifier in self.der for identifier in _KEYS_OF_GRPC)


def load_authorities(context: ssl.SSLContext, authorities: bytes) -> None:
    """Loads these authorities into a context, which trusts them. Raises OSError."""
    with as_file(authorities) as file:
        context.load_verify_locations(file)


def seen_by_others(certificate: Certificate, password: str = "") -> Seen:
    """Returns what the other side sees of a server's certificate, or of one for clients alone. Raises OSError.

    Where the certificate has no authorities its own chain is trusted, so that its time alone is checked.
    """
    try:
        return _shake_hands(certificate, password, shown_by_server=True)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code != _INVALID_PURPOSE:
            raise
    return _shake_hands(certificate, password, shown_by_server=False)


def is_out_of_time(error: ssl.SSLError) -> bool:
    """True where the other side refused a certificate since it has ended, or has not begun."""
    return isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in (_NOT_YET_VALID, _EXPIRED)


def words_of(error: OSError) -> str:
    """The reason that OpenSSL or the system gives."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return (reason or type(error).__name__).lower().replace("_", " ")


def _shake_hands(certificate: Certificate, password: str, *, shown_by_server: bool) -> Seen:
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    certificate.load_into(server, password)
    seer = client
    if not shown_by_server:
        certificate.load_into(client, password)
        client.verify_mode, server.verify_mode = ssl.CERT_NONE, ssl.CERT_REQUIRED
        seer = server
    load_authorities(seer, certificate.authorities or certificate.chain)
    if certificate.authorities is None:
        seer.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    waiting = list(ends)
    while waiting:
        for end in list(waiting):
            with suppress(ssl.SSLWantReadError):  # it is the other end's turn
                end.do_handshake()
                waiting.remove(end)
    sight = ends[0] if shown_by_server else ends[1]
    found: Any = (sight.getpeercert() or {}).get("subjectAltName", ())
    der = sight.getpeercert(binary_form=True)
    return Seen(frozenset(name for kind, name in found if kind == "DNS"), der or b"")


@contextmanager
def as_file(content: bytes) -> Iterator[str]:
    """A path of these bytes, for a library that reads nothing but files: what is tried is what was read.

    Raises TlsError where no descriptor is left.
    """
    if sys.platform == "linux":
        try:
            descriptor = os.memfd_create("pem")  # is on no disk, and closed in children
        except OSError as error:
            raise TlsError(f"no certificate can be tried at this moment: {error.strerror}") from error
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            yield f"/proc/self/fd/{descriptor}"
    else:
        with tempfile.NamedTemporaryFile() as named:
            named.write(content)
            named.flush()
            yield named.name
