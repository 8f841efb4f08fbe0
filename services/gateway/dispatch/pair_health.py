"""The health of pairs: two workers that fail to hand over to each other are left alone, and tried again later.

A worker may serve well alone, and with others, and yet not reach one of them. So a pair has a health of its own. It is
left alone for a while after a failed handoff, twice as long after each one in a row. Then one request tries it, and
the others wait for its word.
"""

from dataclasses import dataclass, field

import structlog

from kvtransfer.ids import WorkerId
from services.gateway.dispatch.retries import Pair
from services.process.backoff import Backoff

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_TRIAL_S = 30.0  # for the word of a request that tries a pair; it may end without one

log = structlog.get_logger()


@dataclass(slots=True)
class _Failing:
    """A pair whose last handoff failed."""

    pause: Backoff = field(default_factory=lambda: Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S))
    failed_at: float = float("-inf")
    until: float = 0.0  # it is left alone


class PairHealth:
    """The pairs whose last handoff failed. Times are in seconds, on the caller's clock."""

    def __init__(self) -> None:
        self._failing: dict[Pair, _Failing] = {}

    def note_failed(self, pair: Pair, began: float, now: float) -> None:
        """Notes a failed handoff. Those that were under way when one failed count as that one."""
        failing = self._failing.setdefault(pair, _Failing())
        if began >= failing.failed_at:
            failing.failed_at = now
            pause_s = failing.pause.next_s()
            failing.until = now + pause_s
            prefill, decode = (f"{worker:016x}" for worker in pair)
            log.warning("a pair is left alone after a failed handoff", prefill=prefill, decode=decode, pause_s=pause_s)

    def note_completed(self, pair: Pair) -> None:
        """Notes a handoff that arrived."""
        self._failing.pop(pair, None)

    def note_tried(self, pair: Pair, now: float) -> None:
        """Notes that a request is on its way to a pair: where the pair is failing, others wait for its word."""
        if (failing := self._failing.get(pair)) is not None:
            failing.until = now + _TRIAL_S

    def avoided(self, now: float) -> frozenset[Pair]:
        """The pairs to be left alone now."""
        return frozenset(pair for pair, failing in self._failing.items() if failing.until > now)

    def failing_since(self, pair: Pair) -> float | None:
        """The time at which the last handoff of a pair failed; None: it did not."""
        failing = self._failing.get(pair)
        return None if failing is None else failing.failed_at

    def remove_worker(self, worker: WorkerId) -> None:
        """Removes the pairs of a worker that is gone."""
        for pair in [pair for pair in self._failing if worker in pair]:
            del self._failing[pair]
