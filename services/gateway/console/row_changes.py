"""The rows that changed in a turn of the feed, and those that a listener has missed.

Requests in flight are looked at once a turn, and a row is made where something of it changed. A turn is numbered.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.gateway.api.records.request_record import RequestRecord
from services.gateway.api.records.request_rows import KeyedRow, RequestRows, phase_of, row_in_flight, row_of_key
from services.gateway.console.view import View

_Signature = tuple[object, ...]


@dataclass(slots=True)
class _Shown:
    """A request in flight as listeners know it. turn: in which its row was made."""

    turn: int
    signature: _Signature
    row: bytes


class RowChanges:
    """The rows of all requests, as they were in the last turn. ended: of those rows, up to which place."""

    def __init__(self, rows: RequestRows) -> None:
        self._rows = rows
        self._shown: dict[RequestRecord, _Shown] = {}  # oldest first
        self.ended = rows.num_ended

    def take(self, turn: int) -> list[KeyedRow]:
        """Returns the rows that changed since the last turn."""
        changed = list(self._rows.ended_between(self.ended, self._rows.num_ended))
        self.ended = self._rows.num_ended
        before, self._shown = self._shown, {}
        for record in self._rows.in_flight:
            signature, shown = _signature(record), before.get(record)
            if shown is None or shown.signature != signature:
                shown = _Shown(turn, signature, row_in_flight(record))
                changed.append((record.key_id, shown.row, record.number_of_key))
            self._shown[record] = shown
        return changed

    def stop(self) -> None:
        """Drops what listeners knew: there are none."""
        self._shown = {}

    def is_lost(self, ended: int) -> bool:
        """True when rows that ended after place `ended` are not kept any more."""
        return ended < self._rows.oldest_kept

    def missed(self, view: View, turn: int, ended: int) -> list[bytes]:
        """Returns the rows that a listener lacks, newest first. turn, ended: up to where it was told everything."""
        in_flight = (
            (record.key_id, shown.row, record.number_of_key)
            for record, shown in reversed(self._shown.items())
            if shown.turn > turn
        )
        return [*seen(in_flight, view), *seen(self._rows.ended_between(ended, self.ended), view)]


def seen(rows: Iterator[KeyedRow] | Sequence[KeyedRow], view: View) -> Iterator[bytes]:
    """Yields the rows that a view has, as it sees them."""
    if view.sees_all:
        return (row for _, row, _ in rows)
    return (row_of_key(row, number) for key_id, row, number in rows if key_id == view.key_id)


def _signature(record: RequestRecord) -> _Signature:
    """A value that changes with what a row in flight shows."""
    attempts = record.attempts
    return attempts.number, phase_of(attempts), record.prompt_tokens, record.first_token is None, record.model
