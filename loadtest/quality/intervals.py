"""Confidence intervals of 95 %, of shares and of differences between two sides that did the same items.

The items are pairs: what is hard for one side is hard for the other, and only the difference of each pair counts.
"""

import math
from collections.abc import Sequence

import numpy as np

Interval = tuple[float, float]  # the lower and the upper end

_Z = 1.959963984540054  # 97.5 % of a normal distribution lie below it
_RESAMPLES = 10_000
_ENDS = (2.5, 97.5)


def of_share(successes: int, number: int) -> Interval:
    """Wilson's interval of a share (1927): within 0 and 1, and no point where all or none succeeded."""
    share, square = successes / number, _Z * _Z
    middle = (share + square / (2 * number)) / (1 + square / number)
    half = _Z / (1 + square / number) * math.sqrt(share * (1 - share) / number + square / (4 * number * number))
    return max(0.0, middle - half), min(1.0, middle + half)


def of_share_difference(a: Sequence[bool], b: Sequence[bool]) -> Interval:
    """The interval of b's share less a's, by the same items: Agresti and Min (2005), Wald's with half a pair a cell.

    So it is no point where the sides never differ.
    """
    number = len(a) + 2
    lost = sum(one and not other for one, other in zip(a, b, strict=True)) + 0.5
    won = sum(other and not one for one, other in zip(a, b, strict=True)) + 0.5
    middle = (won - lost) / number
    half = _Z * math.sqrt(won + lost - (won - lost) ** 2 / number) / number
    return max(-1.0, middle - half), min(1.0, middle + half)


def of_mean(values: Sequence[float], weights: Sequence[float] | None = None) -> Interval:
    """The interval of a weighted mean, by the bootstrap: percentiles of the means of items drawn again, seeded."""
    numbers = np.asarray(values, np.float64)
    shares = np.ones_like(numbers) if weights is None else np.asarray(weights, np.float64)
    drawn = np.random.default_rng(0).integers(len(numbers), size=(_RESAMPLES, len(numbers)))
    means = (numbers * shares)[drawn].sum(axis=1) / shares[drawn].sum(axis=1)
    low, high = np.percentile(means, _ENDS).tolist()
    return low, high
