"""The cost of earlier attempts at a choice, for its next one.

    how the last attempt ended                 its cost
    a worker refused it, or is draining        none; that worker is left alone for a while
    after progress                             none, and earlier attempts no longer count
    a worker refused what is asked for         the request ends: any other worker would refuse it too
    a failure without progress                 one of MAX_ATTEMPTS
    a worker's end without progress            one of MAX_ATTEMPTS, and one of MAX_DEATHS
    the gateway's own stream to a living       none, where it had a token; otherwise it may be why the stream broke,
    worker broke                               and costs one of MAX_ATTEMPTS
    numbers that are not finite                there is no next one: any worker would compute them

A choice that was on two workers when they ended is a suspect: it may be what ended them. It goes on where no other
choice without progress is, so that the third death shows who it was.
"""

from collections import Counter
from dataclasses import dataclass, field

from kvtransfer.ids import WorkerId
from services.process.backoff import Backoff

MAX_ATTEMPTS = 4
MAX_DEATHS = 3
_SUSPECT_DEATHS = 2
_MOST_FAILED_PAIRS = 2
PROGRESS = 2  # tokens of one attempt: one by computing the prompt, and one by decoding

# After a worker's "not now", how long before it is asked again: doubled with each refusal in a row.
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.05, 1.0

Pair = tuple[WorkerId, WorkerId]  # the prefill and the decode worker of a handoff


@dataclass(slots=True)
class Retries:
    """The record of one choice."""

    number: int = 0  # of the attempt that was started last, from 1 on
    attempts: int = 0  # that count against MAX_ATTEMPTS
    failed: bool = False  # the last attempt did, without progress; its retry takes a place in the gateway's budget
    deaths: int = 0  # of workers in a row, each without progress
    failed_pairs: set[Pair] = field(default_factory=set)  # their handoffs of this choice failed
    too_small: set[tuple[int, int]] = field(default_factory=set)  # see Candidate.size, of workers that said so
    refusals: Backoff = field(default_factory=lambda: Backoff(FIRST_BACKOFF_S, LONGEST_BACKOFF_S))
    avoid: dict[WorkerId, float] = field(default_factory=dict)  # workers that refused, and until when
    not_before: float | None = None  # the time of the next attempt; None: as soon as a worker can take it
    _died_with: Counter[WorkerId] = field(default_factory=Counter)
    _lost_with: Counter[WorkerId] = field(default_factory=Counter)  # those that count as attempts until it returns

    @property
    def suspect(self) -> bool:
        """True when the choice may be what ends workers."""
        return self.deaths >= _SUSPECT_DEATHS

    @property
    def without_handoff(self) -> bool:
        """True when a decode worker alone is to serve the choice: its handoffs failed at two pairs."""
        return len(self.failed_pairs) >= _MOST_FAILED_PAIRS

    @property
    def exhausted(self) -> str | None:
        """Says why there is no further attempt; None: there may be one."""
        if self.deaths >= MAX_DEATHS:
            return f"{self.deaths} workers in a row ended while they computed it"
        return f"{self.attempts} attempts failed" if self.attempts >= MAX_ATTEMPTS else None

    def begin(self) -> None:
        """Counts an attempt that starts now."""
        self.number += 1
        self.attempts += 1
        self.failed = False

    def note_progress(self) -> None:
        """Forgives all earlier attempts."""
        self.attempts = self.deaths = 0
        self._died_with.clear()
        self._lost_with.clear()

    def refund(self) -> None:
        """Takes the last attempt back: its end was no failure."""
        self.attempts = max(0, self.attempts - 1)

    def refuse(self, worker: WorkerId, now: float) -> None:
        """Takes the last attempt back, which this worker refused, and leaves the worker alone for a while."""
        self.refund()
        self.avoid[worker] = now + self.refusals.next_s()

    def lose(self, worker: WorkerId, had_token: bool) -> None:
        """Counts the death of a worker that had the choice. `had_token`: also by this attempt."""
        self.deaths += 1
        self._died_with[worker] += 1
        self._lost_with[worker] += had_token

    def find_alive(self, worker: WorkerId) -> None:
        """Takes back what the deaths of a worker counted, which lives: only a stream to it broke."""
        self.deaths = max(0, self.deaths - self._died_with.pop(worker, 0))
        self.attempts = max(0, self.attempts - self._lost_with.pop(worker, 0))

    def still_avoided(self, now: float) -> frozenset[WorkerId]:
        """Removes workers that may be asked again, and returns the others."""
        self.avoid = {worker: until for worker, until in self.avoid.items() if until > now}
        return frozenset(self.avoid)

    def again_at(self) -> float | None:
        """The time at which the next attempt is worth while; None: when the workers change."""
        times = [*self.avoid.values(), *(() if self.not_before is None else (self.not_before,))]
        return min(times, default=None)
