"""The figures of a run as text for a person."""

from loadtest.bench.report import Latency, OwnShare, Report
from loadtest.tables import aligned

_FIGURES = ("mean", "p50", "p90", "p99")
_IS_TEXT, _WIDTHS = (True, False, False, False, False), (12, 10, 10, 10, 10)
_MOST_ERRORS = 5


def summary(report: Report) -> str:
    """Writes the report of a run."""
    lines = [
        f"requests        {report.requests} ({report.failed} failed) in {report.seconds:.2f} s",
        *_error_lines(report),
        f"throughput      {report.output_tokens_per_s:.1f} output tokens/s, {report.requests_per_s:.2f} requests/s",
        *_goodput_lines(report),
        *_latency_lines(report),
        *_baton_lines(report),
        *_client_lines(report.client),
        *_notes(report),
    ]
    return "\n".join(lines)


def _error_lines(report: Report) -> list[str]:
    kinds = ", ".join(f"{count} × {kind}" for kind, count in (report.errors_by_kind or {}).items())
    return [
        *([f"errors          {kinds}"] if kinds else []),
        *(f"error           {error}" for error in report.errors[:_MOST_ERRORS]),
    ]


def _goodput_lines(report: Report) -> list[str]:
    if (good := report.goodput) is None:
        return []
    missed = ", ".join(f"{name} by {count}" for name, count in good.missed.items())
    words = f"{good.requests_per_s:.2f} requests/s, {good.share:.1%} of them all ({good.slo}; missed: {missed})"
    return [f"goodput         {words}"]


def _latency_lines(report: Report) -> list[str]:
    named = {
        "TTFT": report.ttft_ms,
        "2nd token": report.second_token_ms,
        "TPOT": report.tpot_ms,
        "ITL": report.itl_ms,
        "end to end": report.e2e_ms,
    }
    lines: list[tuple[str, ...]] = [("ms", *_FIGURES)]
    lines += [(name, *_cells(latency)) for name, latency in named.items() if latency is not None]
    return ["".join(line) for line in aligned(lines, _IS_TEXT, _WIDTHS)]


def _cells(latency: Latency) -> tuple[str, ...]:
    return tuple(f"{getattr(latency, figure):.2f}" for figure in _FIGURES)


def _baton_lines(report: Report) -> list[str]:
    lines = []
    if report.gateway_ttft_ms is not None and report.ttft_ms is not None:
        ratio = report.ttft_ms.mean / report.gateway_ttft_ms
        lines.append(
            f"TTFT by gateway {report.gateway_ttft_ms:.2f} ms in the mean; the client's is {ratio:.3f} times it"
        )
    if report.handoffs is not None and report.handed_off is not None and report.kv_bytes_moved is not None:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.handoffs.items())) or "none"
        lines.append(f"handed off      {report.handed_off:.0%} of the requests (handoffs: {outcomes})")
        lines.append(f"KV moved        {report.kv_bytes_moved / 2**20:.1f} MiB")
    return lines


def _client_lines(own: OwnShare | None) -> list[str]:
    if own is None:
        return []
    late = [
        f"{what} {latency.p99:.2f} ms late (p99)"
        for what, latency in (("sent", own.sent_late_ms), ("read", own.read_late_ms))
        if latency is not None
    ]
    lines = [f"the client      {', '.join([f'{own.cpu_share:.0%} of a core', *late])}"]
    return lines + [
        f"LIMITED by the client or its machine, so the figures are not the server's alone: {reason}"
        for reason in own.limits
    ]


def _notes(report: Report) -> list[str]:
    notes = {
        f"{report.unfinished} requests were open when the run was stopped, and count nowhere": report.unfinished,
        f"{report.skipped} turns were not sent: the one before failed, or the time was over": report.skipped,
        f"{report.waited} waited for a place at the client (--concurrency)": report.waited,
        f"{report.unsent} were not sent: the time was over before there was a place (--concurrency)": report.unsent,
        f"{report.without_usage} answers had no usage: their deltas count as tokens": report.without_usage,
        "the admin port told no counters after the run: handoffs are not known": report.counters_lost,
        f"percentiles of ITL are of {report.gaps_sampled:.1%} of all times, chosen by chance": report.gaps_sampled < 1,
    }
    valid = [] if report.valid is None else [f"{report.valid:.1%} of the answers are whole JSON"]
    return [f"note            {note}" for note in [*valid, *(text for text, is_so in notes.items() if is_so)]]
