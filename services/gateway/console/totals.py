"""Counts of a gateway since its start, read off its metrics: samples are made of their growth."""

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import Counter

from services.gateway.metrics import Buckets, GatewayMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts since the gateway's start. buckets: of histograms, the counts by bucket, one more than bounds.

    sums: of the values in them, in seconds.
    """

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    handoffs: int
    handoff_failed: int
    kv_bytes: int
    buckets: dict[str, list[int]]
    sums: dict[str, float]

    def grown_since(self, before: "Totals") -> dict[str, object]:
        """Returns how much each has grown, as a sample has it."""
        numbers = ("prompt_tokens", "cached_tokens", "generated_tokens", "handoffs", "handoff_failed", "kv_bytes")
        grown: dict[str, object] = {name: getattr(self, name) - getattr(before, name) for name in numbers}
        for name, counts in self.buckets.items():
            grown[name] = [now - then for now, then in zip(counts, before.buckets[name], strict=True)]
        grown["sums"] = {name: round(total - before.sums[name], 6) for name, total in self.sums.items()}
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
        buckets={name: list(each.counts) for name, each in _histograms(metrics).items()},
        sums={name: each.total for name, each in _histograms(metrics).items()},
    )


def read_bounds(metrics: GatewayMetrics) -> dict[str, Sequence[float]]:
    """Returns the upper bounds of the buckets of each histogram, but for the last one, which has none; in seconds."""
    return {name: each.bounds for name, each in _histograms(metrics).items()}


def _histograms(metrics: GatewayMetrics) -> dict[str, Buckets]:
    """The histograms that samples have, by their names there."""
    return {
        "ttft": metrics.ttft.buckets,
        "itl": metrics.tokens.gaps,
        "e2e": metrics.duration.buckets,
        "queue": metrics.phases.by_name["queue"],
    }


def _value(counter: Counter) -> int:
    (family,) = counter.collect()
    return int(family.samples[0].value)


def _by_label(counter: Counter, label: str) -> dict[str, int]:
    (family,) = counter.collect()
    return {each.labels[label]: int(each.value) for each in family.samples if each.name.endswith("_total")}
