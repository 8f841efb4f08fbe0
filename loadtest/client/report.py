"""The numbers that serving benchmarks print, computed from the outcomes of requests."""

from dataclasses import asdict, dataclass

import numpy as np

from loadtest.client.counters import Reading
from loadtest.client.drive import Outcome
from loadtest.tables import aligned

_PERCENTILES = (50, 90, 99)
_FIGURES = ("mean", "p50", "p90", "p99")
_IS_TEXT, _WIDTHS = (True, False, False, False, False), (12, 10, 10, 10, 10)


@dataclass(frozen=True, slots=True)
class Latency:
    """Mean and percentiles of some requests' times, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Report:
    """One run. Throughput counts finished requests, from the first sent to the last part received."""

    requests: int
    failed: int
    errors: list[str]  # different ones
    seconds: float
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Latency | None
    tpot_ms: Latency | None
    itl_ms: Latency | None
    second_token_ms: Latency | None  # between the first part and the second: here a handoff shows
    handoffs: dict[str, int] | None  # by outcome; None: the server is no Baton
    handed_off: float | None  # handoffs that completed, over all requests
    kv_bytes_moved: int | None
    gateway_ttft_ms: float | None  # mean, measured at the gateway; None: no request had a first token there

    def as_dict(self) -> dict[str, object]:
        """Returns plain values, for JSON."""
        return asdict(self)


def report(outcomes: list[Outcome], counted: Reading | None) -> Report:
    """Sums up the outcomes of a run; `counted` is what Baton counted meanwhile, None for another server."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    seconds = max((o.parts_s[-1] for o in good), default=0.0) - min((o.sent_s for o in good), default=0.0)
    tokens = sum(outcome.output_tokens for outcome in good)
    return Report(
        requests=len(outcomes),
        failed=len(outcomes) - len(good),
        errors=sorted({outcome.error for outcome in outcomes if outcome.error is not None}),
        seconds=seconds,
        output_tokens=tokens,
        output_tokens_per_s=tokens / seconds if good else 0.0,
        requests_per_s=len(good) / seconds if good else 0.0,
        ttft_ms=_latency([outcome.ttft_s for outcome in good]),
        tpot_ms=_latency([outcome.tpot_s for outcome in good if outcome.tpot_s is not None]),
        itl_ms=_latency([gap for outcome in good for gap in outcome.itl_s]),
        second_token_ms=_latency([outcome.itl_s[0] for outcome in good if len(outcome.parts_s) > 1]),
        handoffs=None if counted is None else dict(counted.handoffs),
        handed_off=None if counted is None else counted.handoffs["completed"] / len(outcomes),
        kv_bytes_moved=None if counted is None else counted.kv_bytes_moved,
        gateway_ttft_ms=counted.ttft_s / counted.first_tokens * 1e3 if counted and counted.first_tokens else None,
    )


def summary(report: Report) -> str:
    """Writes the report for a person."""
    lines = [
        f"requests        {report.requests} ({report.failed} failed) in {report.seconds:.2f} s",
        *(f"error           {error}" for error in report.errors[:5]),
        f"throughput      {report.output_tokens_per_s:.1f} output tokens/s, {report.requests_per_s:.2f} requests/s",
        *_latency_lines(report),
    ]
    if report.gateway_ttft_ms is not None and report.ttft_ms is not None:
        ratio = report.ttft_ms.mean / report.gateway_ttft_ms
        lines.append(
            f"TTFT by gateway {report.gateway_ttft_ms:.2f} ms in the mean; the client's is {ratio:.3f} times it"
        )
    if report.handoffs is not None and report.handed_off is not None and report.kv_bytes_moved is not None:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.handoffs.items())) or "none"
        lines.append(f"handed off      {report.handed_off:.0%} of the requests (handoffs: {outcomes})")
        lines.append(f"KV moved        {report.kv_bytes_moved / 2**20:.1f} MiB")
    return "\n".join(lines)


def _latency_lines(report: Report) -> list[str]:
    named = {
        "TTFT": report.ttft_ms,
        "2nd token": report.second_token_ms,
        "TPOT": report.tpot_ms,
        "ITL": report.itl_ms,
    }
    lines: list[tuple[str, ...]] = [("ms", *_FIGURES)]
    for name, latency in named.items():
        if latency is not None:
            lines.append((name, *(f"{getattr(latency, figure):.2f}" for figure in _FIGURES)))
    return ["".join(line) for line in aligned(lines, _IS_TEXT, _WIDTHS)]


def _latency(seconds: list[float]) -> Latency | None:
    if not seconds:
        return None
    milliseconds = np.asarray(seconds) * 1e3
    return Latency(float(milliseconds.mean()), *(float(np.percentile(milliseconds, p)) for p in _PERCENTILES))
