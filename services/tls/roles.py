"""Roles: what a process may do is what its certificate names it, as a DNS name."""

from enum import StrEnum


class CertificateRole(StrEnum):
    """A role that a certificate lets its holder have, by a DNS name: `gateway.baton.internal` and so on."""

    GATEWAY = "gateway"
    WORKER = "worker"  # of either role, beside the next two
    PREFILL = "prefill"
    DECODE = "decode"
    OPERATOR = "operator"  # `baton drain`, and the launcher's questions whether a worker is ready

    @property
    def dns_name(self) -> str:
        """The name in the certificate, and the one under which its holder is reached."""
        return f"{self.value}.baton.internal"
