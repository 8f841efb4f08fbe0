"""One attempt at a choice: a handle, the workers that know it, and whose word on it still counts.

    phase     PREFILL            HANDOFF            DECODE
              ├───────────────────┼──────────────────┤
    ends with prefill's token     decode's first row  finish, failure, abort
    counts    both workers        both workers        decode alone

An attempt at one worker alone goes from PREFILL to DECODE with that worker's first row.

First attempts at several choices over one prompt are sent as a group: what is said of the prompt holds for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvtransfer.ids import WorkerId
from services.gateway.dispatch.router import Candidate, Plan
from services.protocol.block_hash import BlockHash


class Phase(StrEnum):
    """How far an attempt came."""

    PREFILL = "prefill"  # no token so far
    HANDOFF = "handoff"  # the first token came from prefill
    DECODE = "decode"  # the worker that generates has spoken


@dataclass(slots=True, eq=False)
class Attempt:
    """A choice at the workers of one plan, under one handle."""

    handle: int
    plan: Plan
    queued_tokens: int  # that `plan.computes` was taken to compute for it
    predicted_cached: int | None  # None: its group counts once, by another one
    sent_at: float  # on the ledger's clock
    to_compute: int  # tokens, for its first one; those that were queued before it included
    queued_blocks: Sequence[BlockHash] = ()  # of them, the full ones that no attempt before it was to compute
    first_token_at: float | None = None
    group: "Group | None" = None
    phase: Phase = Phase.PREFILL
    decodes_at: WorkerId | None = None  # in DECODE: whose word counts; None: nobody's any more

    @property
    def split(self) -> bool:
        """True when KV is to be handed over."""
        return self.plan.split

    def workers(self) -> list[Candidate]:
        """All that were sent this attempt."""
        return self.plan.workers()

    def heeds(self, worker: WorkerId) -> bool:
        """True while this worker's word on the attempt counts: prefill's ends with decode's first row."""
        if self.plan.decode is not None and worker == self.plan.decode.id:
            return True
        return self.plan.prefill is not None and worker == self.plan.prefill.id and self.phase is not Phase.DECODE

    def candidate(self, worker: WorkerId) -> Candidate:
        """The worker of this attempt with that id."""
        return next(candidate for candidate in self.workers() if candidate.id == worker)

    def row_from(self, worker: WorkerId) -> bool:
        """Takes note of a row. True when it completes a handoff: for a group, when it is the first one to."""
        if worker != self.plan.generates.id:
            self.phase = Phase.HANDOFF
            return False
        completes = self.split and self.phase is not Phase.DECODE and not (self.group and self.group.forked)
        self.phase = Phase.DECODE
        self.decodes_at = None if self.plan.decode is None else worker
        if self.group is not None:
            self.group.forked = True
        return completes


@dataclass(slots=True, eq=False)
class Group:
    """Choices that were sent as one. `handle` names their prompt at the workers, until that is forked."""

    handle: int
    handles: set[int] = field(default_factory=set)  # of the choices whose attempt is not over
    forked: bool = False  # a choice has its first row from the worker that generates
