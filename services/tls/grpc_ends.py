"""The one place that makes gRPC channels and opens gRPC ports, plain or with TLS.

Servers look for a newer certificate at each connection. A channel has the certificate of its beginning for its whole
life, since Python's gRPC cannot change it: who connects again makes a new channel. A connection that is up goes on.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc

from services.config.hosts import AddressError, check_ip, split_address
from services.tls.certificate import Certificate
from services.tls.files import CertificateFiles
from services.tls.roles import CertificateRole

_RESOLVED_S = 5.0

Options = Sequence[tuple[str, int | str]]


class Channels:
    """Makes the channels of one process: with mutual TLS where it has a certificate."""

    def __init__(self, files: CertificateFiles | None = None) -> None:
        self._files = files

    def certificate(self) -> Certificate | None:
        """The certificate that a channel shows which is opened now: another object when the files have changed."""
        return None if self._files is None else self._files.current()

    def open(self, address: str, role: CertificateRole, options: Options) -> grpc.aio.Channel:
        """A channel to host:port. With TLS, whoever answers there has to be of this role.

        Raises AddressError for any other target of gRPC's, and for addresses that no worker has.
        """
        split_address(address)
        target = f"dns:///{address}"  # a host may be called as a scheme is: unix:1 is a path
        certificate = self.certificate()
        if certificate is None:
            return grpc.aio.insecure_channel(target, options=options)
        credentials = grpc.ssl_channel_credentials(certificate.authorities, certificate.key, certificate.chain)
        expected = ("grpc.ssl_target_name_override", role.dns_name)
        return grpc.aio.secure_channel(target, credentials, options=(*options, expected))


async def check_name(address: str) -> None:
    """Looks up the name in an address that another process named. Raises AddressError where it leads to no worker.

    gRPC looks it up again: this is no guard against whoever controls the name server.
    """
    host, port = split_address(address)
    try:
        async with asyncio.timeout(_RESOLVED_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port)
    except (OSError, TimeoutError) as error:
        raise AddressError(f"{host} has no address: {error or 'no answer in time'}") from error
    for _family, _type, _protocol, _name, (ip, *_) in found:
        check_ip(str(ip))


def open_port(server: grpc.aio.Server | grpc.Server, address: str, files: CertificateFiles | None) -> int:
    """Opens host:port for a server, and returns the port's number. Raises RuntimeError where that is not possible.

    files: of TLS, which asks clients for certificates where the files name authorities. None: plain text.
    """
    if files is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, _server_credentials(files))


def _server_credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    used = files.current()

    def newer() -> Any:  # None, where nothing has changed
        nonlocal used
        if (certificate := files.current()) is used:
            return None
        configuration = _configuration(certificate)  # where that fails, gRPC goes on with the older one and asks again
        used = certificate
        return configuration

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used), newer, require_client_authentication=used.authorities is not None
    )


def _configuration(certificate: Certificate) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(certificate.key, certificate.chain)], certificate.authorities)
