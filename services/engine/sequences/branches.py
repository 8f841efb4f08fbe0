"""Branches: choices over one prompt, which is computed once, in a slot of its own.

A request with branches occupies a slot for its prompt and one for each branch. For P prompt tokens and block size b:

    prompt's slot     [0 ─── full blocks, ⌊P / b⌋ ───┬─ last ]     last: partly filled, or empty for the next position
    branches, waiting                                 [ own  ]     the first one has none: it takes over `last`
    branches, forked  [────── the same blocks ───────┬─ own  ]     own: a copy of `last`
"""

import numpy as np

from services.engine.blocks.block_pool import BlockPool
from services.engine.sequences.batch_state import BatchState, Phase


class Branches:
    """The branches that wait for their prompts."""

    def __init__(self, batch: BatchState, pool: BlockPool) -> None:
        self._batch = batch
        self._pool = pool
        self._of: dict[int, list[int]] = {}  # by the slot of a prompt with branches: their slots

    def add(self, prompt: int, slots: list[int]) -> None:
        """Notes that the branches in these slots wait for the prompt in the slot `prompt`."""
        self._of[prompt] = slots

    def of(self, slot: int) -> list[int]:
        """The slots of the branches that wait for a slot's prompt; for a request without branches, the slot itself."""
        return self._of.get(slot, [slot])

    def sampled(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The slots that get a token when the known tokens of these slots are computed: their branches, or themselves.

        Returns int64[N] indices into `slots` and int64[N] the slots that get a token.
        """
        if not self._of:
            return np.arange(len(slots)), slots
        targets = [(index, target) for index, slot in enumerate(slots.tolist()) for target in self.of(slot)]
        pairs = np.array(targets, dtype=np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def fork(self, slot: int) -> list[tuple[int, int]]:
        """Makes sequences of the branches of a complete prompt, whose slot is freed next. Some may have a first token.

        Returns the slices to copy before the next step: source, destination.
        """
        batch = self._batch
        blocks, computed = batch.blocks(slot), int(batch.computed[slot])
        num_full = computed // batch.block_size
        copies = []
        for branch in self.take(slot):
            own = batch.blocks(branch)
            table = blocks[:num_full] + (own or blocks[num_full:])
            shared = np.array(table[:num_full] if own else table, dtype=np.int32)
            self._pool.reference(self._pool.parts.referenced(shared, batch.unseen[slot]))
            if own and computed % batch.block_size:
                copies += self._pool.parts.copies(blocks[num_full], own[0])
            batch.block_table[branch, : len(table)] = table
            batch.num_blocks[branch] = len(table)
            batch.unseen[branch] = batch.unseen[slot]
            batch.computed[branch] = batch.done[branch] = computed
            batch.num_entered[branch] = batch.num_entered[slot]
            batch.num_ready[branch] = batch.num_ready[slot]
            batch.set_phase(branch, Phase.DECODE)
        return copies

    def take(self, prompt: int) -> list[int]:
        """Takes out the branches that wait for a slot's prompt; returns their slots."""
        return self._of.pop(prompt, [])

    def remove(self, prompt: int, slot: int) -> None:
        """Takes the branch in `slot` out of those that wait for a prompt."""
        self._of[prompt].remove(slot)

    def check(self) -> None:
        """Asserts that each waiting branch waits for one prompt. Slow; for tests and for an idle worker."""
        waiting = sorted(slot for slots in self._of.values() for slot in slots)
        assert waiting == np.flatnonzero(self._batch.phase == Phase.BRANCH).tolist(), "branches that wait for no prompt"
