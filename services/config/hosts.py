"""Hosts: who can reach an address."""

import ipaddress


def is_loopback(host: str) -> bool:
    """True for an address that this machine alone reaches."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name: who knows where it leads
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # gRPC listens at ::ffff:127.0.0.1
    return bool((mapped or address).is_loopback)
