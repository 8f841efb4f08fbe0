"""`baton top`, `baton ls` and `baton requests`: what a running gateway tells, on a terminal."""

import asyncio
import json
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from services.config.option import Refusal
from services.process.terminal import width
from services.top.config import GatewayChoice, ListConfig, RequestConfig, TopConfig


def show_fleet(config: TopConfig) -> int:
    """Shows the fleet until a person ends it. Returns 0. Raises Refusal."""
    if find_spec("textual") is None:
        raise Refusal("`baton top` needs textual, which is not installed: pip install 'baton-serve[console]'")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Refusal("`baton top` needs a terminal; `baton ls` prints tables elsewhere")
    from services.top.feed import GatewayClient
    from services.top.screen.app import Top

    async def show() -> str | None:
        async with GatewayClient(config.gateway) as client:
            return await Top(client, FleetCommands(config.mtls)).run_async()

    if failure := asyncio.run(show()):
        raise Refusal(failure)
    return 0


def list_fleet(config: ListConfig, kinds: Sequence[str]) -> int:
    """Prints workers, links and requests, or those of these that are named. Returns 0. Raises Refusal."""
    from services.top import listing

    if unknown := [kind for kind in kinds if kind not in listing.KINDS]:
        raise Refusal(f"{unknown[0]!r} is none of {', '.join(listing.KINDS)}")
    wanted = kinds or listing.KINDS
    snapshot = _ask(config.gateway, lambda client: listing.take_snapshot(client, with_rates="workers" in wanted))
    if config.as_json:
        typer.echo(json.dumps(listing.as_values(snapshot, wanted, config.limit), indent=2))
    else:
        typer.echo(listing.as_text(snapshot, wanted, config.limit, _columns()))
    return 0


def show_request(config: RequestConfig, request_id: str) -> int:
    """Prints the record of one request. Returns 0. Raises Refusal."""
    from services.top import timeline

    record = _ask(config.gateway, lambda client: client.record(request_id))
    typer.echo(json.dumps(record, indent=2) if config.as_json else timeline.as_text(record, _columns()))
    return 0


def _ask(choice: GatewayChoice, question: Any) -> Any:
    from services.top.feed import GatewayClient, GatewayError

    async def ask() -> Any:
        async with GatewayClient(choice) as client:
            return await question(client)

    try:
        return asyncio.run(ask())
    except GatewayError as error:
        raise Refusal(str(error)) from error


def _columns() -> int | None:
    return width() if sys.stdout.isatty() else None


class FleetCommands:
    """Commands of `baton top`, which are those of the command line."""

    def __init__(self, mtls: Path | None) -> None:
        """mtls: directory with an operator's certificate."""
        self._mtls = mtls

    async def drain(self, worker: str) -> str:
        """See Commands."""
        from services.cli.drain import drain_worker

        return await drain_worker(worker, None, self._mtls)

    def launcher_of(self, gateway_pid: int) -> "RunningUp | None":
        """See Commands."""
        from services.launcher import control

        path = control.socket_of_parent(gateway_pid)
        return None if path is None else RunningUp(path)


class RunningUp:
    """A `baton up`, told at its socket."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: socket.socket | None = None  # of the last command

    def restart(self) -> Iterator[str]:
        """See Launcher."""
        return self._told("restart", "the restart")

    def scale(self, numbers: Mapping[str, int]) -> Iterator[str]:
        """See Launcher."""
        words = [f"{role}={number}" for role, number in numbers.items()]
        return self._told(" ".join(["scale", *words]), "the scaling")

    def leave(self) -> None:
        """See Launcher."""
        if self._connection is not None:
            with suppress(OSError):  # it has ended already
                self._connection.shutdown(socket.SHUT_RDWR)

    def _told(self, command: str, what: str) -> Iterator[str]:
        from services.cli import running

        self._connection = socket.socket(socket.AF_UNIX)
        return running.told(self._path, command, what, self._connection)
