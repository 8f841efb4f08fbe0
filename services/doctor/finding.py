"""Findings: what a check found, how bad it is, and what to do."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

EXIT_FINE, EXIT_WARNINGS, EXIT_ERRORS = 0, 1, 2


class Level(IntEnum):
    """The weight of a finding; a higher one is worse."""

    OK = 0
    NOTE = 1  # nothing to do, or something that was not checked
    WARNING = 2  # works, but slower or less safe than it could
    ERROR = 3  # does not work, or is open to strangers

    @property
    def word(self) -> str:
        """The level as people and JSON have it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check found."""

    name: str
    level: Level
    found: str
    advice: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)  # what was measured, by names with their units


@dataclass(frozen=True, slots=True)
class Examined:
    """A check that is over, and its findings."""

    group: str
    findings: tuple[Finding, ...]


class CannotCheck(Exception):
    """A check that cannot be done here. The message says why; it is no fault of what was to be checked."""


def ok(name: str, found: str) -> Finding:
    """Makes a finding that is as it should be."""
    return Finding(name, Level.OK, found)


def note(name: str, found: str, advice: str | None = None) -> Finding:
    """Makes a finding that asks for nothing."""
    return Finding(name, Level.NOTE, found, advice)


def warning(name: str, found: str, advice: str) -> Finding:
    """Makes a finding that somebody should look at."""
    return Finding(name, Level.WARNING, found, advice)


def error(name: str, found: str, advice: str) -> Finding:
    """Makes a finding of something that does not work."""
    return Finding(name, Level.ERROR, found, advice)


def worst(examined: Iterable[Examined]) -> Level:
    """Returns the level of the worst finding; OK where there is none."""
    return max((finding.level for each in examined for finding in each.findings), default=Level.OK)


def exit_code(level: Level, *, strict: bool) -> int:
    """Returns the exit code for the worst level. strict: warnings count too."""
    if level is Level.ERROR:
        return EXIT_ERRORS
    return EXIT_WARNINGS if strict and level is Level.WARNING else EXIT_FINE
