"""Phases of a request between its arrival and its end: where its time went, from its record.

    read ─ tokenize ─ wait ─ lookup ─ place ─ wire ─ queue ─ prefill ─ deliver   one after the other: the time to the
                                                                                 first token
                                                                       handoff   from the first token to decode's first
                                                                       generate  from the first token to the end

`queue` and `prefill` are at the worker that computes the prompt, `wire` is the way to it and back, `wait` is for
workers, for room, and for attempts that brought nothing.
"""

from collections.abc import Iterable, Iterator

from services.gateway.api.records.attempt_record import AttemptRecord
from services.gateway.api.records.request_record import RequestRecord

Interval = tuple[str, float, float]  # name, begin, end


def phases(record: RequestRecord, now: float) -> dict[str, float]:
    """The seconds that each phase took, as far as the request has come."""
    took = dict(_before_dispatch(record))
    first = first_attempt(record.attempts)
    if record.tokenized is None or first is None or first.first_token is None:
        return took
    took.update(_to_first_token(first, record.tokenized))
    if record.first_token is None:
        return took
    took["deliver"] = max(0.0, record.first_token - first.first_token)
    if first.second_worker is not None:
        took["handoff"] = first.second_worker - first.first_token
    took["generate"] = (now if record.ended is None else record.ended) - record.first_token
    return took


def server_timing(record: RequestRecord, now: float) -> str:
    """The value of the header Server-Timing: each phase in milliseconds."""
    return ", ".join([f"{name};dur={seconds * 1e3:.3f}" for name, seconds in phases(record, now).items()])


def first_attempt(attempts: Iterable[AttemptRecord]) -> AttemptRecord | None:
    """The attempt that brought the first token; None: none did."""
    with_token = [attempt for attempt in attempts if attempt.first_token is not None]
    return min(with_token, key=lambda attempt: attempt.first_token or 0.0, default=None)


def _before_dispatch(record: RequestRecord) -> Iterator[tuple[str, float]]:
    if record.parsed is not None:
        yield "read", record.parsed - record.arrived
        if record.tokenized is not None:
            yield "tokenize", record.tokenized - record.parsed


def _to_first_token(attempt: AttemptRecord, tokenized: float) -> Iterator[tuple[str, float]]:
    first_token = attempt.first_token
    assert first_token is not None
    if attempt.look_up_began is not None and attempt.looked_up is not None:
        yield "wait", attempt.look_up_began - tokenized
        yield "lookup", attempt.looked_up - attempt.look_up_began
        yield "place", attempt.sent_at - attempt.looked_up
    there = attempt.at.get(attempt.computes)
    if there is None or there.admitted is None:  # the worker is of an older version
        yield "prefill", first_token - attempt.sent_at
        return
    yield "wire", max(0.0, first_token - attempt.sent_at - (there.sent - there.received))
    yield "queue", there.admitted - there.received
    yield "prefill", there.sent - there.admitted


def intervals(attempt: AttemptRecord) -> Iterator[tuple[str, str, Interval]]:
    """Lists the intervals of an attempt at its workers: role, address, and the interval."""
    for role, there in attempt.at.items():
        address, since = attempt.workers[role], there.received
        for name, until in (
            ("wait for blocks", there.announced),
            ("queue", there.admitted),
            ("read", there.ready),
            ("prefill" if role is attempt.computes else "join", there.sent),
        ):
            if until is not None:
                yield role.value, address, (name, since, until)
                since = until
