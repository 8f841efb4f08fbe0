"""The numbers, from outcomes that are easy to sum up by hand."""

from array import array
from dataclasses import astuple

import numpy as np
import pytest

from loadtest.bench.counters import difference, parse
from loadtest.bench.outcome import Failure, Outcome
from loadtest.bench.outcomes import Gaps, Outcomes
from loadtest.bench.own_delay import OwnDelay
from loadtest.bench.plots import plots
from loadtest.bench.report import Latency, limits, report
from loadtest.bench.slo import read_slo
from loadtest.bench.summary import summary
from loadtest.cannot_run import CannotRun

BEFORE = """# TYPE baton_handoffs_total counter
baton_handoffs_total{outcome="completed"} 3
# TYPE baton_kv_bytes_moved_total counter
baton_kv_bytes_moved_total{worker="a"} 100
# TYPE baton_ttft_seconds histogram
baton_ttft_seconds_bucket{le="+Inf"} 3
baton_ttft_seconds_count 3
baton_ttft_seconds_sum 9
"""
AFTER = """# TYPE baton_handoffs_total counter
baton_handoffs_total{outcome="completed"} 4
baton_handoffs_total{outcome="failed"} 2
# TYPE baton_kv_bytes_moved_total counter
baton_kv_bytes_moved_total{worker="a"} 1100
baton_kv_bytes_moved_total{worker="b"} 1e6
# TYPE baton_ttft_seconds histogram
baton_ttft_seconds_bucket{le="+Inf"} 5
baton_ttft_seconds_count 5
baton_ttft_seconds_sum 10.6
"""
BUSY = Failure("status 503", "status 503: busy", 503)


def good(*parts_s: float, sent_s: float = 0.0, tokens: int | None = None) -> Outcome:
    return Outcome(sent_s=sent_s, parts_s=list(parts_s), output_tokens=len(parts_s) if tokens is None else tokens)


def numbers(latency: Latency | None) -> tuple[float, ...]:
    """Mean, median, 90th and 99th percentile."""
    assert latency is not None
    return astuple(latency)


def test_times_are_those_of_serving_benchmarks() -> None:
    outcome = good(10.5, 10.6, 11.1, sent_s=10.0, tokens=4)
    assert outcome.ttft_s == pytest.approx(0.5)
    assert outcome.tpot_s == pytest.approx(0.2)  # 0.6 s for the three tokens after the first
    assert outcome.e2e_s == pytest.approx(1.1)
    assert outcome.itl_s.tolist() == pytest.approx([0.1, 0.5])


def test_figures_are_exactly_those_of_their_outcomes() -> None:
    outcomes = Outcomes.of([good(1.0, 1.5, 3.0, tokens=5), good(4.0, 4.1, sent_s=2.0)])
    result = report(outcomes)
    assert (result.requests, result.failed, result.output_tokens) == (2, 0, 7)
    assert result.seconds == pytest.approx(4.1)
    assert result.output_tokens_per_s == pytest.approx(7 / 4.1)
    assert numbers(result.ttft_ms) == pytest.approx((1500, 1500, 1900, 1990))
    assert numbers(result.tpot_ms) == pytest.approx((300, 300, 460, 496))  # 500 and 100
    assert numbers(result.itl_ms) == pytest.approx((700, 500, 1300, 1480))  # 500, 1500 and 100
    assert numbers(result.e2e_ms) == pytest.approx((2550, 2550, 2910, 2991))  # 3000 and 2100
    assert result.second_token_ms is not None
    assert result.second_token_ms.mean == pytest.approx(300)


def test_throughput_counts_from_the_start_of_a_schedule() -> None:
    outcomes = Outcomes.of([good(6.0, 7.0, sent_s=5.0)])
    outcomes.began_s = 3.0
    assert report(outcomes).seconds == pytest.approx(4.0)


def test_one_token_has_no_time_per_further_token() -> None:
    result = report(Outcomes.of([good(1.5, sent_s=1.0)]))
    assert result.tpot_ms is None
    assert result.itl_ms is None
    assert result.ttft_ms is not None


def test_failed_requests_count_as_failed_and_not_as_fast() -> None:
    result = report(Outcomes.of([good(1.0, 2.0), Outcome(failure=BUSY), Outcome(failure=BUSY)]))
    assert (result.requests, result.failed, result.errors) == (3, 2, ["status 503: busy"])
    assert result.errors_by_kind == {"status 503": 2}
    assert result.output_tokens_per_s == pytest.approx(1.0)
    assert "errors          2 × status 503\nerror           status 503: busy" in summary(result)


def test_kinds_and_texts_of_errors_are_bounded() -> None:
    outcomes = Outcomes.of(Outcome(failure=Failure(f"kind {n}", f"text {n}")) for n in range(1000))
    assert sum(outcomes.failures.values()) == 1000
    assert len(outcomes.failures) == 51
    assert outcomes.failures["other"] == 950
    assert len(outcomes.failure_texts) == 20


def test_a_run_without_any_answer_has_a_report_too() -> None:
    outcomes = Outcomes.of([Outcome(failure=BUSY)])
    result = report(outcomes, slo=read_slo("ttft=1s"))
    assert result.output_tokens_per_s == 0
    assert result.goodput is not None
    assert result.goodput.share == 0
    assert "1 failed" in summary(result)
    assert plots(outcomes).timeline is None


def test_baton_counters_are_the_difference_over_all_workers() -> None:
    before, after = parse(BEFORE), parse(AFTER)
    assert before is not None
    assert after is not None
    result = report(Outcomes.of([good(1.0), good(1.0)]), difference(before, after))
    assert result.handoffs == {"completed": 1, "failed": 2}
    assert result.handed_off == 0.5
    assert result.kv_bytes_moved == 1_001_000
    assert result.gateway_ttft_ms == pytest.approx(800)  # 1.6 s for two
    assert "800.00 ms in the mean; the client's is 1.250 times it" in summary(result)


def test_another_servers_metrics_are_none_of_batons() -> None:
    assert parse('# TYPE vllm:requests_total counter\nvllm:requests_total{model="m"} 1\n') is None


def test_goodput_is_of_requests_that_keep_every_limit() -> None:
    """The third one has a gap that is too long, and a mean that is not; failures keep nothing."""
    outcomes = Outcomes.of(
        [
            good(0.4, 0.45, 0.5),
            good(0.6, 0.65, 0.7),
            good(0.4, *np.linspace(0.41, 0.5, 10), 0.6),
            good(0.4),
            Outcome(failure=BUSY),
        ]
    )
    goodput = report(outcomes, slo=read_slo("ttft=500ms,itl=0.06s,tpot=60")).goodput
    assert goodput is not None
    assert (goodput.requests, goodput.share) == (2, 0.4)
    assert goodput.missed == {"ttft": 1, "itl": 1, "tpot": 0}
    assert goodput.slo == "ttft 500 ms, itl 60 ms, tpot 60 ms"
    assert goodput.requests_per_s == pytest.approx(2 / 0.7)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=5m", "wait=5ms", "ttft=0", "ttft=1s,ttft=2s", "ttft=-1"])
def test_what_is_no_objective_is_refused(text: str) -> None:
    with pytest.raises(CannotRun, match="it is as ttft=500ms,itl=50ms"):
        read_slo(text)


def test_a_client_that_limits_a_run_says_so() -> None:
    calm, late = Latency(1, 1, 2, 3), Latency(1, 1, 20, 60)
    assert limits(0.3, (calm, Latency(100, 100, 100, 100)), (calm, Latency(20, 20, 20, 20))) == []
    (cpu,) = limits(0.9, (None, None), (None, None))
    assert cpu == "it used 90% of a core, and has no second one"
    sent, read = limits(0.3, (late, Latency(9, 100, 9, 9)), (late, Latency(9, 20, 9, 9)))
    assert sent.startswith("it sent its requests up to 60.0 ms late (p99), beside 100.0 ms")
    assert read.startswith("it may have read up to 60.0 ms late (p99), beside 20.0 ms")


def test_the_clients_own_delay_is_a_part_of_the_report() -> None:
    outcome = good(1.0, 2.0, sent_s=0.25)
    outcome.due_s = 0.1
    result = report(Outcomes.of([outcome]), delay=OwnDelay(array("d", [0.001, 0.003]), cpu_s=3.0, seconds=4.0))
    assert result.client is not None
    assert result.client.cpu_share == 0.75
    assert numbers(result.client.sent_late_ms) == pytest.approx([150] * 4)
    assert result.client.read_late_ms is not None
    assert result.client.read_late_ms.mean == pytest.approx(2)
    assert (
        "LIMITED by the client or its machine, so the figures are not the server's alone: it used 75% of a core"
        in summary(result)
    )


def test_gaps_are_exact_up_to_a_limit_and_then_a_sample() -> None:
    gaps, parts = Gaps(limit=1000), np.arange(101.0)
    for _ in range(10):
        gaps.add(parts, np.diff(parts))
    assert (gaps.share, len(gaps.gaps_s), gaps.number) == (1, 1000, 1000)
    for _ in range(90):
        gaps.add(2 * parts, np.diff(2 * parts))
    assert 300 < len(gaps.gaps_s) == len(gaps.moments_s) <= 1000
    assert gaps.share < 0.2
    assert (gaps.number, gaps.total_s) == (10_000, 19_000)
    assert np.mean(gaps.gaps_s == 2) == pytest.approx(0.9, abs=0.06)
    outcomes = Outcomes()
    outcomes.gaps = gaps
    itl_ms = report(outcomes).itl_ms
    assert itl_ms is not None
    assert itl_ms.mean == 1900  # of all, not of the sample


def test_the_points_of_plots_are_those_of_the_outcomes() -> None:
    outcomes = Outcomes.of([good(1.0, 2.0, 3.0), good(2.0, 4.0), Outcome(sent_s=0.0, parts_s=[2.4], failure=BUSY)])
    found = plots(outcomes)
    assert found.distribution is not None
    assert (found.distribution.ttft_ms[0], found.distribution.ttft_ms[-1]) == (1000, 2000)
    assert (found.distribution.shares[0], found.distribution.shares[-1]) == (0, 1)
    timeline = found.timeline
    assert timeline is not None
    at = {second: timeline.seconds.index(second) for second in (0.5, 1.5, 2.2, 3.5, 4.0)}
    counts = [(timeline.waiting[place], timeline.running[place]) for place in at.values()]
    assert counts == [(3, 0), (2, 1), (1, 2), (0, 1), (0, 0)]
    tokens = np.array(timeline.output_tokens_per_s[1:]) * np.diff(timeline.seconds)
    assert tokens.sum() == pytest.approx(5, rel=0.01)  # rounded for the page
    assert found.gap_map is not None
    counts_of_gaps = np.array(found.gap_map.counts)
    assert counts_of_gaps.sum() == 3
    assert counts_of_gaps[-1].sum() == 1  # the last gap ends with the run
    assert found.gap_map.ms[0] < 1000 < 2000 < found.gap_map.ms[-1]


def test_a_request_that_streams_and_then_fails_is_not_drawn_as_one_that_waits() -> None:
    broken = Outcome(sent_s=0.0, parts_s=[1.0, 3.0], failure=Failure("timed out", "not finished after 3 s"))
    timeline = plots(Outcomes.of([good(2.0, 4.0), broken])).timeline
    assert timeline is not None
    at = {second: timeline.seconds.index(second) for second in (0.5, 1.5, 2.5, 3.5, 4.0)}
    counts = [(timeline.waiting[place], timeline.running[place]) for place in at.values()]
    assert counts == [(2, 0), (1, 1), (0, 2), (0, 1), (0, 0)]


@pytest.mark.parametrize("number", [1, 5000])
def test_plots_are_as_large_for_many_requests_as_for_one(number: int) -> None:
    found = plots(Outcomes.of(good(n + 0.5, n + 0.6, sent_s=float(n)) for n in range(number)))
    assert found.timeline is not None
    assert len(found.timeline.seconds) == 241
    assert found.gap_map is not None
    assert len(found.gap_map.counts) == 96


@pytest.mark.parametrize("number", [2, 3, 9, 500])
def test_the_itl_of_a_request_is_the_percentile_of_its_own_gaps(number: int) -> None:
    parts_s = np.cumsum(np.random.default_rng(number).exponential(0.1, number))
    found = Outcomes.of([good(*parts_s)]).good.itl_s
    assert found == pytest.approx(np.percentile(np.diff(parts_s), 99))
