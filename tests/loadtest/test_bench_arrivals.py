"""Arrivals, and the search for the highest rate."""

from itertools import islice

import numpy as np
import pytest

from loadtest.bench.arrivals import arrivals
from loadtest.bench.find_rate import RateSearch


def gaps(burstiness: float, number: int = 20_000) -> np.ndarray:
    return np.diff([0.0, *arrivals(4.0, burstiness, number, np.random.default_rng(3))])


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 9.0])
def test_gaps_are_gamma_distributed_by_their_shape(burstiness: float) -> None:
    """The coefficient of variation of a gamma distribution is 1 / sqrt(shape)."""
    drawn = gaps(burstiness)
    assert drawn.min() >= 0
    assert drawn.mean() == pytest.approx(0.25)
    assert drawn.std() / drawn.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_the_last_of_a_number_comes_when_the_rate_says() -> None:
    assert list(arrivals(4.0, 0.5, 10, np.random.default_rng(0)))[-1] == pytest.approx(2.5)


def test_without_a_number_there_is_no_end() -> None:
    times = list(islice(arrivals(100.0, 1.0, None, np.random.default_rng(0)), 5000))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(50, rel=0.1)


def search(limit: float, first: float, steps: int = 30) -> RateSearch:
    """A search on a server that keeps its SLO up to this rate."""
    found = RateSearch(first)
    while found.num_tried < steps and (rate := found.next_rate()) is not None:
        found.tried(rate, kept=rate <= limit)
    return found


@pytest.mark.parametrize("first", [0.1, 9.0, 11.0, 500.0])
def test_the_highest_rate_is_found_from_above_and_from_below(first: float) -> None:
    found = search(10.0, first)
    assert found.highest_kept is not None
    assert found.lowest_missed is not None
    assert found.highest_kept <= 10 < found.lowest_missed <= 1.05 * found.highest_kept
    assert found.num_tried <= 16


def test_a_search_has_an_end_where_no_rate_is_kept_or_all_are() -> None:
    assert search(0.0, 8.0, steps=5).lowest_missed == 0.5
    assert search(1e9, 8.0, steps=5).highest_kept == 128
