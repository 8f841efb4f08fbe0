"""Lines of the table: a figure of both sides, their difference, and its interval."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.quality import intervals
from loadtest.quality.intervals import Interval
from loadtest.tables import markdown

_HEAD = ("measure", "items", "A", "B", "B against A", "95 % interval")


@dataclass(frozen=True, slots=True)
class Line:
    """One figure. a, b: None where the figure is of both sides together, and `difference` is the figure.

    Shares and their differences are of 1. relative: the difference is B over A less 1.
    """

    measure: str
    items: int
    a: float | None
    b: float | None
    difference: float
    interval: Interval
    relative: bool = False

    def cells(self) -> tuple[str, ...]:
        """Writes the figures for people: shares in percent, their differences in percentage points."""
        both, unit = self.a is None, " %" if self.relative or self.a is None else " points"
        sides = ("", "") if self.a is None or self.b is None else (self._figure(self.a), self._figure(self.b))
        low, high = (_signed(end, both) for end in self.interval)
        return (
            self.measure,
            str(self.items),
            *sides,
            f"{_signed(self.difference, both)}{unit}",
            f"{low} to {high}",
        )

    def record(self) -> dict[str, Any]:
        """Returns the figures as they are, for JSON."""
        low, high = self.interval
        return {
            "measure": self.measure,
            "items": self.items,
            "a": self.a,
            "b": self.b,
            "difference": self.difference,
            "relative": self.relative,
            "low": low,
            "high": high,
        }

    def _figure(self, value: float) -> str:
        return f"{value:.3f}" if self.relative else f"{100 * value:.1f} %"


@dataclass(frozen=True, slots=True)
class NoLine:
    """A measure without figures. reason: why, on one line."""

    measure: str
    reason: str

    def cells(self) -> tuple[str, ...]:
        """Writes the reason where the figures would be."""
        return (self.measure, "", "", "", f"skipped: {self.reason}", "")

    def record(self) -> dict[str, Any]:
        """Returns measure and reason, for JSON."""
        return {"measure": self.measure, "skipped": self.reason}


def shares(measure: str, a: Sequence[bool], b: Sequence[bool]) -> Line:
    """Makes the line of a share: how many items each side did well."""
    first, second = sum(a) / len(a), sum(b) / len(b)
    return Line(measure, len(a), first, second, second - first, intervals.of_share_difference(a, b))


def table(lines: Sequence[Line | NoLine]) -> str:
    """Writes all lines as Markdown."""
    return markdown(_HEAD, [line.cells() for line in lines])


def _signed(share: float, unsigned: bool) -> str:
    percent = 100 * share
    return f"{percent:.1f}" if unsigned else f"{percent:+.2f}"
