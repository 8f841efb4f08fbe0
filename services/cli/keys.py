"""`baton keys`: adds keys to the file that gateways read, lists and revokes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.command_kinds import Command, Group
from services.config import Right
from services.config.option import Refusal

if TYPE_CHECKING:
    from services.gateway.keys.key_entry import KeyEntry

app = typer.Typer(
    cls=Group, help="Adds, lists and revokes the keys of a file that gateways read (--keys).", no_args_is_help=True
)

_File = Annotated[Path, typer.Argument(metavar="FILE", help="The keys file.")]
_Limit = Annotated[int | None, typer.Option(min=1, metavar="N", help="Default: no limit.")]

_HEAD = ("id", "tenant", "rights", "priority", "requests/min", "tokens/min", "concurrent", "created")


@app.command(name="add", cls=Command)
def _add(
    file: _File,
    tenant: Annotated[
        str, typer.Option(metavar="NAME", help="Whose key it is. Tenants share neither caches nor responses.")
    ] = "default",
    rights: Annotated[
        list[Right] | None,
        typer.Option(
            "--right",
            metavar="api|admin",
            help="api: all that clients ask for, the default. admin: /debug at the admin port. May be repeated.",
        ),
    ] = None,
    priority: Annotated[
        int,
        typer.Option(metavar="N", help="No request with the key comes before this priority; lower ones come sooner."),
    ] = 0,
    requests_per_minute: _Limit = None,
    tokens_per_minute: _Limit = None,
    max_concurrent: _Limit = None,
) -> None:
    """Adds a new key, and prints it: it is shown this once, and kept nowhere. Makes the file where there is none."""
    from services.gateway.keys.changes import add_key
    from services.gateway.keys.key_entry import RateLimits

    limits = RateLimits(
        requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute, max_concurrent=max_concurrent
    )
    with _in_words():
        id, key = add_key(file, tenant, rights or [Right.API], priority, limits)
    typer.echo(f"baton: key {id} of tenant {tenant} is in {file}; it is shown this once:", err=True)
    typer.echo(key)


@app.command(name="list", cls=Command)
def _list(file: _File) -> None:
    """Lists the keys of a file: their ids, and what they open. The keys themselves are not in it."""
    from services.gateway.keys.file import read_keys

    with _in_words():
        rows = [_HEAD, *map(_row, read_keys(file).entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@app.command(name="revoke", cls=Command)
def _revoke(file: _File, id: Annotated[str, typer.Argument(metavar="ID", help="As `baton keys list` has it.")]) -> None:
    """Takes a key out of a file. Gateways refuse it two seconds later; requests that run go on."""
    from services.gateway.keys.changes import revoke_key

    with _in_words():
        revoke_key(file, id)
    typer.echo(f"key {id} is revoked")


def _row(entry: "KeyEntry") -> tuple[str, ...]:
    limits = (entry.limits.requests_per_minute, entry.limits.tokens_per_minute, entry.limits.max_concurrent)
    return (
        entry.id,
        entry.tenant,
        ",".join(sorted(entry.rights)),
        "any" if entry.priority is None else str(entry.priority),
        *("-" if limit is None else str(limit) for limit in limits),
        entry.created.isoformat(),
    )


@contextmanager
def _in_words() -> Iterator[None]:
    """Refuses a command for a file that cannot be used. Raises Refusal."""
    from services.gateway.keys.file import KeysFileError

    try:
        yield
    except KeysFileError as error:
        raise Refusal(str(error)) from error
