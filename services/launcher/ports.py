"""Ports: is one free, and which are, on this machine.

An answer holds for the moment only: whoever gets a port must still be ready to find it taken.
"""

import random
import socket
from collections.abc import Iterator

# Below the range from which kernels take the source ports of outgoing connections: the port of a worker that restarts
# is then not lost to the very connection attempts that its neighbours make to it.
_WORKER_PORTS = range(20000, 32000)


class PortUnavailable(Exception):
    """An address that cannot be listened on; the text says why."""


def check(host: str, port: int) -> None:
    """Raises PortUnavailable unless host:port can be listened on."""
    try:
        with _bound(host, port) as probe:
            probe.listen(1)  # two sockets may be bound with SO_REUSEADDR, but only one may listen
    except OSError as error:
        raise PortUnavailable(f"cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}") from error


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to host:port and does not listen yet. Raises PortUnavailable."""
    check(host, port)
    return _bound(host, port)


def free_ports(host: str, count: int) -> list[int]:
    """Finds `count` different free ports. Raises PortUnavailable when there are not enough."""
    found: list[int] = []
    for port in _shuffled(_WORKER_PORTS):
        if len(found) == count:
            return found
        if _is_free(host, port):
            found.append(port)
    raise PortUnavailable(f"there are no {count} free ports on {host}")


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError:
        found.close()
        raise
    return found


def _shuffled(ports: range) -> Iterator[int]:
    return iter(random.sample(ports, len(ports)))


def _is_free(host: str, port: int) -> bool:
    try:
        check(host, port)
    except PortUnavailable:
        return False
    return True
