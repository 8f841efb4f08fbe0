"""Keeps workers free for suspects: choices that may be what ends workers (see retries.py).

A suspect goes to a decode worker, or a prefill worker where its prompt is to be embedded, at which no other attempt is
without progress, and until it has progress itself no other attempt is sent there. A worker is seldom free of new
attempts by itself. So one that a suspect waits for is kept free of further ones; where it is the only worker, they wait
too. That takes as long as the first two tokens.

What ended one worker may have ended others, which the gateway notices a moment later. So a suspect goes only to a
worker that was heard of since the last one was lost, or the suspect would be blamed for the end of a dead worker.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtransfer.ids import WorkerId
from services.gateway.dispatch.ledger.entry import LedgerEntry
from services.gateway.dispatch.router import Candidate

ASK_AGAIN_S = 0.05
_KEPT_S = 1.0  # after the last time that a suspect asked for it


@dataclass(frozen=True, slots=True)
class Unproven:
    """The attempts without progress at each worker."""

    attempts: Counter[WorkerId] = field(default_factory=Counter)
    suspects: Counter[WorkerId] = field(default_factory=Counter)  # those of them that are a suspect's


NONE_UNPROVEN = Unproven()  # where nobody asks, since there is no suspect


def count_unproven(entries: Iterable[LedgerEntry]) -> Unproven:
    """Counts the attempts that have no progress."""
    unproven = Unproven()
    for entry in entries:
        if (attempt := entry.attempt) is not None and not entry.has_progress:
            for worker in attempt.workers():
                unproven.attempts[worker.id] += 1
                unproven.suspects[worker.id] += attempt.suspect
    return unproven


class Isolation:
    """The workers that suspects wait for, and until when each is kept. Times are in seconds, on the caller's clock."""

    def __init__(self) -> None:
        self._until: dict[WorkerId, float] = {}

    def keep_one(self, candidates: Iterable[Candidate], now: float) -> None:
        """Keeps the candidate free at which a suspect has to wait for the fewest others; or goes on keeping one.

        candidates: workers that could run the suspect alone.
        """
        able = list(candidates)
        if kept := [worker for worker in able if worker.id in self._until] or able:
            chosen = min(kept, key=lambda worker: (worker.unproven, worker.assigned, worker.id))
            self._until[chosen.id] = now + _KEPT_S

    def kept(self, now: float) -> frozenset[WorkerId]:
        """The workers that are kept free now."""
        self._until = {worker: until for worker, until in self._until.items() if until > now}
        return frozenset(self._until)
