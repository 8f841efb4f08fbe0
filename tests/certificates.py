"""Certificates for tests. Keys on a curve cost nothing."""

import datetime
from dataclasses import dataclass
from pathlib import Path

from services.launcher.authority import Authority
from services.tls.files import CertificateFiles, CertificatePaths
from services.tls.roles import CertificateRole

LIFETIME = datetime.timedelta(days=1)


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

    def files(self, *names: CertificateRole | str) -> CertificateFiles:
        return CertificateFiles(self.paths(*names))

    def trusting(self, paths: CertificatePaths) -> CertificatePaths:
        """The same files, trusting this test's authority, whoever signed the certificate."""
        assert paths.authorities is not None
        paths.authorities.write_bytes(self.authority.certificate)
        return paths
