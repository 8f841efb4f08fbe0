"""The board of latency: how long clients wait, for what, and how many of them as long as they may."""

from helm.boards.panels import Board, Panel, Row, Shape
from helm.boards.queries import Queries, Query

_TTFT, _ITL, _E2E, _PHASES = "baton_ttft_seconds", "baton_itl_seconds", "baton_e2e_seconds", "baton_phase_seconds"


def make_latency(q: Queries) -> Board:
    """Makes the board. Raises ValueError where a panel asks for what no metric has."""
    goal = q.share_within(_TTFT, "$slo").named("within the goal")
    percentiles = [
        Panel("Time to the first token", q.quantiles(_TTFT), "s"),
        Panel("Time between deltas", q.quantiles(_ITL), "s"),
        Panel("Whole requests", q.quantiles(_E2E), "s"),
    ]
    heats = [
        Panel("First tokens by their time", [q.buckets(_TTFT)], "s", Shape.HEAT),
        Panel("Deltas by the time between them", [q.buckets(_ITL)], "s", Shape.HEAT),
        Panel("Requests by their time", [q.buckets(_E2E)], "s", Shape.HEAT),
    ]
    phases = [
        Panel("Where time goes, on average", [_average_phases(q)], "s", Shape.STACK),
        Panel("Phases, 95th percentile", [q.quantile(0.95, _PHASES, "phase").named("{{phase}}")], "s"),
        Panel("Queues of workers, by percentile", q.quantiles(_PHASES, where='phase="queue"'), "s"),
    ]
    tokens = [
        Panel("First tokens within the goal", [goal], "percentunit"),
        Panel("Tokens, each second", [q.rate("baton_generated_tokens_total").named("generated"), _prompts(q)]),
        Panel("Sequences that wait, by role", [_waiting(q)]),
    ]
    rows = [Row("Percentiles", percentiles), Row("All of them", heats), Row("Phases", phases), Row("Work", tokens)]
    return Board("latency", "Baton: latency", rows, bounds_of=_TTFT)


def _average_phases(q: Queries) -> Query:
    """Leaves out the one phase that is a part of another."""
    return q.average(_PHASES, "phase", where='phase!="handoff"')


def _prompts(q: Queries) -> Query:
    return q.rate("baton_prompt_tokens_total").named("of prompts")


def _waiting(q: Queries) -> Query:
    return q.sum_of(q.of_workers("baton_worker_waiting"), "role")
