"""What is learned from recorded observations, in seconds; nothing here looks at a clock."""

import pytest

from kvtransfer.ids import WorkerId
from services.config import WorkerRole
from services.gateway.dispatch.costs import CostModel, FadingLine

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


def test_one_observation_is_too_little():
    line = FadingLine()
    line.note(100, 0.1)
    assert line.line() is None


def test_a_line_is_found_in_what_scatters_around_it():
    """Recorded on two cores: 10 ms and 0.2 ms a token, by a fifth more or less."""
    line = FadingLine()
    for index, tokens in enumerate([48, 462, 1200, 48, 4096, 900, 2000, 150] * 8):
        line.note(tokens, (0.01 + 0.0002 * tokens) * (0.8 if index % 2 else 1.2))
    found = line.line()
    assert found is not None
    assert found.at(1000) == pytest.approx(0.21, rel=0.25)
    assert found.at(4096) == pytest.approx(0.83, rel=0.25)


def test_prompts_of_one_length_give_a_line_through_the_origin():
    line = FadingLine()
    for _ in range(9):
        line.note(400, 0.1)
    found = line.line()
    assert found is not None
    assert found.base_s == 0
    assert found.at(800) == pytest.approx(0.2)


def test_an_observation_of_no_tokens_is_a_constant():
    line = FadingLine()
    line.note(0, 0.02)
    line.note(0, 0.04)
    found = line.line()
    assert found is not None
    assert found.at(500) == pytest.approx(0.03, rel=0.1)


def test_a_change_is_followed():
    line = FadingLine()
    for seconds in (0.1, 0.4):
        for _ in range(300):
            line.note(400, seconds)
    found = line.line()
    assert found is not None
    assert found.at(400) == pytest.approx(0.4, rel=0.05)


def test_one_stall_changes_little():
    line = FadingLine()
    for _ in range(64):
        line.note(400, 0.1)
    line.note(400, 60.0)
    found = line.line()
    assert found is not None
    assert found.at(400) < 0.12


def test_a_handoff_costs_what_it_takes_beyond_a_step():
    costs = CostModel()
    for index in range(40):
        costs.note_step(WorkerId(7), 8, index * 0.03, prefill_busy=False, computes_too=False)
    for _ in range(2):
        costs.note_handed_over(WorkerId(7), 500, 0.05)
    handoff = costs.figures().handoff
    assert handoff is not None
    assert handoff.at(500) == pytest.approx(0.02)


def steps(costs: CostModel, start: float, step_s: float, count: int, **beside: bool) -> float:
    for index in range(count):
        costs.note_step(
            WorkerId(7), 8, start + index * step_s, **{"prefill_busy": False, "computes_too": False, **beside}
        )
    return start + count * step_s


def test_cores_that_are_shared_show_in_the_steps():
    """Steps that take twice as long beside a busy prefill worker lose half of their time to it."""
    costs = CostModel()
    now = steps(costs, 0.0, 0.02, 100)
    assert costs.figures().shared is None
    steps(costs, now, 0.04, 100, prefill_busy=True)
    assert costs.figures().shared == pytest.approx(0.5, abs=0.02)


def test_a_prefill_worker_with_its_own_hardware_takes_nothing():
    costs = CostModel()
    steps(costs, steps(costs, 0.0, 0.02, 100), 0.02, 100, prefill_busy=True)
    assert costs.figures().shared == pytest.approx(0.0, abs=0.01)


def test_steps_that_compute_prompts_and_pauses_say_nothing():
    costs = CostModel()
    now = steps(costs, 0.0, 0.02, 50)
    now = steps(costs, now, 0.3, 50, computes_too=True)
    now = steps(costs, now + 60, 5.0, 50, prefill_busy=True)
    assert costs.figures().shared is None


def test_the_two_sides_are_learned_apart():
    costs = CostModel()
    for _ in range(2):
        costs.note_first_token(PREFILL, 100, 0.1)
        costs.note_first_token(DECODE, 100, 0.3)
    figures = costs.figures()
    assert figures.prefill is not None
    assert figures.alone is not None
    assert figures.prefill.at(100) == pytest.approx(0.1)
    assert figures.alone.at(100) == pytest.approx(0.3)
