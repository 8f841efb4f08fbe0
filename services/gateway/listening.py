"""The gateway's ports: how they are opened."""

import errno
import socket

BACKLOG = 2048


class ListenError(Exception):
    """The address cannot be listened on. The message is one line, for the person who chose the address."""


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Returns a listening socket; port 0 takes a free one. flag: the port's. Raises ListenError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ListenError(f"{host}:{port} is in use already; choose another with {flag}") from error
        raise ListenError(f"{host}:{port} cannot be listened on: {error.strerror}") from error


def inherit(fd: int) -> socket.socket:
    """Returns the launcher's socket, listening. It is one with that of another gateway, which may end before or after.

    A connection that one of them has not accepted when it ends is thus the other's. No process that this one starts has
    it as well: nobody would accept there.
    """
    listener = socket.socket(fileno=fd)
    listener.set_inheritable(False)
    listener.listen(BACKLOG)
    return listener
