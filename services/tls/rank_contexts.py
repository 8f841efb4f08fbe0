"""TLS 1.3 between the ranks of a worker on several hosts, each of which shows the other its certificate."""

import errno
import ssl

from services.tls.certificate import Certificate, load_authorities
from services.tls.files import CertificateFiles
from services.tls.roles import CertificateRole


class RankTls:
    """Makes the TLS ends of one process. Each connection has the certificate of its beginning."""

    def __init__(self, files: CertificateFiles, role: CertificateRole) -> None:
        """files: this process's certificate, and the authorities of the others. role: that the others have to have."""
        self._files, self._role = files, role

    def client_end(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject:
        """Returns the end of who connects. Its handshake raises OSError where the other is not of the role."""
        context = _context(ssl.PROTOCOL_TLS_CLIENT, self._files.current())
        return context.wrap_bio(incoming, outgoing, server_hostname=self._role.dns_name)

    def server_end(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject:
        """Returns the end of who was connected to. After its handshake `check_client` has to be asked."""
        context = _context(ssl.PROTOCOL_TLS_SERVER, self._files.current())
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0  # no connection is resumed
        return context.wrap_bio(incoming, outgoing, server_side=True)

    def check_client(self, end: ssl.SSLObject) -> None:
        """Raises OSError where the certificate of who connected is not of the role."""
        found = (end.getpeercert() or {}).get("subjectAltName", ())
        names = [str(entry[1]) for entry in found if entry[0] == "DNS"]
        if self._role.dns_name not in names:
            raise PermissionError(errno.EACCES, f"the certificate is for {', '.join(names) or 'no DNS name'}")


def _context(protocol: int, certificate: Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    certificate.load_into(context)
    assert certificate.authorities is not None, "certificates between processes have authorities"
    load_authorities(context, certificate.authorities)
    return context
