"""Goodput, refusals and late answers, with numbers that can be added up by hand."""

import pytest

from loadtest.bench.outcome import Failure, Outcome
from loadtest.bench.outcomes import Outcomes
from loadtest.overload.command import _record

REFUSED = Failure("status 429", "status 429: {}", 429)
BROKEN = Failure("broke off", "the answer broke off")


def answered(ttft_s: float) -> Outcome:
    return Outcome(sent_s=10.0, parts_s=[10.0 + ttft_s, 20.0], output_tokens=2)


def test_an_answer_is_good_when_its_first_token_is_in_time() -> None:
    outcomes = Outcomes.of(
        [
            *(answered(ttft_s) for ttft_s in (0.5, 1.0, 2.0, 2.5)),
            Outcome(sent_s=10.0, parts_s=[10.004], failure=REFUSED),
            Outcome(sent_s=10.0, parts_s=[11.0], failure=BROKEN),
        ]
    )
    record = _record(2.0, outcomes, seconds=3.0, slo_s=2.0)
    assert record["offered_per_s"] == 2.0
    assert record["good_per_s"] == 1.0
    assert (record["late"], record["refused"], record["failed"]) == (1, 1, 1)
    assert record["ttft_p50_ms"] == pytest.approx(1500.0)
    assert record["refused_after_ms"] == pytest.approx(4.0)


def test_a_rate_at_which_nothing_was_answered_has_no_times() -> None:
    record = _record(5.0, Outcomes.of([Outcome(failure=BROKEN)]), seconds=1.0, slo_s=1.0)
    assert (record["good_per_s"], record["ttft_p99_ms"], record["refused_after_ms"]) == (0.0, 0.0, 0.0)
