"""Panels and boards, as values, before they are Grafana's JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from helm.boards.queries import Query


class Shape(StrEnum):
    """Grafana's name for what a panel draws."""

    LINES = "timeseries"
    STACK = "timeseries stacked"
    NUMBER = "stat"
    TABLE = "table"
    HEAT = "heatmap"


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel. unit: Grafana's name. wrong_from: a number that is wrong from this value on is red."""

    title: str
    queries: Sequence[Query]
    unit: str = "short"
    shape: Shape = Shape.LINES
    wrong_from: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels below one heading, as many side by side as `columns` says; height in Grafana's units."""

    title: str
    panels: Sequence[Panel]
    columns: int = 3
    height: int = 8


@dataclass(frozen=True, slots=True)
class Board:
    """A board. bounds_of: a histogram, one of whose bounds a person chooses as `$slo`."""

    name: str
    title: str
    rows: Sequence[Row]
    bounds_of: str | None = None
