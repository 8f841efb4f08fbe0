"""The numbers, from outcomes that are easy to sum up by hand."""

import pytest

from loadtest.client.counters import difference, parse
from loadtest.client.drive import Outcome
from loadtest.client.report import report, summary

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


def test_times_are_those_of_serving_benchmarks() -> None:
    outcome = Outcome(sent_s=10.0, parts_s=[10.5, 10.6, 11.1], output_tokens=4)
    assert outcome.ttft_s == pytest.approx(0.5)
    assert outcome.tpot_s == pytest.approx(0.2)  # 0.6 s for the three tokens after the first
    assert outcome.itl_s == pytest.approx([0.1, 0.5])


def test_one_token_has_no_time_per_further_token() -> None:
    result = report([Outcome(sent_s=1.0, parts_s=[1.5], output_tokens=1)], None)
    assert result.tpot_ms is None
    assert result.itl_ms is None
    assert result.ttft_ms is not None


def test_failed_requests_count_as_failed_and_not_as_fast() -> None:
    good = Outcome(sent_s=0.0, parts_s=[1.0, 2.0], output_tokens=2)
    result = report([good, Outcome(sent_s=0.0, error="status 503: busy")], None)
    assert (result.requests, result.failed, result.errors) == (2, 1, ["status 503: busy"])
    assert result.output_tokens_per_s == pytest.approx(1.0)
    assert "status 503: busy" in summary(result)


def test_a_run_without_any_answer_has_a_report_too() -> None:
    result = report([Outcome(error="refused")], None)
    assert result.output_tokens_per_s == 0
    assert "1 failed" in summary(result)


def test_baton_counters_are_the_difference_over_all_workers() -> None:
    before, after = parse(BEFORE), parse(AFTER)
    assert before is not None
    assert after is not None
    good = Outcome(sent_s=0.0, parts_s=[1.0], output_tokens=1)
    result = report([good, good], difference(before, after))
    assert result.handoffs == {"completed": 1, "failed": 2}
    assert result.handed_off == 0.5
    assert result.kv_bytes_moved == 1_001_000
    assert result.gateway_ttft_ms == pytest.approx(800)  # 1.6 s for two
    assert "800.00 ms in the mean; the client's is 1.250 times it" in summary(result)


def test_another_servers_metrics_are_none_of_batons() -> None:
    assert parse('# TYPE vllm:requests_total counter\nvllm:requests_total{model="m"} 1\n') is None
