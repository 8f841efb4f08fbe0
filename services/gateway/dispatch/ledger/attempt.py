"""One attempt at a choice: its handle, the workers that have it, and which of them may still change it.

    phase      PREFILL            HANDOFF            DECODE
               ├───────────────────┼──────────────────┤
    ends with  prefill's token     decode's first row  finish, failure, abort
    heeds      both workers        both workers        the decode worker

An attempt on one worker goes from PREFILL to DECODE with that worker's first row.

The first attempts at several choices over one prompt are sent as a group, whose handle names the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvtransfer.ids import WorkerId
from services.gateway.api.records.attempt_record import AttemptRecord
from services.gateway.dispatch.router import Candidate, Plan
from services.protocol.block_hash import BlockHash
from services.protocol.frames import Row
from services.protocol.outcomes import FailureCode


class AttemptPhase(StrEnum):
    """Progress of an attempt. The values are those of `/debug/ledger`."""

    PREFILL = "prefill"  # no token so far
    HANDOFF = "handoff"  # the first token came from the prefill worker
    DECODE = "decode"  # a row came from the worker that generates


class HandoffOutcome(StrEnum):
    """The end of an attempt on a pair. The values are labels of the metric `baton_handoffs`."""

    COMPLETED = "completed"  # the decode worker went on from the prefill worker's KV
    NOT_NEEDED = "not_needed"  # the first token was the last one
    ABANDONED = "abandoned"  # the request ended before
    FAILED_WORKER_LOST = "failed_worker_lost"
    FAILED_TOO_LARGE = "failed_too_large"
    FAILED_NOT_NOW = "failed_not_now"
    FAILED_HANDOFF = "failed_handoff"
    FAILED_DEADLINE = "failed_deadline"
    FAILED_OVER = "failed_over"
    FAILED_UNSUPPORTED = "failed_unsupported"
    FAILED_DRAINING = "failed_draining"
    FAILED_NOT_FINITE = "failed_not_finite"

    @classmethod
    def failed_with(cls, code: FailureCode) -> "HandoffOutcome":
        """The outcome of an attempt that a worker failed with this code."""
        return cls[f"FAILED_{code.name}"]


@dataclass(slots=True, eq=False)
class Attempt:
    """One try at a choice, on the workers of one plan, under one handle."""

    handle: int
    plan: Plan
    queued_tokens: int  # prompt tokens that `plan.computes` has still to compute for this attempt
    predicted_cached: int | None  # None: another attempt of the group has the prediction, so that it counts once
    sent_at: float  # on the ledger's clock
    to_compute: int  # tokens that `plan.computes` computes until this attempt's first token: also of prompts before it
    start: int  # length of the sequence that it starts from
    suspect: bool  # see Retries
    record: AttemptRecord  # of all attempts of the group
    queued_blocks: Sequence[BlockHash] = ()  # full blocks in `queued_tokens` that no earlier attempt computes
    said_cached: bool = False  # `plan.computes` has said how much of the prompt it found in its cache
    first_token_at: float | None = None
    group: "Group | None" = None
    phase: AttemptPhase = AttemptPhase.PREFILL
    early_rows: list[Row] = field(default_factory=list)  # decode's, which came before prefill's logprobs of the prompt
    decodes_at: WorkerId | None = None  # the decode worker, in DECODE; None: not in DECODE, or no decode worker

    @property
    def split(self) -> bool:
        """True when the attempt needs a handoff."""
        return self.plan.split

    def workers(self) -> list[Candidate]:
        """All workers that were sent this attempt."""
        return self.plan.workers()

    def heeds(self, worker: WorkerId) -> bool:
        """True while the attempt depends on this worker: on the prefill worker until the decode worker's first row."""
        if self.plan.decode is not None and worker == self.plan.decode.id:
            return True
        prefill = self.plan.prefill
        return prefill is not None and worker == prefill.id and self.phase is not AttemptPhase.DECODE

    def candidate(self, worker: WorkerId) -> Candidate:
        """The worker of this attempt with that id."""
        return next(candidate for candidate in self.workers() if candidate.id == worker)

    def note_row_from(self, worker: WorkerId) -> bool:
        """Moves on to the phase that a row from this worker begins.

        Returns whether the row completes a handoff. A group has one handoff, which its first such row completes.
        """
        if worker != self.plan.generates.id:
            self.phase = AttemptPhase.HANDOFF
            return False
        completes = self.split and self.phase is not AttemptPhase.DECODE and not (self.group and self.group.forked)
        self.phase = AttemptPhase.DECODE
        self.decodes_at = None if self.plan.decode is None else worker
        if self.group is not None:
            self.group.forked = True
        return completes


@dataclass(slots=True, eq=False)
class Group:
    """Attempts at several choices over one prompt. `handle` names the prompt at the workers, until it is forked."""

    handle: int
    handles: set[int] = field(default_factory=set)  # of the attempts that have not ended
    forked: bool = False  # the worker that generates has sent a row of an attempt
