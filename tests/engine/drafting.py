"""A scheduler that plans drafts for decoding sequences, as a proposer would have it do."""

import random
from collections.abc import Callable

import numpy as np

from services.engine.schedulers.base import StepPlan
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.sequences.batch_state import Phase
from services.engine.sequences.sequences import Sequences

MOST = 3  # drafts of a sequence in a step


class DraftingScheduler(DecodeScheduler):
    """Plans up to MOST drafts for each decoding sequence where no step is under way.

    expected: returns the tokens of a handle from a position on, as far as they are known. A draft is the token that is
    expected with the probability `right`; any other, otherwise.
    """

    def __init__(
        self, budget: int, expected: Callable[[int, int], list[int]], *, right: float, vocab_size: int, seed: int = 0
    ) -> None:
        super().__init__(budget, prefill_chunk=budget)
        self._expected = expected
        self._right = right
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self.num_planned = 0

    def plan(self, sequences: Sequences, now: float) -> StepPlan:
        """See Scheduler."""
        plan, batch = super().plan(sequences, now), sequences.batch
        if sequences.frees.steps_under_way:
            return plan
        counts = plan.counts.copy()
        for row, slot in enumerate(plan.slots.tolist()):
            length = int(batch.length[slot])
            wanted = min(self._random.randint(0, MOST), int(batch.max_len[slot]) - length)
            if batch.phase[slot] != Phase.DECODE or wanted < 1:
                continue
            if not sequences.tables.grow(np.array([slot]), wanted + 1):
                continue
            batch.tokens[slot, length : length + wanted] = self._drafts(batch.request(slot).id.handle, length, wanted)
            counts[row] += wanted
            self.num_planned += wanted
        return StepPlan(plan.slots, counts) if counts.sum() > plan.counts.sum() else plan

    def _drafts(self, handle: int, position: int, count: int) -> list[int]:
        drafts = [self._random.randrange(self._vocab_size) for _ in range(count)]
        for index, token in enumerate(self._expected(handle, position)[:count]):
            is_right = self._random.random() < self._right
            drafts[index] = (
                token if is_right else (token + 1 + drafts[index] % (self._vocab_size - 1)) % self._vocab_size
            )
        return drafts
