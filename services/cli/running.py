"""Commands to a running `baton up`: `baton restart` and `baton scale`."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from socket import socket as Socket

import typer

from services.config.option import Refusal
from services.launcher import control


def restart(host: str | None, port: int) -> int:
    """Restarts the `baton up` whose gateway listens here for HTTP; prints a line for each process. Returns 0.

    host: None: there is one with this port. Raises Refusal.
    """
    return _ask(host, port, "restart", "the restart")


def scale(numbers: Sequence[str], host: str | None, port: int) -> int:
    """Tells such a `baton up` to start or end workers; prints a line for each, and which there are then. Returns 0.

    numbers: each ROLE=N. Raises Refusal.
    """
    for number in numbers:
        if re.fullmatch(r"[a-z]+=[0-9]+", number) is None:
            raise Refusal(f"{number!r} is not prefill=N or decode=N")
    return _ask(host, port, " ".join(["scale", *numbers]), "the scaling")


def told(socket: Path, command: str, what: str, connection: Socket | None = None) -> Iterator[str]:
    """Tells the `baton up` at this socket to do something; yields the lines of its answer. Raises Refusal.

    what: the command, as its refusal calls it. connection: see `control.ask`.
    """
    try:
        yield from control.ask(socket, command, connection=connection)
    except OSError as error:
        raise Refusal(f"no `baton up` of this user listens at {socket}: {error.strerror}") from error
    except control.CommandFailed as failure:
        raise Refusal(f"{what} went no further: {failure}") from failure


def _ask(host: str | None, port: int, command: str, what: str) -> int:
    try:
        socket = _socket(host, port)
    except OSError as error:
        where = port if host is None else f"{host}:{port}"
        raise Refusal(f"no `baton up` of this user serves at {where}; name its --port, and --host") from error
    for line in told(socket, command, what):
        typer.echo(line)
    return 0


def _socket(host: str | None, port: int) -> Path:
    """Raises Refusal where several will do, and OSError where none does."""
    if host is not None:
        return control.socket_path(host, port)
    found = control.listening_at(port)
    if len(found) > 1:
        names = ", ".join(path.stem for path in found)
        raise Refusal(f"several `baton up`s serve at port {port} of different addresses ({names}): name one by --host")
    if not found:
        raise FileNotFoundError(port)
    return found[0]
