"""The figures of runs as text: a table with a column for each run, and what stands out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtest.bench.report import Latency, Report
from loadtest.bench.result import Result

_LATENCIES = (
    ("TTFT", "ttft_ms"),
    ("ITL", "itl_ms"),
    ("TPOT", "tpot_ms"),
    ("end to end", "e2e_ms"),
    ("2nd token", "second_token_ms"),
    ("connecting", "connect_ms"),
)
_FIGURES = ("mean", "p50", "p90", "p99")
_NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of all runs. name: empty where it is that of the row above; begins: a line is above it."""

    name: str
    unit: str
    cells: tuple[str, ...]
    begins: bool = False


def figure_rows(results: Sequence[Result]) -> list[Row]:
    """The figures that any of the runs has."""
    reports = [result.report for result in results]
    rows = [
        _row("requests", "", reports, lambda run: f"{run.requests:,}"),
        _row("failed", "", reports, lambda run: f"{run.failed:,}"),
        _row("time", "s", reports, lambda run: _digits(run.seconds)),
        _row("throughput", "output tokens/s", reports, lambda run: _digits(run.output_tokens_per_s), begins=True),
        _row("", "requests/s", reports, lambda run: _digits(run.requests_per_s)),
        _row("goodput", "requests/s", reports, _goodput),
        _row("", "of all requests", reports, _attainment),
    ]
    for name, field in _LATENCIES:
        rows += [
            _row(
                name if figure == "mean" else "",
                f"ms, {figure}",
                reports,
                _latency(field, figure),
                begins=figure == "mean",
            )
            for figure in _FIGURES
        ]
    rows += [
        _row("tokens", "of answers", reports, lambda run: f"{run.output_tokens:,}", begins=True),
        _row("", "of prompts", reports, lambda run: f"{run.input_tokens:,}" if run.input_tokens else _NOTHING),
        _row("handed off", "of all requests", reports, lambda run: _share(run.handed_off)),
        _row("KV moved", "MiB", reports, _moved),
        _row("whole JSON", "of the answers", reports, lambda run: _share(run.valid)),
        _row(
            "the client",
            "of a core",
            reports,
            lambda run: _share(run.client.cpu_share if run.client else None),
            begins=True,
        ),
        _row("", "ms late in sending, p99", reports, lambda run: _p99(run.client.sent_late_ms if run.client else None)),
        _row("", "ms late in reading, p99", reports, lambda run: _p99(run.client.read_late_ms if run.client else None)),
    ]
    return [row for row in rows if set(row.cells) != {_NOTHING}]


def warnings(report: Report) -> list[str]:
    """Lines that a reader of the figures has to know."""
    found = [
        f"The client or its machine limited this run: {reason}."
        for reason in (report.client.limits if report.client else [])
    ]
    found += [f"{count:,} × {kind}" for kind, count in (report.errors_by_kind or {}).items()]
    if report.unfinished:
        found.append(f"Stopped while {report.unfinished:,} requests were open.")
    if report.skipped:
        found.append(f"{report.skipped:,} turns of conversations were not sent.")
    if report.waited:
        found.append(f"{report.waited:,} waited for a place at the client.")
    if report.unsent:
        found.append(f"{report.unsent:,} were not sent: the time was over before there was a place at the client.")
    if report.without_usage:
        found.append(f"{report.without_usage:,} answers had no usage: their deltas count as tokens.")
    if report.counters_lost:
        found.append("The admin port told no counters after the run: handoffs are not known.")
    if report.gaps_sampled < 1:
        found.append(f"Percentiles of ITL are of {report.gaps_sampled:.1%} of all times, chosen by chance.")
    return found


def headlines(report: Report) -> list[tuple[str, str, str]]:
    """The first figures that people look for: name, value, and unit."""
    found = [
        ("output", _digits(report.output_tokens_per_s), "tokens/s"),
        ("requests", _digits(report.requests_per_s), "per second"),
        ("TTFT p50 / p99", _pair(report.ttft_ms), "ms"),
        ("ITL p50 / p99", _pair(report.itl_ms), "ms"),
    ]
    if report.goodput is not None:
        found.append(("goodput", _digits(report.goodput.requests_per_s), f"per second, {report.goodput.share:.1%}"))
    return found


def _row(
    name: str, unit: str, reports: Sequence[Report], cell: Callable[[Report], str], *, begins: bool = False
) -> Row:
    return Row(name, unit, tuple(map(cell, reports)), begins)


def _latency(field: str, figure: str) -> Callable[[Report], str]:
    def cell(report: Report) -> str:
        latency = getattr(report, field)
        return _NOTHING if latency is None else _digits(getattr(latency, figure))

    return cell


def _goodput(report: Report) -> str:
    return _NOTHING if report.goodput is None else _digits(report.goodput.requests_per_s)


def _attainment(report: Report) -> str:
    return _NOTHING if report.goodput is None else f"{report.goodput.share:.1%}"


def _moved(report: Report) -> str:
    return _NOTHING if report.kv_bytes_moved is None else _digits(report.kv_bytes_moved / 2**20)


def _share(share: float | None) -> str:
    return _NOTHING if share is None else f"{share:.0%}"


def _p99(latency: Latency | None) -> str:
    return _NOTHING if latency is None else _digits(latency.p99)


def _pair(latency: Latency | None) -> str:
    return _NOTHING if latency is None else f"{_digits(latency.p50)} / {_digits(latency.p99)}"


def _digits(value: float) -> str:
    """A number with as many digits as say something."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
