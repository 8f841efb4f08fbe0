"""The arithmetic of rate limits: GCRA, the generic cell rate algorithm, in its form as a leaky bucket that fills.

Each unit (a request, a token) fills the bucket by a minute divided by the limit, and the bucket drains by one second a
second. What would fill it beyond a minute is refused. So a whole minute's worth may come at once, and then as much as
drains. Source: ITU-T I.371, annex A. `limits.lua` has the same arithmetic, for all gateways together.
"""

import math
from dataclasses import dataclass

WINDOW_S = 60.0
_ROUNDING_S = 1e-6


@dataclass(frozen=True, slots=True)
class Fill:
    """A bucket after a request asked. level_s: how full it is, in seconds.

    wait_s: 0 for what was let in, else the seconds until it would be.
    """

    level_s: float
    wait_s: float = 0.0


def fill(level_s: float, cost: float, limit: float) -> Fill:
    """Returns the bucket once `cost` units were asked for, of `limit` a minute. What is refused leaves it as it was."""
    level_s = max(0.0, level_s)
    filled = level_s + cost * WINDOW_S / limit
    if filled > WINDOW_S + _ROUNDING_S:
        return Fill(level_s, filled - WINDOW_S)
    return Fill(filled)


def unfill(level_s: float, cost: float, limit: float) -> float:
    """Returns how full a bucket is without `cost` units that `fill` let in."""
    return max(0.0, level_s - cost * WINDOW_S / limit)


def remaining(level_s: float, limit: int) -> int:
    """Returns how many units there is room for now."""
    return max(0, math.floor((WINDOW_S - level_s + _ROUNDING_S) * limit / WINDOW_S))


def part_of(limit: int, share: int) -> int:
    """Returns one of `share` equal parts of a limit, at least 1."""
    return max(1, limit // share)
