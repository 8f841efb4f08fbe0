"""Waits between tries."""

from services.process.backoff import Backoff


def test_waits_double_up_to_the_longest() -> None:
    backoff = Backoff(first_s=1, longest_s=5)
    assert [backoff.next_s() for _ in range(5)] == [1, 2, 4, 5, 5]


def test_a_success_starts_over() -> None:
    backoff = Backoff(first_s=1, longest_s=5)
    assert not backoff.failing
    backoff.next_s()
    backoff.next_s()
    assert backoff.failing
    backoff.reset()
    assert not backoff.failing
    assert backoff.next_s() == 1
