"""`baton bench`: the load client of `loadtest/bench`, whose settings are its options, and pages of its results."""

import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from loadtest.bench.settings import Flag, Settings
from services.cli.command_kinds import Command, Group
from services.cli.options import with_options
from services.config.option import Option, OptionField, Refusal

app = typer.Typer(
    cls=Group,
    help="Sends a load to any OpenAI server, and says how fast it answers: TTFT, TPOT, ITL, end to end, throughput, "
    "goodput. Ctrl-C ends it with the figures so far.",
)


def option_fields() -> list[OptionField]:
    """The options of `loadtest.bench.settings`."""
    hints, found, panel = get_type_hints(Settings, include_extras=True), [], None
    for field in fields(Settings):
        kind, flag = get_args(hints[field.name])
        assert isinstance(flag, Flag)
        panel = flag.panel or panel
        found.append(OptionField(field.name, kind, field.default, Option(**asdict(flag) | {"panel": panel})))
    return found


def _bench(ctx: typer.Context, **values: Any) -> None:
    if ctx.invoked_subcommand is not None:
        for name in values:
            source = ctx.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                raise Refusal(f"--{name.replace('_', '-')} is no option of `baton bench {ctx.invoked_subcommand}`")
        return
    from loadtest.bench import command

    raise typer.Exit(_in_words(lambda: command.bench(Settings(**values), ["baton", *sys.argv[1:]])))


@app.command(name="report", cls=Command)
def _report(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Results that --json wrote.")],
    page: Annotated[
        Path, typer.Option("--report", metavar="FILE", help="The page, which needs no other file and no network.")
    ],
) -> None:
    """Writes a page with the runs of several results side by side."""
    from loadtest.bench import command

    raise typer.Exit(_in_words(lambda: command.report(files, page)))


app.callback(invoke_without_command=True)(with_options(_bench, option_fields()))


def _in_words(run: Callable[[], int]) -> int:
    """Runs a benchmark. Raises Refusal where it cannot be run."""
    from loadtest.cannot_run import CannotRun

    try:
        return run()
    except CannotRun as error:
        raise Refusal(str(error)) from error
