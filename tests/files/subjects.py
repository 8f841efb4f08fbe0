"""What Baton follows in files, each by its real reader: what a test may replace there, and what is in use."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from redis.asyncio.connection import RedisSSLContext

from services.config import Right
from services.gateway.api.errors import ApiError
from services.gateway.keys.changes import add_key, revoke_key
from services.gateway.keys.key_entry import RateLimits
from services.gateway.keys.reload import FollowedKeys
from services.prefix_index.redis_tls import Contexts
from services.tls.files import CertificateFiles, CertificatePaths
from services.tls.roles import CertificateRole
from tests.certificates import Certificates


class Subject(Protocol):
    """Some followed files. The test damages `file`; `newer` is what is to be there in the end."""

    file: Path

    def newer(self) -> bytes:
        """Another good content of the file, which fits the other files."""

    async def uses_newer(self) -> bool:
        """Looks at the files, as the process does, and tells whether the newer content is in use."""


@dataclass
class Mtls:
    """The authorities of a directory of --mtls."""

    certificates: Certificates
    others: bytes  # of another authority, which are added
    files: CertificateFiles = field(init=False)

    def __post_init__(self) -> None:
        self.files = CertificateFiles(
            self.certificates.paths(CertificateRole.GATEWAY, directory="it"), [CertificateRole.GATEWAY]
        )
        assert self.files.paths.authorities is not None
        self.file = self.files.paths.authorities

    def newer(self) -> bytes:
        return self.certificates.authority.certificate + self.others

    async def uses_newer(self) -> bool:
        return (self.files.current().authorities or b"").strip() == self.newer().strip()


@dataclass
class ForClients:
    """The key and the certificate of --tls-cert and --tls-key, in one file."""

    certificates: Certificates
    files: CertificateFiles = field(init=False)

    def __post_init__(self) -> None:
        first, second = (self._pem(name) for name in ("first", "second"))
        self.file, self._newer = self.certificates.root / "both.pem", second
        self.file.write_bytes(first)
        self.file.chmod(0o600)
        self.files = CertificateFiles(CertificatePaths(self.file, self.file))

    def _pem(self, directory: str) -> bytes:
        paths = self.certificates.paths("localhost", directory=directory)
        return paths.key.read_bytes() + paths.chain.read_bytes()

    def newer(self) -> bytes:
        return self._newer

    async def uses_newer(self) -> bool:
        return self.files.current().chain.strip() == self._newer.strip()


@dataclass
class Redis:
    """The certificate, key and authority of a connection to Redis."""

    certificates: Certificates
    contexts: Contexts = field(default_factory=Contexts)

    def __post_init__(self) -> None:
        paths = self.certificates.paths(CertificateRole.GATEWAY, directory="redis")
        self.file = self.certificates.root / "both.pem"
        self.file.write_bytes(paths.key.read_bytes() + paths.chain.read_bytes())
        self.file.chmod(0o600)
        other = self.certificates.paths(CertificateRole.GATEWAY, directory="other")
        self._newer = other.key.read_bytes() + other.chain.read_bytes()
        self.settings = RedisSSLContext(
            certfile=str(self.file), ca_certs=str(paths.authorities), cert_reqs="required", check_hostname=True
        )
        self.first = self.contexts.current(self.settings)

    def newer(self) -> bytes:
        return self._newer

    async def uses_newer(self) -> bool:
        context = self.contexts.current(self.settings)
        assert isinstance(context, ssl.SSLContext)
        return context is not self.first


@dataclass
class Keys:
    """A keys file, in which one key is revoked."""

    directory: Path

    def __post_init__(self) -> None:
        self.file = self.directory / "keys.json"
        _, self.kept = add_key(self.file, "acme", [Right.API], 0, RateLimits())
        revoked, self.revoked = add_key(self.file, "acme", [Right.API], 0, RateLimits())
        self.followed = FollowedKeys(self.file)
        before = self.file.read_bytes()
        revoke_key(self.file, revoked)
        self._newer = self.file.read_bytes()
        self.file.write_bytes(before)

    def newer(self) -> bytes:
        return self._newer

    async def uses_newer(self) -> bool:
        await self.followed.look()
        assert self._opens(self.kept)
        return not self._opens(self.revoked)

    def _opens(self, key: str) -> bool:
        try:
            self.followed.keys.caller(lambda name: f"Bearer {key}" if name == "authorization" else "", Right.API)
        except ApiError:
            return False
        return True


def subjects(certificates: Certificates, others: bytes, directory: Path) -> dict[str, Callable[[], Subject]]:
    """All of them, by name."""
    return {
        "mtls": lambda: Mtls(certificates, others),
        "tls": lambda: ForClients(certificates),
        "redis": lambda: Redis(certificates),
        "keys": lambda: Keys(directory),
    }


SUBJECTS = ("mtls", "tls", "redis", "keys")
