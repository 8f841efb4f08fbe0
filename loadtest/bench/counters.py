"""Baton's own counters over a run: the difference between two readings of /metrics."""

import asyncio
from collections import Counter, defaultdict
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from loadtest import http_stream
from loadtest.http_stream import Address, HttpError

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at one moment."""

    handoffs: Counter[str]  # by outcome
    kv_bytes_moved: int
    first_tokens: int  # requests that had one
    ttft_s: float  # of all of them together, as the gateway measures it


async def read(address: Address | None) -> Reading | None:
    """Reads Baton's counters at its admin port; None when there is none, or what answers there is no Baton."""
    if address is None:
        return None
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            answer = await http_stream.ask(address, "/metrics", None)
        return parse(answer.body().decode())
    except (HttpError, TimeoutError, ValueError, OverflowError):  # also where a page is no UTF-8, or no metrics
        return None


def parse(text: str) -> Reading | None:
    """Parses Prometheus' text format; None when it has no counters of Baton's. Raises ValueError or
    OverflowError for other texts.
    """
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    if not any(sample.name.startswith("baton_") for sample in samples):
        return None
    handoffs: Counter[str] = Counter()
    totals: defaultdict[str, float] = defaultdict(float)
    for sample in samples:
        if sample.name == "baton_handoffs_total":
            handoffs[sample.labels.get("outcome", "")] += int(sample.value)
        totals[sample.name] += sample.value
    return Reading(
        handoffs,
        kv_bytes_moved=int(totals["baton_kv_bytes_moved_total"]),
        first_tokens=int(totals["baton_ttft_seconds_count"]),
        ttft_s=totals["baton_ttft_seconds_sum"],
    )


def difference(before: Reading, after: Reading) -> Reading:
    """Subtracts one reading from a later one."""
    return Reading(
        after.handoffs - before.handoffs,
        after.kv_bytes_moved - before.kv_bytes_moved,
        after.first_tokens - before.first_tokens,
        after.ttft_s - before.ttft_s,
    )
