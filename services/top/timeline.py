"""The record of one request as text: where its time went, each attempt, and which workers could have had it.

The phases follow each other, so that they add up to the request's time; `handoff` alone is a part of `generate`. A
request that brought no token has phases up to its first attempt, and the rest of its time is one line.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from services.top import figures
from services.top.columns import Column
from services.top.tables import as_table

Record = Mapping[str, Any]  # as /debug/requests/ID has it; times are milliseconds since the request's arrival

_WITHIN = {"handoff": "generate"}  # a phase, and the one that it is a part of
_REST = "without a token"
_MIN_BAR = 10
_MAX_WIDTH = 110
_LEFT = 37  # of a phase's line, before its bar


def as_text(record: Record, width: int | None = None) -> str:
    """Returns the lines for a person. width: of the terminal."""
    columns = min(width or _MAX_WIDTH, _MAX_WIDTH)
    lines = [*_head(record), "", *_phases(record, columns)]
    for attempt in record.get("attempts") or ():
        lines += ["", *_attempt(attempt, columns)]
    return "\n".join(figures.printable(line) for line in lines)


def phases_of(record: Record) -> list[tuple[str, float, float]]:
    """Lists phases with their begin and length; those that follow each other add up to the request's time."""
    took: Mapping[str, float] = record.get("phases_ms") or {}
    found, at = list[tuple[str, float, float]](), 0.0
    begins: dict[str, float] = {}
    for name, length in took.items():
        if name in _WITHIN:
            continue
        begins[name] = at
        found.append((name, at, length))
        at += length
    if "generate" not in took and (rest := (record.get("duration_ms") or 0.0) - at) > 0:
        found.append((_REST, at, rest))
    for name, whole in _WITHIN.items():
        if name in took and whole in begins:
            found.append((name, begins[whole], took[name]))
    return found


def _head(record: Record) -> Iterator[str]:
    parts = [
        record.get("endpoint"),
        record.get("model"),
        "in flight" if record.get("in_flight") else record.get("status"),
    ]
    parts += [record.get("finish_reason"), record.get("error")]
    yield f"request {record.get('request_id')}: {' '.join(str(part) for part in parts if part)}"
    arrived = record.get("arrived_at")
    if arrived is not None:
        when = datetime.fromtimestamp(arrived).isoformat(" ", "milliseconds")
        yield f"arrived {when}" + (f", with key {record['key_id']}" if record.get("key_id") else "")
    cached = record.get("cached_tokens")
    yield (
        f"{figures.count(record.get('prompt_tokens'))} tokens of prompt"
        + ("" if cached is None else f", {figures.count(cached)} of them cached")
        + f"; {figures.count(record.get('generated_tokens'))} generated"
    )
    yield f"first token after {_ms(record.get('ttft_ms'))}, all of it {_ms(record.get('duration_ms'))}"


def _phases(record: Record, columns: int) -> Iterator[str]:
    phases = phases_of(record)
    whole = record.get("duration_ms") or sum(length for name, _, length in phases if name not in _WITHIN) or 1.0
    yield f"{'phase':<15}{'from ms':>10}{'took ms':>10}"
    for name, begin, length in phases:
        note = f"  (in {_WITHIN[name]})" if name in _WITHIN else ""
        line = f"{name:<15}{begin:>10,.1f}{length:>10,.1f}"
        yield f"{line}  {_bar(begin, length, whole, columns - _LEFT)}{note}".rstrip()
    total = sum(length for name, _, length in phases if name not in _WITHIN)
    yield f"{'together':<15}{'':>10}{total:>10,.1f}  of {whole:,.1f}"


def _bar(begin: float, length: float, whole: float, columns: int) -> str:
    """Draws an interval of the whole; none where there is no room."""
    if columns < _MIN_BAR:
        return ""
    first = min(int(begin / whole * columns), columns - 1)
    last = min(max(first + 1, round((begin + length) / whole * columns)), columns)
    return " " * first + "━" * (last - first)


def _attempt(attempt: Record, columns: int) -> Iterator[str]:
    at = attempt.get("at_ms") or {}
    expected = attempt.get("expected_s") or {}
    costs = [f"{name} {value:.3f} s" for name, value in expected.items() if value is not None]
    yield (
        f"attempt {attempt.get('number')}, sent after {_ms(at.get('sent'))}"
        + (f": {attempt['why']}" if attempt.get("why") else "")
        + (f"; expected {', '.join(costs)}" if costs else "")
    )
    for worker in attempt.get("workers") or ():
        yield from _at_worker(worker)
    if attempt.get("failure"):
        yield f"  failed: {attempt['failure']}"
    for end in attempt.get("ends") or ():
        words = f"{end.get('reason')} after {_ms(end.get('at_ms'))}, with {figures.count(end.get('tokens'))} tokens"
        yield f"  choice {end.get('choice')}: {words}"
    if candidates := attempt.get("candidates"):
        table = as_table(_CANDIDATES, candidates, 0.0, columns - 4)
        yield from (f"    {line}" for line in table.splitlines())


def _at_worker(worker: Record) -> Iterator[str]:
    cached = worker.get("cached_tokens") or {}
    found, predicted = figures.count(cached.get("found")), figures.count(cached.get("predicted"))
    yield f"  {worker.get('role')} {worker.get('worker') or 'worker'}: {found} tokens cached, {predicted} predicted"
    at = {name: moment for name, moment in (worker.get("at_ms") or {}).items() if moment is not None}
    if at:
        moments = ", ".join(f"{name} {moment:,.1f}" for name, moment in at.items())
        yield f"    at ms: {moments}; {_ms(worker.get('wire_ms'))} on the wire"
    if worker.get("transport"):
        moved = f"{figures.size(worker.get('kv_bytes') or 0)} in {_ms(worker.get('reading_ms'))}"
        why = f" ({worker['why_transport']})" if worker.get("why_transport") else ""
        yield f"    KV over {worker['transport']}{why}: {moved}"


def _ms(value: float | None) -> str:
    return f"{figures.milliseconds(value)} ms" if value is not None else figures.UNKNOWN


def _number(title: str, name: str) -> Column[Record]:
    return Column(title, lambda row, _: figures.count(row.get(name)), right=True)


def _text(title: str, name: str) -> Column[Record]:
    return Column(title, lambda row, _: str(row.get(name, figures.UNKNOWN)))


_CANDIDATES: Sequence[Column[Record]] = (
    _text("candidate", "worker"),
    _text("role", "role"),
    _number("cost", "cost"),
    _text("verdict", "verdict"),
    _number("cached", "cached_tokens"),
    _number("queued", "queued_tokens"),
    _number("sequences", "sequences"),
)
