"""The policy of decode workers: running sequences first, then by priority; preempted before new ones, oldest first."""

import numpy as np

from services.engine.schedulers.base import NOTHING, StepPlan, take_chunks
from services.engine.schedulers.priority import rank, rank_slots
from services.engine.sequences.admission import Admission
from services.engine.sequences.batch_state import Phase
from services.engine.sequences.request import Kind, Request
from services.engine.sequences.request_table import State
from services.engine.sequences.sequences import Sequences


class DecodeScheduler:
    """Plans one token for every running sequence, and chunks of local prompts beside them.

    Prompts take what is left of the budget; they always get a token, or they would wait for ever. A step that also
    decodes has at most `prefill_chunk` tokens of prompts; by default that is no limit of its own. A limit of 512 gave
    streams their tokens after 90 instead of 140 ms, but 64 prompts of 462 tokens took 1.4 times as long on 2 cores.
    """

    def __init__(
        self, max_num_batched_tokens: int, *, prefill_chunk: int | None = None, watermark: float = 0.01
    ) -> None:
        self._budget = max_num_batched_tokens
        self._prefill_chunk = max_num_batched_tokens if prefill_chunk is None else prefill_chunk
        self._watermark = watermark

    def accepts(self, request: Request) -> bool:
        """Accepts received sequences, and any of its own that generate. No worker reads blocks from this role."""
        return request.kind is not Kind.EMBED

    def admit(self, sequences: Sequences, now: float) -> None:
        """Admits requests, after running sequences have grown."""
        if self._grow(sequences, now):
            self._admit(sequences, now)

    def plan(self, sequences: Sequences, now: float) -> StepPlan:
        """Grows, admits, and takes all decoding sequences and chunks of prompts."""
        if not self._grow(sequences, now):
            return NOTHING
        self._admit(sequences, now)
        batch = sequences.batch
        decoding = batch.slots_in(Phase.DECODE)
        ones = np.ones(len(decoding), dtype=np.int32)
        computing = batch.slots_in(Phase.PREFILL)
        if not len(computing):
            return StepPlan(decoding, ones, only_decodes=True)
        budget = max(1, self._budget - len(decoding))
        if len(decoding):
            budget = min(budget, self._prefill_chunk)
        first = computing[np.lexsort((batch.arrival[computing], rank_slots(batch, computing, now)))]
        chunks = take_chunks(sequences, first, budget)
        return StepPlan(np.concatenate([decoding, chunks.slots]), np.concatenate([ones, chunks.counts]))

    def _grow(self, sequences: Sequences, now: float) -> bool:
        """Gives every decoding sequence the block that it needs; where blocks run out, preempts the newest sequence of
        those that come last by rank.

        Returns False where blocks run out while a step is under way: its end may free blocks, and only then are all
        tokens of a sequence to preempt known.
        """
        batch = sequences.batch
        while not sequences.tables.grow(batch.slots_in(Phase.DECODE)):
            if sequences.frees.steps_under_way:
                return False
            running = np.concatenate([batch.slots_in(Phase.DECODE), batch.slots_in(Phase.PREFILL)])
            last = np.lexsort((batch.arrival[running], rank_slots(batch, running, now)))[-1]
            sequences.preempt(int(running[last]))
        return True

    def _admit(self, sequences: Sequences, now: float) -> None:
        """Admits requests by rank; of equal ones the preempted first, without a watermark.

        No request passes one before it that waits for room.
        """
        requests = sequences.requests
        if not requests.num_queued or not sequences.batch.num_free_slots:
            return
        queued = [(rank(one, now), False, one.arrival, one) for one in requests.in_state(State.PREEMPTED)]
        queued += [(rank(one, now), True, one.arrival, one) for one in requests.in_state(State.WAITING)]
        for _, is_new, _, request in sorted(queued, key=_place):
            watermark = self._blocks_kept(sequences) if is_new else 0
            if sequences.admit(request, now, watermark=watermark) is Admission.NO_ROOM:
                return

    def _blocks_kept(self, sequences: Sequences) -> int:
        """Counts the blocks to leave for growth; none when nothing runs, or a large request would wait for ever."""
        if not sequences.requests.num_with_blocks:
            return 0
        return max(sequences.pool.parts.slices_per_block, int(sequences.pool.num_blocks * self._watermark))


def _place(queued: tuple[int, bool, float, Request]) -> tuple[int, bool, float]:
    return queued[:3]
