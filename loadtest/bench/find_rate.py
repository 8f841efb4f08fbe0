"""The search for the highest rate that keeps an SLO: which rate to try next, from those that were tried."""

import math
from dataclasses import dataclass

_CLOSE = 1.05  # the lowest rate that misses over the highest that keeps: the search is over
_FIRST_SHARE = 0.5  # of what the server answers with all requests at once


@dataclass(slots=True)
class RateSearch:
    """Looks between the highest rate that kept the SLO and the lowest that missed it, halving their ratio.

    first: the rate to begin with. Times are not: a server that keeps an SLO at a rate is taken to keep it below.
    """

    first: float
    highest_kept: float | None = None
    lowest_missed: float | None = None
    num_tried: int = 0

    def next_rate(self) -> float | None:
        """The rate to try; None: both ends are close."""
        if self.highest_kept is None and self.lowest_missed is None:
            return self.first
        if self.lowest_missed is None:
            assert self.highest_kept is not None
            return 2 * self.highest_kept
        if self.highest_kept is None:
            return self.lowest_missed / 2
        if self.lowest_missed / self.highest_kept <= _CLOSE:
            return None
        return math.sqrt(self.highest_kept * self.lowest_missed)

    def tried(self, rate: float, *, kept: bool) -> None:
        """Notes how a rate went."""
        self.num_tried += 1
        if kept:
            self.highest_kept = max(rate, self.highest_kept or rate)
        else:
            self.lowest_missed = min(rate, self.lowest_missed or rate)


def first_rate(answered_per_s: float) -> float:
    """The rate to begin with, from what the server answers with all requests at once."""
    return _FIRST_SHARE * answered_per_s
