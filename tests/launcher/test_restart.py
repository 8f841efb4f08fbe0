"""The restart policy, a pure function."""

from services.launcher.restart import RestartPolicy

POLICY = RestartPolicy(first_s=1, factor=2, longest_s=5, long_life_s=60)


def test_waits_double_up_to_the_longest() -> None:
    waits: list[float] = []
    previous: float | None = None
    for _ in range(5):
        previous = POLICY.delay_s(previous, lifetime_s=0.1)
        waits.append(previous)
    assert waits == [1, 2, 4, 5, 5]


def test_a_long_life_starts_over() -> None:
    assert POLICY.delay_s(5, lifetime_s=60) == 1
