"""Commands whose options are the fields of configurations (`services/config/option.py`)."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from enum import StrEnum
from itertools import chain
from typing import Any, get_args

import typer

from services.cli.command_kinds import Command
from services.config.option import OptionError, OptionField, options_of, variables_of

Values = dict[str, Any]  # by field; without those of options that were not given and have no default


def add_command(
    app: typer.Typer,
    name: str,
    run: Callable[[Values], int],
    *configs: type,
    purpose: str,
    argument: inspect.Parameter | None = None,
    **defaults: Any,
) -> None:
    """Adds a command with the options of these configurations.

    argument: one that is no option, as Typer has it; `run` gets it among the values. defaults: the command's own, by
    field. Typer reads a command's options from a function's signature: the one of `command` is made of the fields.
    """
    fields = [field for config in configs for field in options_of(config)]
    repeated = [field.name for field in fields if field.option.repeats]
    variables = {field: variable for config in configs for field, variable in variables_of(config).items()}

    def command(**values: Any) -> None:
        given = {field: value for field, value in values.items() if value is not None}
        given |= {field: tuple(chain.from_iterable(given.get(field, ()))) for field in repeated}
        read = {field: variable.parse(os.environ.get(variable.name, "")) for field, variable in variables.items()}
        raise typer.Exit(run(given | read))

    arguments = [] if argument is None else [argument]
    app.command(name, help=purpose, cls=Command)(with_options(command, fields, defaults, arguments))


def with_options(
    function: Callable[..., None],
    fields: Sequence[OptionField],
    defaults: Mapping[str, Any] | None = None,
    arguments: Sequence[inspect.Parameter] = (),
) -> Callable[..., None]:
    """Gives a function these arguments and the options of these fields, as Typer reads them.

    They take the place of its `**` parameter.
    """
    named = [
        parameter
        for parameter in inspect.signature(function, eval_str=True).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    options = [_parameter(field, defaults or {}) for field in fields]
    function.__signature__ = inspect.Signature([*named, *arguments, *options])  # type: ignore[attr-defined]
    return function


def _parameter(field: OptionField, defaults: Mapping[str, Any]) -> inspect.Parameter:
    option = field.option
    default = defaults.get(field.name, field.default if option.parse is None else option.default)
    info = typer.Option(
        ... if default is MISSING else default,
        field.flag,
        help=option.help,
        metavar=option.metavar or _metavar(field.type),
        rich_help_panel=option.panel,
        min=option.min,
        max=option.max,
        parser=option.parse and _parser(option.parse),
        envvar=option.variable,
    )
    # The type of what a parser reads is a text's.
    kind = field.type if option.parse is None else list[str] | None if option.repeats else str | None
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind)


def argument(name: str, kind: Any, default: Any, metavar: str, about: str) -> inspect.Parameter:
    """Makes an argument that is no option. kind: its type; default: `...` where it must be given."""
    info = typer.Argument(default, metavar=metavar, help=about)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind)


def _metavar(kind: Any) -> str:
    """Returns the word for a value of this type in the help text: choices, `N` or `TEXT`."""
    kinds = get_args(kind) or (kind,)
    if issubclass(kinds[0], StrEnum):
        return "|".join(kinds[0])
    return "N" if kinds[0] in (int, float) else "TEXT"


def _parser(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except OptionError as error:
            raise typer.BadParameter(str(error)) from error

    return parsed
