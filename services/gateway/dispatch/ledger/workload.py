"""The work that this gateway has given to each worker and that has not ended: the router's counts."""

from collections import Counter
from collections.abc import Sequence

from kvtransfer.ids import WorkerId
from services.gateway.dispatch.ledger.attempt import Attempt, AttemptPhase
from services.protocol.block_hash import BlockHash


class Workload:
    """Counts by worker. A worker without work has no entry, since workers come and go.

    queued_tokens: prompt tokens that the worker has still to compute.
    queued_blocks: the full blocks of those tokens.
    assigned: attempts for which the worker generates or will generate.
    generating: those of them in DECODE.
    """

    def __init__(self) -> None:
        self.queued_tokens: Counter[WorkerId] = Counter()
        self.queued_blocks: dict[WorkerId, set[BlockHash]] = {}
        self.assigned: Counter[WorkerId] = Counter()
        self.generating: Counter[WorkerId] = Counter()

    def add(self, attempt: Attempt) -> None:
        """Counts an attempt that is about to be sent."""
        self.queued_tokens[attempt.plan.computes.id] += attempt.queued_tokens
        self.assigned[attempt.plan.generates.id] += 1

    def queue_blocks(self, attempt: Attempt, blocks: Sequence[BlockHash]) -> None:
        """Counts full blocks of the prompt that `plan.computes` computes for this attempt and for no earlier one."""
        attempt.queued_blocks = blocks
        if blocks:
            self.queued_blocks.setdefault(attempt.plan.computes.id, set()).update(blocks)

    def note_computed(self, attempt: Attempt) -> None:
        """Takes the attempt's prompt out of the queue. Again is no change."""
        worker = attempt.plan.computes.id
        _count_down(self.queued_tokens, worker, attempt.queued_tokens)
        attempt.queued_tokens = 0
        if (blocks := self.queued_blocks.get(worker)) is not None:
            blocks.difference_update(attempt.queued_blocks)
            if not blocks:
                del self.queued_blocks[worker]
        attempt.queued_blocks = ()

    def note_generating(self, attempt: Attempt) -> None:
        """Counts an attempt that has just come to DECODE."""
        self.generating[attempt.plan.generates.id] += 1

    def remove(self, attempt: Attempt) -> None:
        """Takes out an attempt that has ended."""
        self.note_computed(attempt)
        _count_down(self.assigned, attempt.plan.generates.id, 1)
        if attempt.phase is AttemptPhase.DECODE:
            _count_down(self.generating, attempt.plan.generates.id, 1)


def _count_down(counter: Counter[WorkerId], worker: WorkerId, by: int) -> None:
    counter[worker] -= by
    if not counter[worker]:
        del counter[worker]
