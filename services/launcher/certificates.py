"""The certificates of one `baton up --tls`: where each is, and how all are made.

ca.crt                       the authority's, for clients
clients/                     the gateway's, which clients see
gateway/ prefill/ decode/    those that the processes show each other
operator/                    the launcher's, and that of `baton drain --mtls`
"""

import socket
from collections.abc import Mapping
from pathlib import Path

from services.tls.files import CertificatePaths
from services.tls.roles import CertificateRole

ROLES: Mapping[CertificateRole, tuple[CertificateRole, ...]] = {
    CertificateRole.GATEWAY: (CertificateRole.GATEWAY,),
    CertificateRole.PREFILL: (CertificateRole.PREFILL, CertificateRole.WORKER),
    CertificateRole.DECODE: (CertificateRole.DECODE, CertificateRole.WORKER),
    CertificateRole.OPERATOR: (CertificateRole.OPERATOR,),
}
_EVERY_ADDRESS = ("0.0.0.0", "::")


def make(directory: Path, host: str) -> None:
    """Makes all of them. host: where the gateway listens for clients."""
    from services.launcher.authority import Authority

    authority = Authority()
    directory.mkdir(mode=0o700, exist_ok=True)
    ca_file(directory).write_bytes(authority.certificate)
    for role, names in ROLES.items():
        authority.issue([name.dns_name for name in names], of_role(directory, role))
    reached_as = socket.gethostname() if host in _EVERY_ADDRESS else host
    authority.issue(dict.fromkeys(["localhost", "127.0.0.1", "::1", reached_as]), directory / "clients")


def ca_file(directory: Path) -> Path:
    """The certificate that clients have to trust."""
    return directory / "ca.crt"


def of_role(directory: Path, role: CertificateRole) -> Path:
    """The directory with a role's certificate."""
    return directory / role.value


def of_clients(directory: Path) -> CertificatePaths:
    """The certificate that the gateway shows its clients."""
    return CertificatePaths.in_directory(directory / "clients")
