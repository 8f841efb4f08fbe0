"""Names of workloads, ratios and their spread, and the tables that people read."""

import pytest

from loadtest.bench.outcome import Outcome
from loadtest.bench.outcomes import Outcomes
from loadtest.bench.report import report
from loadtest.compare import workloads
from loadtest.compare.document import document
from loadtest.compare.ratios import Contest, Spread, compare, ratio
from loadtest.compare.rounds import Comparison, Run
from loadtest.compare.workloads import Compared, Figure, shape

CONTEST = Contest("Baton against both", "baton", ("small", "large"))


def run(server: str, round_number: int, seconds: float, *, figure: Figure = Figure.TOKENS_PER_S, short: int = 0) -> Run:
    """One request of ten tokens that took so long, the first token a tenth of it."""
    outcome = Outcome(sent_s=0.0, parts_s=[seconds / 10, seconds], output_tokens=10)
    return Run(round_number, server, "48/128", figure, report(Outcomes.of([outcome])), short)


@pytest.mark.parametrize(
    ("workload", "names"),
    [
        (Compared(shape(64, 48, 128), Figure.TOKENS_PER_S), ("48/128",)),
        (Compared(shape(20, 48, 128), Figure.TPOT_MS, single=True), ("48/128 single",)),
        (Compared(shape(16, 48, 128), Figure.TOKENS_PER_S, counted=True), ("16x48/128",)),
        (
            Compared(shape(32, 32, 16, shared_tokens=4096), Figure.REQUESTS_PER_S, twice=True),
            ("4096+32/16 cold", "4096+32/16 warm"),
        ),
    ],
)
def test_a_workload_is_named_by_its_shape(workload: Compared, names: tuple[str, ...]) -> None:
    assert workload.run_names == names


def test_names_are_unique_and_choose() -> None:
    names = [workload.name for workload in workloads.ALL]
    assert len(set(names)) == len(names)
    assert [workload.name for workload in workloads.chosen(["48/500", "48/128 single"])] == ["48/500", "48/128 single"]
    with pytest.raises(ValueError, match="no workload '48/129'"):
        workloads.chosen(["48/129"])


def test_servers_get_the_same_prompts_and_rounds_others() -> None:
    comparison = Comparison(servers=(), workloads=(), rounds=2, seed=0, vocabulary=500)
    shared = shape(4, 6, 1, shared_tokens=10)
    assert comparison.scripts(shared, 1, 2) == comparison.scripts(shared, 1, 2) != comparison.scripts(shared, 2, 2)
    prompts = [script.turns[0].prompt for script in comparison.scripts(shared, 1, 2)]
    assert {len(prompt) for prompt in prompts} == {16}
    assert len({tuple(prompt[:10]) for prompt in prompts}) == 1
    assert all(isinstance(id, int) and 100 <= id < 500 for prompt in prompts for id in prompt)


def test_above_one_baton_is_ahead_whatever_the_figure() -> None:
    assert ratio(200.0, 100.0, Figure.TOKENS_PER_S) == 2.0
    assert ratio(10.0, 20.0, Figure.TTFT_MS) == 2.0


def test_ratios_are_of_each_round_and_their_spread_is_told() -> None:
    ours = [run("baton", 1, 1.0), run("baton", 2, 2.0), run("baton", 3, 1.0)]
    theirs = [run("small", 1, 2.0), run("small", 2, 2.0), run("small", 3, 1.5)]
    (row,) = compare([*theirs, *ours], CONTEST)
    assert row.ratio == Spread(median=1.5, low=1.0, high=2.0)
    assert row.ttft_ratio == row.ratio  # a tenth of both
    assert row.baton == Spread(10.0, 5.0, 10.0)


@pytest.mark.parametrize("figure", [Figure.TOKENS_PER_S, Figure.TPOT_MS])
def test_the_peer_is_the_setting_with_the_better_median(figure: Figure) -> None:
    runs = [
        run("baton", 1, 1.0, figure=figure),
        run("small", 1, 3.0, figure=figure),
        run("large", 1, 2.0, figure=figure),
    ]
    (row,) = compare(runs, CONTEST)
    assert row.setting == "large"
    assert row.ratio.median == pytest.approx(2.0)


def test_a_setting_with_a_fault_has_no_part() -> None:
    runs = [run("baton", 1, 1.0), run("small", 1, 3.0), run("large", 1, 2.0, short=1)]
    assert [row.setting for row in compare(runs, CONTEST)] == ["small"]
    assert compare([run("baton", 1, 1.0, short=1), run("small", 1, 3.0)], CONTEST) == []


def test_the_document_names_settings_ratios_and_faults() -> None:
    runs = [run("baton", 1, 1.0), run("small", 1, 2.0), run("large", 1, 2.0, short=7)]
    text = document({"machine": "two cores"}, [], [CONTEST], runs)
    assert "- machine: two cores" in text
    assert "| 48/128   | output tok/s | 10.0 (10.0–10.0) | 5.0 (5.0–5.0) | small" in text
    assert "**2.00** (2.00–2.00)" in text
    assert "- round 1, large, 48/128: 7 tokens short" in text
