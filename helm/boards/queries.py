"""Expressions of PromQL, with the function that fits a metric's kind: a rate of a counter, a quantile of buckets.

Every gateway tells of every worker, so a worker's metric is the greatest of what gateways say, never their sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from helm.boards.metric_table import Kind, Metric

SELECTED = 'namespace=~"$namespace",job=~"$job"'
WINDOW = "$__rate_interval"
_GATEWAY = ("pod", "instance")  # labels that Prometheus adds; outside of Kubernetes there is no pod


@dataclass(frozen=True, slots=True)
class Query:
    """An expression, the words of its line, and the metrics that it asks for."""

    expr: str
    legend: str
    metrics: tuple[str, ...]

    def over(self, other: "Query", legend: str | None = None) -> "Query":
        """Divides by another one, label by label."""
        metrics = tuple(dict.fromkeys((*self.metrics, *other.metrics)))
        return Query(f"{self.expr} / {other.expr}", self.legend if legend is None else legend, metrics)

    def or_zero(self) -> "Query":
        """Shows 0 where there is nothing to be shown, as of a label that no sample has yet."""
        return Query(f"({self.expr} or vector(0))", self.legend, self.metrics)

    def times(self, factor: float) -> "Query":
        """Multiplies by a number."""
        return Query(f"{self.expr} * {factor:g}", self.legend, self.metrics)

    def named(self, legend: str) -> "Query":
        """Gives it other words."""
        return Query(self.expr, legend, self.metrics)


class Queries:
    """Makes queries of metrics that are in the table. All raise ValueError for a kind or a label that is not there."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics

    def rate(self, name: str, *by: str, where: str = "") -> Query:
        """Sums a counter's rises, each second."""
        self._check(name, ("counter",), by)
        return self._query(f"sum{_by(by)}(rate({name}{_selector(where)}[{WINDOW}]))", name, by)

    def quantile(self, quantile: float, name: str, *by: str, where: str = "") -> Query:
        """Estimates a quantile of a histogram."""
        self._check(name, ("histogram",), by)
        summed = f"sum{_by(('le', *by))}(rate({name}_bucket{_selector(where)}[{WINDOW}]))"
        return self._query(f"histogram_quantile({quantile:g}, {summed})", name, by, f"p{quantile * 100:g}")

    def quantiles(self, name: str, where: str = "") -> list[Query]:
        """Estimates the quantiles that boards show."""
        return [self.quantile(quantile, name, where=where) for quantile in (0.5, 0.9, 0.99)]

    def average(self, name: str, *by: str, where: str = "") -> Query:
        """Divides the sum of a histogram's values by their number."""
        return self._of(f"{name}_sum", name, by, where).over(self._of(f"{name}_count", name, by, where))

    def buckets(self, name: str) -> Query:
        """Counts a histogram's values by bucket."""
        self._check(name, ("histogram",), ())
        return Query(f"sum by (le) (increase({name}_bucket{_selector('')}[{WINDOW}]))", "{{le}}", (name,))

    def share_within(self, name: str, bound: str) -> Query:
        """Divides the number of a histogram's values that are not above a bucket's bound by that of all."""
        below = self._of(f"{name}_bucket", name, (), f'le="{bound}"')
        return below.over(self._of(f"{name}_count", name, ())).named(f"within {bound} s")

    def of_gateways(self, name: str, *by: str, where: str = "") -> Query:
        """Shows a gauge of each gateway's own."""
        self._check(name, ("gauge",), by)
        labels = (*_GATEWAY, *by)
        return self._query(f"max{_by(labels)}({name}{_selector(where)})", name, labels)

    def sum_of_gateways(self, name: str) -> Query:
        """Adds up a gauge of each gateway's own."""
        self._check(name, ("gauge",), ())
        return self._query(f"sum({name}{_selector('')})", name, ())

    def count_of_gateways(self, name: str) -> Query:
        """Counts the gateways that have a gauge."""
        self._check(name, ("gauge",), ())
        return self._query(f"count({name}{_selector('')})", name, ())

    def of_workers(self, name: str, *by: str, where: str = "") -> Query:
        """Shows a gauge that all gateways have of each worker, or of each pair."""
        by = by or ("role", "worker")
        self._check(name, ("gauge",), by)
        return self._query(f"max{_by(by)}({name}{_selector(where)})", name, by)

    def rise_of_workers(self, name: str) -> Query:
        """Shows how fast a gauge rises that counts since a worker's start."""
        self._check(name, ("gauge",), ("role", "worker"))
        expr = f"max by (role, worker) (rate({name}{_selector('')}[{WINDOW}]))"
        return self._query(expr, name, ("role", "worker"))

    def rise_of_gateways(self, name: str) -> Query:
        """Shows how fast a gauge rises that counts since a gateway's start."""
        self._check(name, ("gauge",), ())
        return self._query(f"max{_by(_GATEWAY)}(rate({name}{_selector('')}[{WINDOW}]))", name, _GATEWAY)

    def number_of(self, query: Query, *by: str) -> Query:
        """Counts what another query shows."""
        return Query(f"count{_by(by)}({query.expr})", _legend(by), query.metrics)

    def sum_of(self, query: Query, *by: str) -> Query:
        """Adds up what another query shows."""
        return Query(f"sum{_by(by)}({query.expr})", _legend(by), query.metrics)

    def meaning(self, name: str) -> str:
        """Returns the table's words for a metric."""
        return self._metrics[name].meaning

    def _of(self, sample: str, name: str, by: Sequence[str], where: str = "") -> Query:
        self._check(name, ("histogram",), by)
        return self._query(f"sum{_by(by)}(rate({sample}{_selector(where)}[{WINDOW}]))", name, by)

    def _query(self, expr: str, name: str, by: Sequence[str], legend: str = "") -> Query:
        return Query(expr, " ".join(filter(None, (legend, _legend(by)))), (name,))

    def _check(self, name: str, kinds: Sequence[Kind], by: Sequence[str]) -> None:
        if (metric := self._metrics.get(name)) is None:
            raise ValueError(f"there is no metric {name}")
        if metric.kind not in kinds:
            raise ValueError(f"{name} is a {metric.kind}, not a {' or '.join(kinds)}")
        if unknown := set(by) - metric.labels - set(_GATEWAY):
            raise ValueError(f"{name} has no label {', '.join(sorted(unknown))}")


def _selector(where: str) -> str:
    return f"{{{','.join(filter(None, (where, SELECTED)))}}}"


def _by(labels: Sequence[str]) -> str:
    return f" by ({', '.join(labels)}) " if labels else ""


def _legend(labels: Sequence[str]) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in labels)
