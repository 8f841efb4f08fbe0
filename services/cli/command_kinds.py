"""The kinds of commands that `baton` has: their help, and their words for options and commands of other servers."""

from itertools import takewhile
from typing import Any, NoReturn

from typer.core import TyperCommand, TyperGroup

from services.cli import foreign
from services.cli.help import help_text
from services.config.option import Refusal

_STARTERS = ("up", "gateway", "prefill", "decode")  # whose options those of other servers are


class Command(TyperCommand):
    """A command with options."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """See TyperCommand."""
        formatter.write(help_text(self, ctx) + "\n")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See TyperCommand. Raises Refusal for an option of other servers."""
        own = _flags(self)
        options = takewhile(lambda argument: argument != "--", args)
        for name in (argument.partition("=")[0] for argument in options if argument.startswith("-")):
            if name not in own:
                _refuse_foreign(name, own, ctx)
        return super().parse_args(ctx, args)


class Group(TyperGroup):
    """A command with commands below it."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """See TyperGroup."""
        formatter.write(help_text(self, ctx) + "\n")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See TyperGroup. Raises Refusal for a command of other servers, or an option without its command."""
        first = args[0].partition("=")[0] if args else ""
        if ctx.parent is None and first and first not in self.commands and first not in _flags(self):
            if (command := foreign.find(first)) and command in foreign.COMMANDS:
                raise Refusal(f"`{first}` ({command.servers}) is no command here: {command.here}")
            if takers := _takers(first, ctx) or (foreign.find(first) and "`baton up`"):
                raise Refusal(f"{first} belongs behind a command that has it: {takers}")
        return super().parse_args(ctx, args)


def _refuse_foreign(name: str, own: set[str], ctx: Any) -> None:
    spelled = name.replace("_", "-")
    if spelled in own:
        raise Refusal(f"{name} is spelled {spelled}")
    if takers := _takers(spelled, ctx):
        raise Refusal(f"{name} is no option of `{ctx.command_path}`: {takers} has it")
    if (option := foreign.find(name)) is None or option in foreign.COMMANDS:
        return  # nobody's: Typer says so
    _say(name, option, own, ctx)


def _say(name: str, option: foreign.Foreign, own: set[str], ctx: Any) -> NoReturn:
    if not option.here.startswith("--"):
        raise Refusal(f"{name} ({option.servers}) is no option here: {option.here}")
    where = "" if option.here in own else f", an option of {_takers(option.here, ctx)}"
    raise Refusal(f"{name} ({option.servers}) is {option.here} here{where}")


def _takers(flag: str, ctx: Any) -> str:
    """The commands with this option, as words; empty where none has it."""
    commands = ctx.find_root().command.commands
    names = [name for name in _STARTERS if flag in _flags(commands[name])]
    return " or ".join(f"`baton {name}`" for name in names)


def _flags(command: Any) -> set[str]:
    return {flag for parameter in command.params for flag in parameter.opts} | {"--help"}
