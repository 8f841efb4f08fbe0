"""A list of rows that change once a second: it keeps the chosen row, the order and the filter."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Generic, TypeVar

from rich.text import Text
from textual.widgets import DataTable

from services.top.columns import Column
from services.top.figures import printable

T = TypeVar("T")

MAX_SHOWN = 200  # rows, which are written anew whenever one comes or goes
_COLOURS = {
    "ok": "green",
    "draining": "yellow",
    "connecting": "yellow",
    "gone": "bold red",
    "refused": "bold red",
    "avoided": "red",
    "in flight": "cyan",
    "waiting": "cyan",
    "prefill": "cyan",
    "decode": "cyan",
}
_COLOURED = ("state", "avoided")


class List(DataTable[Text], Generic[T]):
    """Rows of one kind. key: what tells a row from others while it changes."""

    def __init__(self, columns: Sequence[Column[T]], key: Callable[[T], str]) -> None:
        super().__init__(cursor_type="row", zebra_stripes=True)
        self._shown_columns = columns
        self._key = key
        self._rows: dict[str, T] = {}  # all, by their keys, in the order in which they were told
        self._shown: dict[str, list[Text]] = {}  # cells by key, as they are on the screen
        self._now = 0.0
        self._sorted_by: int | None = None  # None: as they were told
        self._reversed = False
        self._filter = ""

    def on_mount(self) -> None:
        """Adds the columns."""
        self._set_titles()

    def show(self, rows: Sequence[T], now: float) -> None:
        """Shows these rows. now: unix seconds."""
        self._rows = {self._key(row): row for row in rows}
        self._now = now
        self._refresh_rows()

    def filter_by(self, text: str) -> None:
        """Shows only rows that have a text in one of their cells, whatever its case."""
        self._filter = text.casefold()
        self._refresh_rows()

    def sort_by_next(self) -> str:
        """Sorts by the next column; after the last one rows are as they were told. Says which it is."""
        last = len(self._shown_columns) - 1
        self._sorted_by = 0 if self._sorted_by is None else None if self._sorted_by == last else self._sorted_by + 1
        self._set_titles()
        return "as told" if self._sorted_by is None else self._shown_columns[self._sorted_by].title

    def turn_order(self) -> None:
        """Turns the order of rows."""
        self._reversed = not self._reversed
        self._set_titles()

    def chosen(self) -> T | None:
        """Returns the row at the cursor."""
        if not self._shown:
            return None
        return self._rows.get(list(self._shown)[min(self.cursor_row, len(self._shown) - 1)])

    def _set_titles(self) -> None:
        """Begins anew with the columns, of which one has the arrow of the order."""
        self.clear(columns=True)
        self._shown = {}
        for index, column in enumerate(self._shown_columns):
            arrow = ("▼" if self._reversed else "▲") if index == self._sorted_by else ""
            self.add_column(Text(column.title + arrow, justify="right" if column.right else "left"), key=column.title)
        self._refresh_rows()

    def _refresh_rows(self) -> None:
        found = islice(self._filtered(self._ordered()), MAX_SHOWN)
        wanted = {key: self._cells(row) for key, row in found}
        if list(wanted) == list(self._shown):
            self._update_cells(wanted)
        else:
            self._replace_rows(wanted)
        self._shown = wanted

    def _ordered(self) -> list[tuple[str, T]]:
        rows = list(self._rows.items())
        if self._sorted_by is not None:
            column = self._shown_columns[self._sorted_by]
            keyed = [(column.key(row, self._now), key, row) for key, row in rows]
            known = sorted((each for each in keyed if not each[0][0]), key=lambda each: each[0], reverse=self._reversed)
            return [(key, row) for _, key, row in (*known, *(each for each in keyed if each[0][0]))]
        return rows[::-1] if self._reversed else rows

    def _filtered(self, rows: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        for key, row in rows:
            texts = (column.text(row, self._now) for column in self._shown_columns)
            if not self._filter or any(self._filter in text.casefold() for text in texts):
                yield key, row

    def _cells(self, row: T) -> list[Text]:
        return [_cell(column, column.text(row, self._now)) for column in self._shown_columns]

    def _update_cells(self, wanted: Mapping[str, Sequence[Text]]) -> None:
        for key, cells in wanted.items():
            for column, old, new in zip(self._shown_columns, self._shown[key], cells, strict=True):
                if old != new:
                    self.update_cell(key, column.title, new, update_width=True)

    def _replace_rows(self, wanted: Mapping[str, Sequence[Text]]) -> None:
        """Writes all rows anew, with the cursor at the row where it was, and the view scrolled to where it was."""
        at = list(self._shown)[self.cursor_row] if self._shown and self.cursor_row < len(self._shown) else None
        top, left = self.scroll_y, self.scroll_x
        self.clear()
        for key, cells in wanted.items():
            self.add_row(*cells, key=key)
        if at is not None and at in wanted:
            self.move_cursor(row=list(wanted).index(at), scroll=False)
        self.scroll_to(left, top, animate=False)


def _cell(column: Column[T], text: str) -> Text:
    style = _colour(text) if column.title in _COLOURED else ""
    return Text(printable(text), style=style, justify="right" if column.right else "left")


def _colour(state: str) -> str:
    """Returns the colour of a state: of HTTP's statuses, and of gRPC's names, those of errors are red."""
    status = state.partition(" ")[0]
    failed = int(status) >= 400 if status.isdecimal() else status.isupper() and status != "OK"
    return "red" if failed else _COLOURS.get(state, "")
