"""Hosts and addresses: who can reach one, and which ones Baton connects to.

Addresses of workers come from Redis and from other processes. Whoever can write there must not have a gateway or a
worker connect to what only its own machine reaches: a socket in the file system, or where a cloud tells machines their
credentials.
"""

import ipaddress
import re

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")  # as the last part of a name: of IPv4 in another notation
_METADATA = frozenset(
    map(ipaddress.ip_address, ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"))
)  # of clouds, beside those that are link-local
_BROADCAST = ipaddress.IPv4Address(0xFFFFFFFF)
_IPV4_LAST = tuple(  # IPv6 networks whose last 32 bits are an IPv4 address: compatible, mapped, translated, NAT64
    map(ipaddress.IPv6Network, ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96"))
)
_LOCAL_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")  # each network has its IPv4 addresses at other bits
_ISATAP = (0x5EFE, 0x200_5EFE)  # the third 32 bits; an IPv4 address follows


class AddressError(ValueError):
    """Text that is no host:port, or an address that no worker has."""


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of HOST:PORT, an IPv6 address without its brackets. Raises AddressError."""
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536 or not (bracketed or _is_host(host)):
        raise AddressError(f"{address[:300]!r} is not host:port")
    if bracketed:
        host = host[1:-1]
    if bracketed or _as_ip(host) is not None:
        check_ip(host)
    return host, int(port)


def check_ip(host: str) -> None:
    """Raises AddressError for what is no IP address, or one that no worker has."""
    address = _as_ip(host)
    if address is None:
        raise AddressError(f"{host[:300]!r} is no IP address")
    if any(map(_is_of_no_worker, (address, *_embedded(address)))):
        raise AddressError(f"{host} is no address of a worker: link-local, for many, for metadata, or for nobody")


def _is_of_no_worker(ip: IpAddress) -> bool:
    if isinstance(ip, ipaddress.IPv6Address) and (ip.is_site_local or ip in _LOCAL_NAT64):
        return True
    return ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip == _BROADCAST or ip in _METADATA


def _is_host(host: str) -> bool:
    if _as_ip(host) is not None:
        return ":" not in host  # IPv6 has brackets
    return (
        len(host) <= 253
        and _NAME.fullmatch(host) is not None
        and _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]) is None
    )


def _as_ip(host: str) -> IpAddress | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _embedded(address: IpAddress) -> list[ipaddress.IPv4Address]:
    """Returns the IPv4 addresses to which an IPv6 address leads."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found = [*(address.teredo or ())]
    if address.sixtofour is not None:
        found.append(address.sixtofour)
    if any(address in network for network in _IPV4_LAST) or int(address) >> 32 & 0xFFFFFFFF in _ISATAP:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return found


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
