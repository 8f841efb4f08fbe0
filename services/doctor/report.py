"""Findings for people, and as JSON for programs."""

import json
from collections.abc import Iterable, Sequence

import typer

from services.doctor.finding import Examined, Finding, Level, worst
from services.process.wrapping import wrap

JSON_VERSION = 1  # raised where a field changes its meaning or goes; further fields may come

_COLOURS = {
    Level.OK: typer.colors.GREEN,
    Level.NOTE: typer.colors.BLUE,
    Level.WARNING: typer.colors.YELLOW,
    Level.ERROR: typer.colors.RED,
}
_WIDTH = max(len(level.word) for level in Level)
_INDENT = _WIDTH + 7


def as_text(examined: Iterable[Examined], columns: int | None = None) -> str:
    """Returns lines for a person, with colours by level; whoever prints them may leave these out.

    columns: of the terminal, to which lines are broken at words.
    """
    examined = list(examined)
    lines = []
    for each in examined:
        lines.append(typer.style(each.group, bold=True))
        for finding in each.findings:
            lines += [wrap(line, columns, _INDENT) for line in _lines(finding)]
    return "\n".join([*lines, "", summary(examined)])


def _lines(finding: Finding) -> list[str]:
    level = typer.style(finding.level.word.ljust(_WIDTH), fg=_COLOURS[finding.level])
    lines = [f"  {level}  {_printable(finding.name)}: {_printable(finding.found)}"]
    if finding.advice is not None:
        lines.append(f"  {' ' * _WIDTH}  -> {finding.advice}")
    return lines


def _printable(text: str) -> str:
    """Returns a text without what would move a terminal's cursor: parts of it are other programs' words."""
    return "".join(each if each.isprintable() else "\ufffd" for each in text)


def summary(examined: Sequence[Examined]) -> str:
    """Returns the numbers of errors, warnings and other findings, as one line."""
    levels = [finding.level for each in examined for finding in each.findings]
    errors, warnings = levels.count(Level.ERROR), levels.count(Level.WARNING)
    rest = len(levels) - errors - warnings
    return f"{_counted(errors, 'error')}, {_counted(warnings, 'warning')}, {_counted(rest, 'other finding')}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def as_json(examined: Sequence[Examined]) -> str:
    """Returns a JSON object: version, worst, and findings, whose advice may be null and whose figures may be none."""
    findings = [
        {
            "group": each.group,
            "name": finding.name,
            "level": finding.level.word,
            "found": finding.found,
            "advice": finding.advice,
            "figures": {name: round(value, 3) for name, value in finding.figures.items()},
        }
        for each in examined
        for finding in each.findings
    ]
    return json.dumps({"version": JSON_VERSION, "worst": worst(examined).word, "findings": findings}, indent=2)
