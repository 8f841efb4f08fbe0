"""The board of handoffs: how many there are, how they end, what they move and by which way."""

from helm.boards.panels import Board, Panel, Row, Shape
from helm.boards.queries import Queries, Query

_PAIR = ("prefill", "decode")


def make_handoffs(q: Queries) -> Board:
    """Makes the board. Raises ValueError where a panel asks for what no metric has."""
    failed = q.rate("baton_handoffs_total", where='outcome=~"failed_.*"').or_zero()
    ends = [
        Panel("Handoffs by their end", [q.rate("baton_handoffs_total", "outcome")], "reqps"),
        Panel("Handoffs that failed, by reason", [q.rate("baton_handoff_failures_total", "reason")], "reqps"),
        Panel("Share that failed", [failed.over(q.rate("baton_handoffs_total"), "failed")], "percentunit"),
    ]
    plans = [
        Panel("Plans, and what decided", [q.rate("baton_plans_total", "plan", "why")], "reqps", Shape.STACK),
        Panel(
            "From the first token to decode's first", q.quantiles("baton_phase_seconds", where='phase="handoff"'), "s"
        ),
        Panel("Blocks in quarantine", [q.of_workers("baton_blocks_quarantined")]),
        Panel("Handoffs that failed, by pair", [_failed_by_pair(q)], "reqps"),
        Panel("Handoffs completed, by pair", [_completed_by_pair(q)], "reqps"),
    ]
    moved = [
        Panel("KV moved", [q.rate("baton_kv_bytes_moved_total").named("read by decode workers")], "Bps"),
        Panel("KV moved, by pair", [_named(q.rate("baton_pair_kv_bytes_total", *_PAIR))], "Bps"),
        Panel("Rate of a handoff's reads, by pair", [_rate_of_reads(q)], "Bps"),
        Panel("Time of reads, each second, by pair", [_named(q.rate("baton_pair_reading_seconds_total", *_PAIR))], "s"),
        Panel("Pairs by transport", [_by_transport(q)]),
        Panel("Why a pair uses its transport", [_ways(q)], shape=Shape.TABLE),
    ]
    rows = [Row("Ends", ends), Row("Plans", plans), Row("Reads", moved)]
    return Board("handoffs", "Baton: handoffs", rows)


def _named(query: Query) -> Query:
    return query.named("{{prefill}} to {{decode}}")


def _failed_by_pair(q: Queries) -> Query:
    return _named(q.rate("baton_pair_handoffs_total", *_PAIR, where='outcome="failed"'))


def _completed_by_pair(q: Queries) -> Query:
    return _named(q.rate("baton_pair_handoffs_total", *_PAIR, where='outcome="completed"'))


def _rate_of_reads(q: Queries) -> Query:
    num_bytes, seconds = (
        q.rate(name, *_PAIR) for name in ("baton_pair_kv_bytes_total", "baton_pair_reading_seconds_total")
    )
    return _named(num_bytes.over(seconds))


def _by_transport(q: Queries) -> Query:
    return q.number_of(q.of_workers("baton_pair_transport", *_PAIR, "transport"), "transport")


def _ways(q: Queries) -> Query:
    return q.of_workers("baton_pair_transport", *_PAIR, "transport", "why")
