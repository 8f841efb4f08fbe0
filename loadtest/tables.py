"""Tables of figures: flat records as aligned columns for people, as Markdown, and as JSON for programs."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

Record = dict[str, str | int | float]  # figures by name

_LEAST_DASHES = 3


def spread(values: Iterable[float], percentiles: Iterable[int] = (0, 50, 90)) -> Record:
    """Names percentiles of some measurements: `min` for 0, `max` for 100, and `p50` and the like between them."""
    which = list(percentiles)
    found = np.percentile(np.fromiter(values, dtype=np.float64), which).tolist()
    names = [{0: "min", 100: "max"}.get(each, f"p{each}") for each in which]
    return dict(zip(names, found, strict=True))


def table(records: list[Record]) -> str:
    """Writes one line for each record, with a column for each key that any record has; a missing figure stays empty."""
    names = list(dict.fromkeys(name for record in records for name in record))
    lines = [names, *([_cell(record.get(name, "")) for name in names] for record in records)]
    is_text = [any(isinstance(record.get(name), str) for record in records) for name in names]
    return "".join("  ".join(line).rstrip() + "\n" for line in aligned(lines, is_text))


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Writes a Markdown table whose source is aligned too, without a newline at its end."""
    dashes = ["-" * _LEAST_DASHES] * len(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in aligned([head, dashes, *lines], [True] * len(head)))


def aligned(
    lines: Iterable[Sequence[str]], is_text: Sequence[bool], widths: Sequence[int] | None = None
) -> list[list[str]]:
    """Pads the cells of each column to one width: text on its right, numbers on their left.

    widths: of the columns, at least; by default those of their longest cells.
    """
    cells = list(lines)
    longest = [max(map(len, column)) for column in zip(*cells, strict=True)]
    final = longest if widths is None else list(map(max, longest, widths))
    return [
        [
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(line, final, is_text, strict=True)
        ]
        for line in cells
    ]


def write_json(records: list[Record], path: Path) -> None:
    """Writes the records as a list of flat objects."""
    path.write_text(json.dumps(records, indent=1) + "\n")


def _cell(value: str | int | float) -> str:
    """Formats a number with as many digits as say something."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3g}"
