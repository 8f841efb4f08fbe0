"""The drain of a worker: which attempts it fails at what time, for their gateways to continue them on other workers.

    ├──── attempts end by themselves ────┼──── one after the other is failed ────┼─ frames, releases ─┤
    begin                                half of the budget                      nine tenths          end

If all attempts moved at the end, all of them would wait for the same prefill workers at once. One after the other, each
pauses for the time of its own handoff. Those with most left to compute go first, since they are the least likely to end
in time. A producer's blocks that only wait for their reader go last.
"""

import math
from collections.abc import Callable, Collection

from kvtransfer.ids import AttemptId

_FIRST_MOVE, _LAST_MOVE = 0.5, 0.9  # of the budget
_LAST_WORDS_S = 0.25  # at least, for frames and releases; of a short budget half


class Drain:
    """One drain, from `begin` for `budget_s` seconds."""

    def __init__(self, begin: float, budget_s: float, earlier: "Drain | None" = None) -> None:
        """`earlier`: the drain of the same worker that this one replaces."""
        self._first_move = begin + _FIRST_MOVE * budget_s
        self._last_move = max(self._first_move, begin + min(_LAST_MOVE * budget_s, budget_s - _LAST_WORDS_S))
        self._moved: set[AttemptId] = set() if earlier is None else earlier._moved
        self._num_at_first: int | None = None  # attempts at the first move

    def due(
        self, open_ids: Collection[AttemptId], tokens_left: Callable[[AttemptId], int], now: float
    ) -> list[AttemptId]:
        """Returns the open attempts that are to be failed now; each id is returned once."""
        if now < self._first_move:
            return []
        staying = [id for id in open_ids if id not in self._moved]
        if self._num_at_first is None:
            self._num_at_first = len(staying)
        may_stay = 0
        if now < self._last_move:
            may_stay = math.ceil(self._num_at_first * (self._last_move - now) / (self._last_move - self._first_move))
        if len(staying) <= may_stay:
            return []
        staying.sort(key=tokens_left, reverse=True)
        due = staying[: len(staying) - may_stay]
        self._moved.update(due)
        return due
