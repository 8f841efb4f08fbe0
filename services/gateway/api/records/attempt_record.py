"""The record of one attempt at a request, which the dispatch side writes and people read in `/debug/requests`.

Times are `time.monotonic`'s of the gateway, in seconds, those at workers too: a worker says how long after it got the
attempt something happened, and how long after that its word left. What is left of the time between the gateway's
command and that word is the way there and back, of which each direction counts for half.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtransfer.moved import Moved
from services.config import WorkerRole
from services.protocol.frames import Timing

MAX_KEPT = 32  # attempts of one request
_NOT_BEGUN = frozenset({"too_large", "not_now"})  # ends of attempts that their workers refused as they came


class Decision(Protocol):
    """A choice of workers."""

    def describe(self) -> dict[str, object]:
        """The workers that there were, what each would have cost, and why all but the chosen ones lost."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an attempt at one choice. `reason` is "finished", or what ended it before."""

    choice: int
    reason: str
    tokens: int  # that this attempt brought
    at: float


@dataclass(frozen=True, slots=True)
class AtWorker:
    """Moments of an attempt at one worker. None: not reached, or no part of it."""

    received: float
    announced: float | None
    admitted: float | None
    ready: float | None
    sent: float
    wire_s: float  # from the gateway to the worker and back
    moved: Moved

    @classmethod
    def from_timing(cls, timing: Timing, sent_at: float, now: float) -> "AtWorker":
        """Puts a worker's word of an attempt, sent there at `sent_at`, which has come `now`, on the gateway's clock."""
        wire_s = max(0.0, now - sent_at - timing.sent_s)
        received = sent_at + wire_s / 2

        def moment(after_s: float | None) -> float | None:
            return None if after_s is None else received + after_s

        return cls(
            received,
            moment(timing.announced_s),
            moment(timing.admitted_s),
            moment(timing.ready_s),
            received + timing.sent_s,
            wire_s,
            timing.moved,
        )


@dataclass(slots=True, eq=False)
class AttemptRecord:
    """One attempt, at one choice or at several over one prompt. `workers` has the address of each role's, if any."""

    number: int
    choices: Sequence[int]
    num_tokens: int  # of the sequence that it starts from
    workers: dict[WorkerRole, str]
    computes: WorkerRole  # the prompt
    predicted: dict[WorkerRole, int]  # tokens in its cache, by the index
    sent_at: float
    look_up_began: float | None = None
    looked_up: float | None = None
    decision: Decision | None = None
    found: dict[WorkerRole, int] = field(default_factory=dict)  # tokens in its cache, by itself
    at: dict[WorkerRole, AtWorker] = field(default_factory=dict)
    first_token: float | None = None
    second_worker: float | None = None  # the first row of the decode worker, where there is a handoff
    failure: str = ""  # in the words of the worker that reported it
    ends: list[Ended] = field(default_factory=list)

    @property
    def is_handoff(self) -> bool:
        """True when two workers have it."""
        return len(self.workers) > 1

    def note_first(self, role: WorkerRole, now: float) -> None:
        """Notes that the first token came, or that the first row of the second worker did."""
        if self.first_token is None:
            self.first_token = now
        if self.second_worker is None and self.is_handoff and role is WorkerRole.DECODE:
            self.second_worker = now


class AttemptRecords:
    """The records of a request's attempts. Of more than MAX_KEPT, which only a request of many prompts has, the rest is
    counted alone: what is kept of a request is bounded.
    """

    def __init__(self) -> None:
        self._kept: list[AttemptRecord] = []
        self.number = 0  # of attempts

    @property
    def is_full(self) -> bool:
        """True when the next attempt's record will not be kept."""
        return len(self._kept) >= MAX_KEPT

    @property
    def last(self) -> AttemptRecord | None:
        """The newest record that is kept; None: there is none."""
        return self._kept[-1] if self._kept else None

    @property
    def computed_nothing(self) -> bool:
        """True when no worker has begun any of these attempts."""
        refused = (record.ends and all(end.reason in _NOT_BEGUN for end in record.ends) for record in self._kept)
        return self.number == len(self._kept) and all(refused)

    def add(self, record: AttemptRecord) -> None:
        """Keeps the record of a further attempt, or counts it."""
        self.number += 1
        if not self.is_full:
            self._kept.append(record)

    def __iter__(self) -> Iterator[AttemptRecord]:
        return iter(self._kept)
