"""Options: fields of configurations that a user sets on the command line or in the environment.

A field has all that there is of its option, type, default, help text and check:

    num_decode: Annotated[int, Option(flag="--decode", min=1, help="Decode workers.")] = 1

The flags of `baton` are made of these fields (`services/cli/options.py`). Tests hold the tables of docs/reference.md
and the values of the chart to them.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


class OptionError(ValueError):
    """A text that an option cannot have. The message says why, for a person, and does not name the option."""


class Refusal(Exception):
    """A command that cannot be carried out. The message is one line for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A flag of the command line. It annotates a field of a configuration."""

    help: str
    flag: str | None = None  # None: the field's name
    metavar: str | None = None  # None: the field's type
    panel: str | None = None  # of the help text; None: that of the option before it in its class
    min: float | None = None
    max: float | None = None
    parse: Callable[[str], Any] | None = None  # makes the field's value of a text; raises OptionError or Refusal
    repeats: bool = False  # the flag may be given several times; the tuples that `parse` makes are joined
    default: str | None = None  # as a text, where `parse` reads it and None is not the field's default
    variable: str | None = None  # in the environment; it holds where the flag is not given


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable in the environment that has no flag. It annotates a field of a configuration."""

    name: str
    parse: Callable[[str], Any]  # makes the field's value of a text, "" where there is no variable; raises Refusal


@dataclass(frozen=True, slots=True)
class OptionField:
    """A field of a configuration that has an option."""

    name: str
    type: Any
    default: Any  # dataclasses.MISSING: it has none
    option: Option

    @property
    def flag(self) -> str:
        """The flag as it is on the command line."""
        return self.option.flag or f"--{self.name.replace('_', '-')}"


def options_of(kind: Any) -> list[OptionField]:
    """The options of a configuration class and of its parts, in their order."""
    return [
        OptionField(field.name, hint, field.default, source)
        for field, hint, source in _annotated(kind)
        if isinstance(source, Option)
    ]


def variables_of(kind: Any) -> dict[str, Variable]:
    """The variables of a configuration class and of its parts, by field."""
    return {field.name: source for field, _, source in _annotated(kind) if isinstance(source, Variable)}


def build(kind: type[T], values: Mapping[str, Any]) -> T:
    """A configuration whose fields, and whose parts' fields, have these values by name, or else their defaults."""
    hints = get_type_hints(kind)
    parts = {name: build(hint, values) for name, hint in hints.items() if _is_part(hint)}
    return kind(**parts, **{name: values[name] for name in hints.keys() & values.keys()})


def _is_part(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


def _annotated(kind: Any) -> Iterator[tuple["dataclasses.Field[Any]", Any, object]]:
    """Each field with an annotation, its type, and the annotation. An option has the panel of the one before it."""
    hints = get_type_hints(kind, include_extras=True)
    panel: str | None = None
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if _is_part(hint):
            yield from _annotated(hint)
        elif get_origin(hint) is Annotated:
            bare, source = get_args(hint)
            if isinstance(source, Option):
                panel = source.panel or panel
                source = dataclasses.replace(source, panel=panel)
            yield field, bare, source
