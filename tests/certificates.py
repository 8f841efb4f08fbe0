"""Certificates for tests. Keys on a curve cost nothing."""

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from services.launcher.authority import Authority
from services.tls.files import CertificateFiles, CertificatePaths
from services.tls.roles import CertificateRole

LIFETIME = datetime.timedelta(days=1)
HOUR = datetime.timedelta(hours=1)
BOTH_SIDES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)

Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey | rsa.RSAPrivateKey


@dataclass(frozen=True)
class Certificates:
    """Makes the certificates of one test."""

    authority: Authority
    root: Path

    def paths(
        self,
        *names: CertificateRole | str,
        by: Authority | None = None,
        lifetime: datetime.timedelta = LIFETIME,
        directory: str | None = None,
    ) -> CertificatePaths:
        """New files: of a directory of their own, or in place of those of `directory`."""
        texts = [name.dns_name if isinstance(name, CertificateRole) else name for name in names]
        where = self.root / (directory or f"{len(list(self.root.iterdir()))}")
        return (by or self.authority).issue(texts, where, lifetime)

    def odd_paths(
        self,
        *names: CertificateRole | str,
        directory: str,
        begins_in: datetime.timedelta = -HOUR,
        ends_in: datetime.timedelta = LIFETIME,
        key: Key | None = None,
        purposes: tuple[x509.ObjectIdentifier, ...] = BOTH_SIDES,
    ) -> CertificatePaths:
        """Files like those of `paths`, with a time, a key or purposes that Baton's own authority gives to nothing."""
        paths = self.paths(*names, directory=f"{directory}.like")
        like = x509.load_pem_x509_certificate(paths.chain.read_bytes())
        now, key = datetime.datetime.now(datetime.UTC), key or ec.generate_private_key(ec.SECP256R1())
        builder = x509.CertificateBuilder(like.issuer, like.subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now + begins_in).not_valid_after(now + ends_in)
        alternative = like.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        builder = builder.add_extension(alternative.value, critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        certificate = builder.sign(self.authority._key, hashes.SHA256())
        private = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        contents = (
            certificate.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(serialization.Encoding.PEM, *private),
            self.authority.certificate,
        )
        made = CertificatePaths.in_directory(self.root / directory)
        made.chain.parent.mkdir(mode=0o700, exist_ok=True)
        for path, content in zip(made.all, contents, strict=True):
            path.write_bytes(content)
            path.chmod(0o600)
        return made

    def files(self, *names: CertificateRole | str) -> CertificateFiles:
        return CertificateFiles(self.paths(*names))

    def trusting(self, paths: CertificatePaths) -> CertificatePaths:
        """The same files, trusting this test's authority, whoever signed the certificate."""
        assert paths.authorities is not None
        paths.authorities.write_bytes(self.authority.certificate)
        return paths
