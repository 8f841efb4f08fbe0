"""Rows as plain tables, for a terminal or another program."""

from collections.abc import Sequence
from typing import TypeVar

from services.top.columns import Column
from services.top.figures import printable

T = TypeVar("T")

_GAP = "  "


def as_table(columns: Sequence[Column[T]], rows: Sequence[T], now: float, width: int | None = None) -> str:
    """Returns a line of titles, and one for each row.

    now: unix seconds. width: of the terminal; the last columns that do not fit are left out, and named below. None: all
    columns are there.
    """
    cells = [[column.title for column in columns]]
    cells += [[printable(column.text(row, now)) for column in columns] for row in rows]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    shown = _fitting(widths, width)
    lines = [_line(line[:shown], widths, columns) for line in cells]
    if left_out := [column.title for column in columns[shown:]]:
        lines.append(f"(no room for {', '.join(left_out)})")
    return "\n".join(lines)


def _fitting(widths: Sequence[int], width: int | None) -> int:
    """Counts the first columns that fit; one is there in any case."""
    taken = 0
    for index, own in enumerate(widths):
        taken += own + (len(_GAP) if index else 0)
        if width is not None and taken > width and index:
            return index
    return len(widths)


def _line(cells: Sequence[str], widths: Sequence[int], columns: Sequence[Column[T]]) -> str:
    padded = [
        cell.rjust(width) if column.right else cell.ljust(width)
        for cell, width, column in zip(cells, widths, columns, strict=False)
    ]
    return _GAP.join(padded).rstrip()
