"""The numbers that serving benchmarks print, computed from the outcomes of requests."""

from dataclasses import asdict, dataclass

import numpy as np

from loadtest.bench.counters import Reading
from loadtest.bench.outcomes import Outcomes
from loadtest.bench.own_delay import OwnDelay
from loadtest.bench.slo import Slo

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Latency:
    """Mean and percentiles of some requests' times, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that kept an SLO. share: of all that were answered or failed; missed: how many missed each limit."""

    slo: str
    requests: int
    share: float
    requests_per_s: float
    missed: dict[str, int]


@dataclass(frozen=True, slots=True)
class OwnShare:
    """The client's own delay. Lateness in milliseconds; limits: in words, why the client limited the run."""

    cpu_s: float
    cpu_share: float  # of one core
    sent_late_ms: Latency | None
    read_late_ms: Latency | None
    limits: list[str]


@dataclass(frozen=True, slots=True)
class Report:
    """One run. Throughput counts finished requests, from the start to the last part received."""

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
    e2e_ms: Latency | None = None
    connect_ms: Latency | None = None  # a part of the TTFT: each request has a connection of its own
    input_tokens: int = 0  # as the server counts them; 0: it does not say
    errors_by_kind: dict[str, int] | None = None
    unfinished: int = 0  # requests that were open when the run was stopped; they are not in `requests`
    skipped: int = 0  # turns of conversations that were not sent; they are not in `requests`
    waited: int = 0  # requests, or conversations, of an open loop that waited for a place
    unsent: int = 0  # those of `waited` whose place came when the time was over; they are not in `requests`
    without_usage: int = 0  # answers whose tokens are their parts, since the server does not count them
    gaps_sampled: float = 1.0  # of all times between parts, the share that percentiles of ITL are of
    valid: float | None = None  # share of the answers that have the form that was asked for
    counters_lost: bool = False  # Baton's counters were there before the run, and could not be read after it
    goodput: Goodput | None = None
    client: OwnShare | None = None

    def as_dict(self) -> dict[str, object]:
        """Returns plain values, for JSON."""
        return asdict(self)


def report(
    outcomes: Outcomes, counted: Reading | None = None, slo: Slo | None = None, delay: OwnDelay | None = None
) -> Report:
    """Sums up the outcomes of a run; `counted` is what Baton counted meanwhile, None for another server."""
    good, failed = outcomes.good, sum(outcomes.failures.values())
    requests = len(good) + failed
    seconds = _seconds(outcomes)
    tokens = int(good.output_tokens.sum())
    ttft_ms, itl_ms = latency(good.ttft_s), _itl(outcomes)
    return Report(
        requests=requests,
        failed=failed,
        errors=sorted(outcomes.failure_texts),
        seconds=seconds,
        output_tokens=tokens,
        output_tokens_per_s=_per(tokens, seconds),
        requests_per_s=_per(len(good), seconds),
        ttft_ms=ttft_ms,
        tpot_ms=latency(good.tpot_s),
        itl_ms=itl_ms,
        second_token_ms=latency(good.second_token_s),
        handoffs=None if counted is None else dict(counted.handoffs),
        handed_off=None if counted is None or not requests else counted.handoffs["completed"] / requests,
        kv_bytes_moved=None if counted is None else counted.kv_bytes_moved,
        gateway_ttft_ms=counted.ttft_s / counted.first_tokens * 1e3 if counted and counted.first_tokens else None,
        e2e_ms=latency(good.e2e_s),
        connect_ms=latency(good.connect_s),
        input_tokens=int(np.nansum(good.input_tokens)),
        errors_by_kind=dict(outcomes.failures.most_common()),
        unfinished=outcomes.unfinished,
        skipped=outcomes.skipped,
        waited=outcomes.waited,
        unsent=outcomes.unsent,
        without_usage=outcomes.without_usage,
        gaps_sampled=outcomes.gaps.share,
        valid=outcomes.num_valid / outcomes.num_checked if outcomes.num_checked else None,
        goodput=None if slo is None else _goodput(outcomes, slo, seconds),
        client=None if delay is None else _own_share(delay, latency(good.late_s), ttft_ms, itl_ms),
    )


def latency(seconds: np.ndarray, mean_s: float | None = None) -> Latency | None:
    """Mean and percentiles of times in seconds, those that are NaN left out; None where there is none.

    mean_s: where it is known better than from these times.
    """
    milliseconds = 1e3 * seconds[~np.isnan(seconds)]
    if not len(milliseconds):
        return None
    mean = float(milliseconds.mean()) if mean_s is None else 1e3 * mean_s
    return Latency(mean, *(float(each) for each in np.percentile(milliseconds, PERCENTILES)))


def _seconds(outcomes: Outcomes) -> float:
    """Seconds from the start to the last part of an answer; 0 where there is none."""
    good = outcomes.good
    if not len(good):
        return 0.0
    began_s = good.sent_s.min() if outcomes.began_s is None else outcomes.began_s
    return float(good.last_s.max() - began_s)


def _itl(outcomes: Outcomes) -> Latency | None:
    gaps = outcomes.gaps
    return latency(gaps.gaps_s, gaps.total_s / gaps.number) if gaps.number else None


def _goodput(outcomes: Outcomes, slo: Slo, seconds: float) -> Goodput:
    good = outcomes.good
    kept, all_of_them = int(slo.kept(good).sum()), len(good) + sum(outcomes.failures.values())
    missed = {name: int(slo.missed(good, name).sum()) for name, _ in slo.limits_s}
    return Goodput(str(slo), kept, _per(kept, all_of_them), _per(kept, seconds), missed)


def _own_share(delay: OwnDelay, sent_late: Latency | None, ttft: Latency | None, itl: Latency | None) -> OwnShare:
    read_late = latency(np.array(delay.late_s))
    share = _per(delay.cpu_s, delay.seconds)
    return OwnShare(delay.cpu_s, share, sent_late, read_late, limits(share, (sent_late, ttft), (read_late, itl)))


_MOST_OF_A_CORE = 0.7
_SENT_LATE = 0.05  # of the median TTFT
_READ_LATE = 0.1  # of the median ITL
_LEAST_MS = 5.0  # lateness below is no matter


def limits(
    cpu_share: float, sending: tuple[Latency | None, Latency | None], reading: tuple[Latency | None, Latency | None]
) -> list[str]:
    """Says in words why a client limited its run; empty where it did not.

    sending: the lateness of requests, and their TTFT. reading: the lateness of reads, and the ITL.
    """
    found = []
    if cpu_share > _MOST_OF_A_CORE:
        found.append(f"it used {cpu_share:.0%} of a core, and has no second one")
    sides = ("sent its requests", _SENT_LATE, sending), ("may have read", _READ_LATE, reading)
    for words, share, (late, of) in sides:
        if late and of and late.p99 > max(_LEAST_MS, share * of.p50):
            found.append(f"it {words} up to {late.p99:.1f} ms late (p99), beside {of.p50:.1f} ms to be measured (p50)")
    return found


def _per(number: float, of: float) -> float:
    return number / of if of else 0.0
