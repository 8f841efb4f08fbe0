"""What a part measured: flat rows, as a table for people and as JSON for programs."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

Row = dict[str, str | int | float]


def spread(values: Iterable[float], percentiles: Iterable[int] = (0, 50, 90)) -> Row:
    """Percentiles of some measurements as columns: `min` for the lowest, `p50` and the like."""
    which = list(percentiles)
    found = np.percentile(np.fromiter(values, dtype=np.float64), which).tolist()
    names = [{0: "min", 100: "max"}.get(each, f"p{each}") for each in which]
    return dict(zip(names, found, strict=True))


def table(rows: list[Row]) -> str:
    """Lines of aligned columns, one for each key that any row has; what a row does not have stays empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_cell(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_text = [any(isinstance(row.get(name), str) for row in rows) for name in names]
    lines = [
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(line, widths, is_text, strict=True)
        ).rstrip()
        for line in cells
    ]
    return "\n".join(lines) + "\n"


def write_json(rows: list[Row], path: Path) -> None:
    """The rows as a list of flat objects."""
    path.write_text(json.dumps(rows, indent=1) + "\n")


def _cell(value: str | int | float) -> str:
    """Numbers with as many digits as say something."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3g}"
