"""Expressions of PromQL, looked at as text: which metrics and labels they name, and how they use each kind."""

import re
from functools import cache

from tests.test_docs import registered_metrics

# What Prometheus adds to every sample: where it found it.
PLACE = frozenset({"namespace", "job", "pod", "instance"})
METRIC = re.compile(r"\b(baton_\w+)\s*(\{[^}]*\})?")
GROUPED = re.compile(r"\bby\s*\(([\w, ]*)\)")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
# A function of the rise in a window, and what it is of.
_RISE = re.compile(r"\b(?:rate|increase)\((baton_\w+)")


@cache
def samples() -> dict[str, tuple[str, frozenset[str]]]:
    """The names of all samples, with the metric's kind and the sample's labels."""
    found: dict[str, tuple[str, frozenset[str]]] = {}
    for name, kind, labels in registered_metrics():
        names = [name] if kind != "histogram" else [f"{name}_{suffix}" for suffix in ("bucket", "sum", "count")]
        found |= {each: (kind, labels | PLACE | ({"le"} if each.endswith("_bucket") else set())) for each in names}
    return found


def problems(query: str, counting_gauges: frozenset[str] = frozenset()) -> list[str]:
    """What in a query names no metric, or a label that its metric does not have, or uses it as one of another kind.

    counting_gauges: those that count since a process's start, whose rise means something.
    """
    known = samples()
    named = [(name, selector, known[name]) for name, selector in METRIC.findall(query) if name in known]
    found = [f"no metric {name}" for name, _ in METRIC.findall(query) if name not in known]
    for name, selector, (_, labels) in named:
        found += [f"{name} has no {label}" for label in _LABEL.findall(selector) if label not in labels]
    every = PLACE.union(*(labels for _, _, (_, labels) in named))
    grouped = {label.strip() for labels in GROUPED.findall(query) for label in labels.split(",")} - {""}
    found += [f"no label {label}" for label in sorted(grouped - every)]
    return found + _misused(query, counting_gauges)


def _misused(query: str, counting_gauges: frozenset[str]) -> list[str]:
    known, rising = samples(), _RISE.findall(query)
    found = []
    for name in rising:
        kind = known[name][0] if name in known else ""
        if kind == "gauge" and name not in counting_gauges:
            found.append(f"{name} is a gauge, which goes down too")
    for name, _ in METRIC.findall(query):
        if name in known and known[name][0] != "gauge" and name not in rising and f"{name}_" not in query:
            found.append(f"{name} only ever rises: ask for its rate")
    if "histogram_quantile" in query and not re.search(r"histogram_quantile\([\d.]+, sum by \(le[,)]", query):
        found.append("a quantile is of buckets, added up by le")
    return found
