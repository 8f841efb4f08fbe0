"""Certificates in files, which may change while a process runs.

Whoever needs a certificate asks for the current one, at each new connection: three files are looked at, and read again
where they changed. What is read is tried before it is used: key and certificate belong together, and the certificate is
one of its authority's and in its time. Files that fail, as in the middle of a change, leave the older ones in use.

    TlsError   a certificate that cannot be used; the message is one line for a person
"""

import ssl
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from services.tls.roles import CertificateRole

_WRONG_PURPOSE = 26  # X509_V_ERR_INVALID_PURPOSE: a certificate for clients alone, which will do where no server is

log = structlog.get_logger()

_Stamp = tuple[tuple[int, int, int], ...]


class TlsError(Exception):
    """A certificate cannot be used. The message is one line for a person."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate with its key, as PEM, and those who sign the certificates of the other side."""

    chain: bytes
    key: bytes
    authorities: bytes | None  # None: the other side shows no certificate


@dataclass(frozen=True, slots=True)
class CertificatePaths:
    """The files of a certificate."""

    chain: Path
    key: Path
    authorities: Path | None = None

    @classmethod
    def in_directory(cls, directory: Path) -> "CertificatePaths":
        """The files of a directory as cert-manager's Secrets have them: tls.crt, tls.key, ca.crt."""
        return cls(directory / "tls.crt", directory / "tls.key", directory / "ca.crt")

    @property
    def all(self) -> tuple[Path, ...]:
        """Two files, or three."""
        return (self.chain, self.key) + (() if self.authorities is None else (self.authorities,))


class CertificateFiles:
    """The current certificate of some files. May be asked on any thread."""

    def __init__(self, paths: CertificatePaths, roles: Collection[CertificateRole] = ()) -> None:
        """Reads the files. roles: those that the certificate has to name. Raises TlsError."""
        self.paths = paths
        self._roles = roles
        self._lock = threading.Lock()
        self._stamp = _stamp(paths)
        self._certificate = self._read()

    def current(self) -> Certificate:
        """The newest certificate that can be used: the same object as before where the files have not changed."""
        with self._lock:
            if (stamp := _stamp(self.paths)) != self._stamp:
                self._stamp = stamp  # each change is tried once
                self._read_again()
            return self._certificate

    def _read_again(self) -> None:
        try:
            self._certificate = self._read()
        except TlsError as error:
            log.error("certificate not taken; the older one stays in use", reason=str(error))
        else:
            log.info("certificate read again", file=str(self.paths.chain))

    def _read(self) -> Certificate:
        chain, key, *authorities = [_contents(path) for path in self.paths.all]
        names = _try(self.paths)
        if _stamp(self.paths) != self._stamp:
            raise TlsError(f"{self.paths.chain} changed while it was read")
        if names is not None and (missing := [role.dns_name for role in self._roles if role.dns_name not in names]):
            has = ", ".join(sorted(names)) or "no DNS name"
            raise TlsError(f"{self.paths.chain} is for {has}; here it must be for {' and '.join(missing)}")
        return Certificate(chain, key, authorities[0] if authorities else None)


def _stamp(paths: CertificatePaths) -> _Stamp | None:
    """A value that changes with any of the files; None: one cannot be looked at."""
    try:
        found = [path.stat() for path in paths.all]
    except OSError:
        return None
    return tuple((file.st_ino, file.st_size, file.st_mtime_ns) for file in found)


def _contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{path} cannot be read: {error.strerror}") from error


def _try(paths: CertificatePaths) -> set[str] | None:
    """The DNS names of the certificate; None: they are not known. Raises TlsError where it cannot be used."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(paths.chain, paths.key, password="")  # a key with a password is refused, not asked for
    except (ssl.SSLError, OSError) as error:
        raise TlsError(f"{paths.chain} and {paths.key} are no certificate with its key: {_words(error)}") from error
    if paths.authorities is None:
        return None
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    try:
        client.load_verify_locations(paths.authorities)
    except (ssl.SSLError, OSError) as error:
        raise TlsError(f"{paths.authorities} has no certificate of an authority: {_words(error)}") from error
    try:
        return _names_seen(server, client)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _WRONG_PURPOSE:
            return None
        raise TlsError(f"{paths.chain} is refused by {paths.authorities}: {error.verify_message}") from error


def _names_seen(server: ssl.SSLContext, client: ssl.SSLContext) -> set[str]:
    """The DNS names that a client sees in the server's certificate: both shake hands in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    seer = client.wrap_bio(to_client, to_server)
    waiting = [seer, server.wrap_bio(to_server, to_client, server_side=True)]
    while waiting:
        for end in list(waiting):
            with suppress(ssl.SSLWantReadError):  # it is the other end's turn
                end.do_handshake()
                waiting.remove(end)
    seen: Any = (seer.getpeercert() or {}).get("subjectAltName", ())
    return {name for kind, name in seen if kind == "DNS"}


def _words(error: OSError) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return (reason or type(error).__name__).lower().replace("_", " ")
