"""The board of the fleet: which gateways and workers there are, what they do, and what is wrong with them."""

from helm.boards.panels import Board, Panel, Row, Shape
from helm.boards.queries import Queries, Query

# Leaves out what supervisors, load balancers, Prometheus and consoles ask, and no client; so do the chart's rules.
OF_CLIENTS = 'endpoint!~"console([.].*)?|debug[.].*|docs([.].*)?|health|load|metrics|openapi[.]json|ping|ready|root"'
_MICROSECOND = 1e-6  # in seconds


def make_fleet(q: Queries) -> Board:
    """Makes the board. Raises ValueError where a panel asks for what no metric has."""
    rows = [
        Row("Now", _now(q), columns=6, height=4),
        Row("Requests", _requests(q)),
        Row("Workers", _workers(q)),
        Row("Gateways", _gateways(q)),
    ]
    return Board("fleet", "Baton: fleet", rows)


def _now(q: Queries) -> list[Panel]:
    draining = q.of_workers("baton_worker_draining")
    refused = q.of_workers("baton_worker_refused", "worker")
    return [
        _number("Gateways", q.count_of_gateways("baton_requests_in_flight")),
        _number("Prefill workers", _workers_of(q, "prefill")),
        _number("Decode workers", _workers_of(q, "decode")),
        _number("Workers that drain", q.sum_of(draining)),
        _number("Workers that do not fit", q.number_of(refused), wrong_from=1),
        _number("Requests in flight", q.sum_of_gateways("baton_requests_in_flight")),
    ]


def _requests(q: Queries) -> list[Panel]:
    clients = q.rate("baton_requests_total", "endpoint", "status", where=OF_CLIENTS)
    return [
        Panel("Requests of clients", [clients], "reqps"),
        Panel("Requests in flight, by gateway", [q.of_gateways("baton_requests_in_flight")]),
        Panel("Refused before any work", [q.rate("baton_admission_refusals_total", "cause")], "reqps"),
        Panel("Attempts", [q.rate("baton_attempts_total").named("sent to workers")], "reqps"),
        Panel("Attempts by their end", [q.rate("baton_attempt_ends_total", "reason")], "reqps"),
        Panel("Fields that nothing acts on", [q.rate("baton_ignored_fields_total").named("of requests")], "cps"),
    ]


def _workers(q: Queries) -> list[Panel]:
    info = q.of_workers("baton_worker_info", "role", "kernels", "worker")
    pauses = q.rise_of_workers("baton_worker_gc_pause_microseconds").times(_MICROSECOND)
    return [
        Panel("Workers by role and kernels", [q.number_of(info, "role", "kernels")]),
        Panel("Sequences that run", [q.of_workers("baton_worker_running")]),
        Panel("Sequences that wait", [q.of_workers("baton_worker_waiting")]),
        Panel("Tokens that steps compute, each second", [q.rise_of_workers("baton_worker_computed_tokens")]),
        Panel("Numbers that are not finite", [q.of_workers("baton_worker_not_finite")]),
        Panel("Busiest expert, worst layer", [q.of_workers("baton_worker_worst_expert_imbalance")]),
        Panel("Busiest expert, mean of layers", [q.of_workers("baton_worker_mean_expert_imbalance")]),
        Panel("Slowest rank", [q.of_workers("baton_worker_slowest_rank")]),
        Panel("Waited for the slowest", [q.of_workers("baton_worker_waited_for_slowest_rank")], "percentunit"),
        Panel("Rank with the busiest experts, worst layer", [q.of_workers("baton_worker_worst_rank_imbalance")]),
        Panel("Rank with the busiest experts, mean of layers", [q.of_workers("baton_worker_mean_rank_imbalance")]),
        Panel("Drains", [q.of_workers("baton_worker_draining")]),
        Panel("Workers that do not fit, and why", [_refused(q)], shape=Shape.TABLE),
        Panel("Share of time in garbage collections", [pauses], "percentunit"),
        Panel("Garbage collections, each second", [q.rise_of_workers("baton_worker_gc_collections")], "cps"),
    ]


def _gateways(q: Queries) -> list[Panel]:
    held_up = "baton_gateway_loop_pause_seconds"
    pauses = q.rise_of_gateways("baton_gateway_gc_pause_microseconds").times(_MICROSECOND)
    return [
        Panel("Pauses of event loops, 99th percentile", [q.quantile(0.99, held_up, "pod", "instance")], "s"),
        Panel("Share of time in garbage collections", [pauses], "percentunit"),
        Panel("Garbage collections, each second", [q.rise_of_gateways("baton_gateway_gc_collections")], "cps"),
        Panel("Files that are refused, since", [q.of_gateways("baton_files_refused_seconds", "files")], "s"),
        Panel("Limits of keys counted alone", [q.of_gateways("baton_limits_alone")]),
        Panel("Gateways that share the limits of keys", [q.of_gateways("baton_limits_gateways")]),
        Panel("Log lines that could not be written", [q.of_gateways("baton_gateway_log_lines_dropped")]),
    ]


def _number(title: str, query: Query, wrong_from: float | None = None) -> Panel:
    return Panel(title, [query], shape=Shape.NUMBER, wrong_from=wrong_from)


def _workers_of(q: Queries, role: str) -> Query:
    return q.number_of(q.of_workers("baton_worker_info", "worker", where=f'role="{role}"'))


def _refused(q: Queries) -> Query:
    return q.of_workers("baton_worker_refused", "worker", "why")
