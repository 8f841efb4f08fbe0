"""Rows: requests in short, as consoles list them. Those that have ended are kept as JSON.

A row costs a request some microseconds after its end, and nothing while it runs; rows are made several at once, which
takes half the time. Bytes in a ring are no objects for the garbage collector to look at, so thousands of rows can be
kept where records in full are few.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import islice

import orjson

from services.gateway.api.records.attempt_record import AttemptRecord
from services.gateway.api.records.request_record import RequestRecord

KEPT_ROWS = 5000
_AT_ONCE = 32  # rows

# The id of a request's key, its row, and its number among the requests of that key. A plain tuple, which the
# garbage collector drops from its lists; it keeps named ones.
KeyedRow = tuple[str | None, bytes, int]

_OK = (200, "OK")
_LEFT = (499, "CANCELLED")
# gRPC's names for what HTTP answers with a status from 400 to 498.
GRPC_REFUSALS = frozenset(
    ["INVALID_ARGUMENT", "NOT_FOUND", "UNAUTHENTICATED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED"]
)


class Outcome(StrEnum):
    """The end of a request. The values are those of a sample's `requests`."""

    OK = "ok"
    FAILED = "failed"
    REFUSED = "refused"  # its client asked for what it cannot have, or for too much now
    LEFT = "left"  # its client did not wait for the end


class Phase(StrEnum):
    """Progress of a request in flight: of that of its attempts which has come furthest."""

    WAITING = "waiting"  # no attempt runs
    PREFILL = "prefill"  # no token so far
    DECODE = "decode"


def outcome_of(record: RequestRecord) -> Outcome:
    """Says how a request ended, by its status and its error."""
    status = record.status
    if status in _OK and record.error is None:
        return Outcome.OK
    if status in _LEFT:
        return Outcome.LEFT
    refused = status in GRPC_REFUSALS if isinstance(status, str) else 400 <= status < 500
    return Outcome.REFUSED if refused else Outcome.FAILED


def phase_of(attempts: Iterable[AttemptRecord]) -> Phase:
    """Says how far a request in flight is. attempts: those whose records are kept, at whichever of its choices."""
    phase = Phase.WAITING
    for attempt in attempts:
        if len(attempt.ends) < len(attempt.choices):
            if attempt.first_token is not None:
                return Phase.DECODE
            phase = Phase.PREFILL
    return phase


def row_in_flight(record: RequestRecord) -> bytes:
    """Returns the row of a request that has not ended, as JSON."""
    return _row(record, record.attempts.last, "in flight", phase_of(record.attempts), None)


def _ended_row(record: RequestRecord, first: AttemptRecord | None, outcome: Outcome) -> bytes:
    assert record.ended is not None
    state = "done" if outcome is Outcome.OK or outcome is Outcome.LEFT else "failed"
    return _row(record, first, state, None, _ms(record.ended - record.arrived))


def _row(
    record: RequestRecord, attempt: AttemptRecord | None, state: str, phase: Phase | None, ms: float | None
) -> bytes:
    first_token = record.first_token
    return orjson.dumps(  # `row_of_key` cuts off the first field and the last one
        {
            "n": record.number,
            "id": record.request_id,
            "at": round(record.arrived_at, 3),
            "endpoint": record.endpoint,
            "model": record.model,
            "key": record.key_id,
            "state": state,
            "phase": phase,
            "status": record.status or None,
            "error": record.error,
            "prompt": record.prompt_tokens,
            "cached": record.cached_tokens,
            "generated": record.generated_tokens,
            "finish": record.finish_reason,
            "ttft_ms": None if first_token is None else _ms(first_token - record.arrived),
            "ms": ms,
            "attempts": record.attempts.number,
            "workers": None if attempt is None else {role.value: name for role, name in attempt.workers.items()},
        }
    )


def row_of_key(row: bytes, number: int) -> bytes:
    """Returns a row as the owner of its key sees it: numbered among the requests of that key, without workers."""
    return b'{"n":%d%b}' % (number, row[row.index(b',"id":') : row.rindex(b',"workers":')])


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


class RequestRows:
    """The requests in flight, the rows of those that ended last, and counts of all.

    in_flight: oldest first. All else is as it was with the last `settle`. num_ended: of the requests whose rows were
    ever kept, so that a number of them names a place among the rows. slo_met, slo_total: of the requests that had a
    first token, and a limit for it.
    """

    def __init__(self, kept: int = KEPT_ROWS) -> None:
        self.in_flight: dict[RequestRecord, None] = {}
        self.num_begun = 0
        self.num_ended = 0
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.slo_met = 0
        self.slo_total = 0
        self._of_key: dict[str | None, int] = {}  # requests begun, by the id of their key
        self._ended: deque[KeyedRow] = deque(maxlen=kept)
        self._unsettled: list[tuple[RequestRecord, AttemptRecord | None]] = []

    def begin(self, record: RequestRecord) -> None:
        """Numbers a request, which is in flight from now on; its key is known."""
        self.num_begun += 1
        record.number = self.num_begun
        self._of_key[record.key_id] = record.number_of_key = self._of_key.get(record.key_id, 0) + 1
        self.in_flight[record] = None

    def end(self, record: RequestRecord, first: AttemptRecord | None) -> None:
        """Notes that a request has ended. first: see `first_attempt`."""
        self.in_flight.pop(record, None)
        self._unsettled.append((record, first))
        if len(self._unsettled) >= _AT_ONCE:
            self.settle()

    def settle(self) -> None:
        """Counts the requests that have ended, and keeps their rows instead of them."""
        unsettled, self._unsettled = self._unsettled, []
        for record, first in unsettled:
            outcome = outcome_of(record)
            self.outcomes[outcome] += 1
            if record.ttft_slo_s is not None and (ttft_s := record.ttft_s) is not None:
                self.slo_total += 1
                self.slo_met += ttft_s <= record.ttft_slo_s
            self._ended.append((record.key_id, _ended_row(record, first, outcome), record.number_of_key))
        self.num_ended += len(unsettled)

    @property
    def oldest_kept(self) -> int:
        """The place of the oldest row that is kept: as many requests ended before it."""
        return self.num_ended - len(self._ended)

    def ended_between(self, first: int, end: int) -> Iterator[KeyedRow]:
        """Yields the rows from place `first` up to place `end`, newest first, as far as they are kept.

        Takes as long as there are rows from `first` on.
        """
        newest = reversed(self._ended)
        return islice(newest, self.num_ended - end, max(self.num_ended - end, self.num_ended - first))
