"""Authorities and certificates, as the tests of TLS have them."""

from tests.tls.conftest import authority, certificates, other_authority

__all__ = ["authority", "certificates", "other_authority"]
