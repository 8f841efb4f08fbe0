"""Retries of the whole gateway are bounded; one that is over the bound waits."""

from services.gateway.dispatch.retry_budget import MOST, PER_REQUEST, PER_S, RetryBudget


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_worker_s_whole_load_may_be_retried_at_once_but_not_again_and_again():
    clock = Clock()
    budget = RetryBudget(clock)
    taken = sum(budget.take() == 0 for _ in range(10_000))
    assert taken == MOST
    wait_s = budget.take()
    assert 0 < wait_s <= 1 / PER_S
    clock.now += wait_s + 1e-6
    assert budget.take() == 0
    assert budget.take() > 0


def test_requests_allow_for_some_retries():
    clock = Clock()
    budget = RetryBudget(clock)
    while not budget.take():
        pass
    for _ in range(round(10 / PER_REQUEST)):
        budget.note_request()
    assert sum(budget.take() == 0 for _ in range(100)) in (9, 10, 11)
