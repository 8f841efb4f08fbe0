"""Certificates in files, which may change while a process runs.

Whoever needs a certificate asks for the current one, at each new connection: the files are looked at, and read again
where they changed (services/files). What is read is tried before it is used: key and certificate belong together, TLS
can use the key, and the certificate is one of its authority's and in its time. Files that fail, as in the middle of a
change, leave the older ones in use, and are tried again every few seconds.
"""

import ssl
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.files.followed import FileContent, FollowedFiles
from services.tls.certificate import (
    Certificate,
    Seen,
    TlsError,
    is_out_of_time,
    load_authorities,
    seen_by_others,
    words_of,
)
from services.tls.roles import CertificateRole

NOT_TAKEN = "certificate not taken; the older one stays in use"
READ_AGAIN = "certificate read again"

log = structlog.get_logger()


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
        self._files = FollowedFiles(paths.all, self._take, TlsError, NOT_TAKEN)

    def refused_s(self) -> float:
        """Seconds since the files as they are now were first refused; 0.0: they are in use. Looks at them first."""
        self.current()
        return self._files.refused_s()

    def current(self) -> Certificate:
        """The newest certificate that can be used: the same object as before where the files have not changed."""
        if self._files.look():
            log.info(READ_AGAIN, file=str(self.paths.chain))
        return self._files.value

    def _take(self, contents: Sequence[FileContent], older: Certificate | None) -> Certificate:
        certificate = Certificate(*(content.data for content in contents))
        if certificate == older:
            return older
        if self.paths.authorities is None:
            check_for_strangers(certificate, older, self.paths.chain, self.paths.key)
        else:
            self._check_roles(_check_between_processes(certificate, self.paths))
        return certificate

    def _check_roles(self, seen: Seen) -> None:
        if missing := [role.dns_name for role in self._roles if role.dns_name not in seen.names]:
            has = ", ".join(sorted(seen.names)) or "no DNS name"
            raise TlsError(f"{self.paths.chain} is for {has}; here it must be for {' and '.join(missing)}")


def check_for_strangers(
    certificate: Certificate, older: Certificate | None, chain: Path, key: Path, password: str = ""
) -> None:
    """Tries a certificate whose authority is not known here. Raises TlsError.

    One that is out of its time is refused where the older one is not: it is better than none, but than nothing else.
    """
    _check_key(certificate, chain, key, password)
    try:
        seen_by_others(certificate, password)
    except ssl.SSLCertVerificationError as error:
        if is_out_of_time(error) and older is not None and _is_in_time(older, password):
            raise TlsError(f"{chain} cannot replace one that is in its time: {words_of(error)}") from error
    except OSError as error:
        raise TlsError(f"{chain} has a key that TLS cannot use: {words_of(error)}") from error


def _is_in_time(certificate: Certificate, password: str) -> bool:
    try:
        seen_by_others(certificate, password)
    except ssl.SSLError as error:
        return not is_out_of_time(error)
    return True


def _check_between_processes(certificate: Certificate, paths: CertificatePaths) -> Seen:
    """Tries a certificate with its authority, over gRPC. Raises TlsError."""
    _check_key(certificate, paths.chain, paths.key)
    try:
        load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), certificate.authorities or b"")
    except OSError as error:
        raise TlsError(f"{paths.authorities} has no certificate of an authority: {words_of(error)}") from error
    try:
        seen = seen_by_others(certificate)
    except ssl.SSLCertVerificationError as error:
        raise TlsError(f"{paths.chain} is refused by {paths.authorities}: {words_of(error)}") from error
    except OSError as error:
        raise TlsError(f"{paths.chain} has a key that TLS cannot use: {words_of(error)}") from error
    if not seen.is_for_grpc:
        raise TlsError(f"{paths.chain} has a key that gRPC cannot use: it takes RSA, P-256 and P-384")
    return seen


def _check_key(certificate: Certificate, chain: Path, key: Path, password: str = "") -> None:
    try:
        certificate.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), password)
    except OSError as error:
        raise TlsError(f"{chain} and {key} are no certificate with its key: {words_of(error)}") from error
