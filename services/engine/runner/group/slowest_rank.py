"""The slowest rank of a group: the one that the others wait for.

Ranks of one size do the same work between two sums, and whoever is done first waits for the others. So the rank that
waits least is the slowest: one whose host is busy, or hot, or slower, or that has a head more than the others. Of
stages nobody is named: none of them waits for the last one, and all wait for the first piece, however fast they are.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from services.engine.runner.base import SlowestRank

_EVERY_S = 5.0  # of steps, between two looks
_WINDOW_S = 60.0  # of steps, that the figures are of


def slowest(steps_s: float, waited_s: Sequence[float] | np.ndarray) -> SlowestRank:
    """Returns the slowest rank in so many seconds of steps, for which each rank waited for others."""
    waits = np.asarray(waited_s, dtype=np.float64)
    rank = int(waits.argmin())
    others = np.delete(waits, rank)
    return SlowestRank(rank, min(1.0, float(others.mean() - waits[rank]) / steps_s))


class RankWaits:
    """The waits of a group's ranks, of which `latest` says who was the slowest in the last minute of steps."""

    def __init__(self) -> None:
        self.latest: SlowestRank | None = None  # None: not known so far
        self._steps_s = 0.0
        self._noted: deque[tuple[float, np.ndarray]] = deque([(0.0, np.zeros(1))])

    def add_step(self, took_s: float) -> bool:
        """Adds a step. Returns True where `note` should be called now."""
        self._steps_s += took_s
        return self._steps_s - self._noted[-1][0] >= _EVERY_S

    def note(self, waited_s: Sequence[float]) -> None:
        """Takes the seconds that each rank has waited since it began."""
        waits = np.asarray(waited_s, dtype=np.float64)
        self._noted.append((self._steps_s, waits))
        while len(self._noted) > 2 and self._noted[1][0] <= self._steps_s - _WINDOW_S:
            self._noted.popleft()
        steps_s, before = self._noted[0]
        self.latest = slowest(self._steps_s - steps_s, waits - before)
