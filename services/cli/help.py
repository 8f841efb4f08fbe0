"""Help texts: options in groups, each on a line of its own above its words, so that no width cuts a name.

Typer's own tables squeeze the names of options into a column, and on a narrow terminal cut them.
"""

import textwrap
from collections.abc import Iterator
from typing import Any

import typer

from services.process.terminal import has_colours, width

_MAX_WIDTH = 100
_OTHERS = "Options"


class _Styles:
    """Headings and options as a terminal shows them; as they are elsewhere."""

    def __init__(self, coloured: bool) -> None:
        self._coloured = coloured

    def heading(self, text: str) -> str:
        return typer.style(text, bold=True) if self._coloured else text

    def name(self, text: str) -> str:
        return typer.style(text, fg=typer.colors.CYAN) if self._coloured else text


def help_text(command: Any, context: Any) -> str:
    """The help of a command or of a group of commands, of Typer's kinds."""
    columns = min(width() or _MAX_WIDTH, _MAX_WIDTH)
    styles = _Styles(has_colours())
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    lines = [*_wrapped(f"Usage: {usage}", columns, ""), "", *_wrapped(command.help or "", columns, "")]
    for title, rows in _sections(command, context).items():
        lines += ["", styles.heading(title)]
        for name, metavar, words in rows:
            first, *rest = _signature(name, metavar, columns)
            lines += [f"  {styles.name(name)}{first}", *rest, *_wrapped(words, columns, " " * 6)]
    return "\n".join(lines)


def _sections(command: Any, context: Any) -> dict[str, list[tuple[str, str, str]]]:
    """Returns by title the names of options, arguments or commands, each with the rest of its line and its words."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None:
            continue
        words = record[1]
        if parameter.param_type_name == "argument":
            found.setdefault("Arguments", []).append((parameter.metavar, "", words))
            continue
        metavar = "" if parameter.is_flag else f" {parameter.metavar}"
        title = parameter.rich_help_panel or _OTHERS
        found.setdefault(title, []).append((", ".join(parameter.opts), metavar, words))
    if (others := found.pop(_OTHERS, None)) is not None:  # --help among them: last
        found[_OTHERS] = others
    if hasattr(command, "list_commands"):
        inner = [(name, command.get_command(context, name)) for name in command.list_commands(context)]
        return {"Commands": [(name, "", each.help) for name, each in inner], **found}
    return found


def _signature(name: str, metavar: str, columns: int) -> Iterator[str]:
    """Yields the rest of the line behind an option's name; choices that do not fit have further lines."""
    room = columns - len(name) - 2
    if len(metavar) <= room:
        yield metavar
        return
    line, *rest = metavar.strip().split("|")
    line = f" {line}"
    for choice in rest:
        if len(line) + len(choice) + 2 > room:
            yield f"{line}|"
            line, room = f"      {choice}", columns
        else:
            line += f"|{choice}"
    yield line


def _wrapped(text: str, columns: int, indent: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        columns,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
