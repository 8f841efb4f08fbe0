"""A throw-away certificate authority: for one `baton up --tls`, which nobody else has a reason to trust."""

import datetime
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.tls.files import CertificatePaths

_SKEW = datetime.timedelta(minutes=5)  # of the clocks of others
_LIFETIME = datetime.timedelta(days=30)
_BOTH_SIDES = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]


class Authority:
    """Signs certificates. Its key is in this process's memory alone."""

    def __init__(self, name: str = "Baton, for one run") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(self._key, self._name, self._name, _LIFETIME)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._certificate = builder.add_extension(_usage(signs=True), critical=True).sign(self._key, hashes.SHA256())

    @property
    def certificate(self) -> bytes:
        """The authority's certificate, as PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self, names: Iterable[str], directory: Path, lifetime: datetime.timedelta = _LIFETIME
    ) -> CertificatePaths:
        """Writes a new key, a certificate for these DNS names and IP addresses, and the authority's own.

        The directory is made where it is not there. Only this user can read the files. lifetime: from now on; one that
        is negative makes a certificate that is out of date.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        known = [_general_name(name) for name in names]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(known[0].value))])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = _builder(key, subject, self._name, lifetime)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(_BOTH_SIDES), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(known), critical=False)
        certificate = builder.add_extension(issuer, critical=False).sign(self._key, hashes.SHA256())
        paths = CertificatePaths.in_directory(directory)
        contents = (certificate.public_bytes(serialization.Encoding.PEM), _pem(key), self.certificate)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, content in zip(paths.all, contents, strict=True):
            _write_private(path, content)
        return paths


def _builder(
    key: ec.EllipticCurvePrivateKey, subject: x509.Name, issuer: x509.Name, lifetime: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(min(now, now + lifetime) - _SKEW).not_valid_after(now + lifetime)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.DNSName | x509.IPAddress:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_private(path: Path, content: bytes) -> None:
    """Replaces the file at once: whoever reads it finds all of the old content or all of the new."""
    beside = path.with_suffix(".new")
    beside.unlink(missing_ok=True)
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    beside.replace(path)
