"""Counts of a gateway since its start, read off its metrics: samples are made of their growth."""

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import Counter, Histogram

from services.gateway.metrics import GatewayMetrics

FIGURES = ("ttft", "itl", "e2e", "queue")  # histograms, by their names in samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts since the gateway's start. buckets: by name of FIGURES, the counts by bucket, one more than bounds."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    handoffs: int
    handoff_failed: int
    kv_bytes: int
    buckets: dict[str, list[int]]

    def grown_since(self, before: "Totals") -> dict[str, object]:
        """Returns how much each has grown, as a sample has it."""
        numbers = ("prompt_tokens", "cached_tokens", "generated_tokens", "handoffs", "handoff_failed", "kv_bytes")
        grown: dict[str, object] = {name: getattr(self, name) - getattr(before, name) for name in numbers}
        for name, counts in self.buckets.items():
            grown[name] = [now - then for now, then in zip(counts, before.buckets[name], strict=True)]
        return grown


def read_totals(metrics: GatewayMetrics) -> Totals:
    """Reads the metrics as they are now."""
    outcomes = _by_label(metrics.handoffs, "outcome")
    return Totals(
        prompt_tokens=_value(metrics.prompt_tokens),
        cached_tokens=_value(metrics.prompt_cached),
        generated_tokens=metrics.tokens.generated,
        handoffs=outcomes.get("completed", 0),
        handoff_failed=sum(count for outcome, count in outcomes.items() if outcome.startswith("failed_")),
        kv_bytes=_value(metrics.moved),
        buckets={
            "ttft": _counts(metrics.ttft),
            "itl": list(metrics.tokens.gaps.counts),
            "e2e": _counts(metrics.duration),
            "queue": list(metrics.phases.by_name["queue"].counts),
        },
    )


def read_bounds(metrics: GatewayMetrics) -> dict[str, Sequence[float]]:
    """Returns the upper bounds of the buckets of each of FIGURES, but for the last one, which has none; in seconds."""
    return {
        "ttft": _bounds(metrics.ttft),
        "itl": metrics.tokens.gaps.bounds,
        "e2e": _bounds(metrics.duration),
        "queue": metrics.phases.by_name["queue"].bounds,
    }


def _value(counter: Counter) -> int:
    (family,) = counter.collect()
    return int(family.samples[0].value)


def _by_label(counter: Counter, label: str) -> dict[str, int]:
    (family,) = counter.collect()
    return {each.labels[label]: int(each.value) for each in family.samples if each.name.endswith("_total")}


def _buckets(histogram: Histogram) -> list[tuple[float, float]]:
    """Each bound with the number of values that were not above it."""
    (family,) = histogram.collect()
    return [(float(each.labels["le"]), each.value) for each in family.samples if each.name.endswith("_bucket")]


def _counts(histogram: Histogram) -> list[int]:
    cumulated = [int(number) for _, number in _buckets(histogram)]
    return [number - before for number, before in zip(cumulated, [0, *cumulated], strict=False)]


def _bounds(histogram: Histogram) -> list[float]:
    return [bound for bound, _ in _buckets(histogram)][:-1]
