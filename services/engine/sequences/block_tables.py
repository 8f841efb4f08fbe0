"""Block tables: their blocks at admission, at growth and at the end, and blocks in quarantine.

A sequence with an attention window frees its first blocks while it runs:

    block table   [0 ─── freed ───┬─── referenced ───]
                               num_freed        num_blocks

Where layers have different windows, it keeps the blocks, and frees their parts that nobody sees (`BatchState.unseen`).
"""

from collections.abc import Iterable

import numpy as np

from services.engine.blocks.block_pool import BlockPool
from services.engine.blocks.deferred_frees import DeferredFrees
from services.engine.sequences.batch_state import BatchState


class BlockTables:
    """Allocates and frees the blocks of slots."""

    def __init__(self, batch: BatchState, pool: BlockPool, frees: DeferredFrees, window: int | None) -> None:
        """window: of the model's attention, in tokens; None: there is none."""
        self._batch = batch
        self.pool = pool
        self._frees = frees
        self._window = window
        self._quarantined: set[int] = set()  # slices

    @property
    def num_quarantined(self) -> int:
        """Slices in quarantine."""
        return len(self._quarantined)

    def allocate(self, cached: np.ndarray, num_blocks: int, watermark: int, unseen: np.ndarray) -> np.ndarray | None:
        """References int32[n] cached blocks and allocates those that follow them, up to num_blocks in all.

        unseen: see `parts.py`. None, and no change, where the pool would then have fewer than `watermark` slices
        available.
        """
        pool, count = self.pool, num_blocks - len(cached)
        parts = pool.parts.referenced(cached, unseen)
        pool.reference(parts)
        fresh = None
        if pool.available - self.num_fresh(len(cached), num_blocks, unseen) >= watermark:
            fresh = pool.allocate(count, unseen - len(cached))
        if fresh is None:
            pool.free(parts[::-1])
            return None
        return np.concatenate([cached, fresh])

    def num_fresh(self, num_cached: int, num_blocks: int, unseen: np.ndarray) -> int:
        """Counts the slices of a sequence's blocks after the cached ones."""
        return self.pool.parts.num_slices(num_blocks, unseen) - self.pool.parts.num_slices(num_cached, unseen)

    def grow(self, slots: np.ndarray, num_positions: int | np.ndarray = 1) -> bool:
        """Allocates the blocks for the next positions of these decoding slots that they lack; all or none.

        num_positions: of each slot, or int[n]. Frees first the blocks that lie behind the window of the next position.
        Returns False where the pool has too few.
        """
        batch = self._batch
        if self._window is not None:
            self._free_unseen(slots, self._window)
        if batch.slices is not None:
            self.free_passed(slots)
        ends, room = batch.computed[slots] + num_positions, batch.num_blocks[slots] * batch.block_size
        is_short = ends > room
        if not is_short.any():
            return True
        short = slots[is_short]
        counts = -(-(ends[is_short] - room[is_short]) // batch.block_size)
        fresh = self.pool.allocate(int(counts.sum()))
        if fresh is None:
            return False
        first = batch.num_blocks[short]
        within = np.arange(len(fresh)) - np.repeat(np.cumsum(counts) - counts, counts)
        batch.block_table[np.repeat(short, counts), np.repeat(first, counts) + within] = fresh
        batch.num_blocks[short] = first + counts
        return True

    def free(self, slot: int, quarantined: frozenset[int] = frozenset()) -> None:
        """Frees a slot's blocks but for the quarantined slices; full blocks that were computed stay cached."""
        parts = self.pool.parts.referenced(self._batch.table(slot), self._batch.unseen[slot])
        if quarantined:
            self._quarantined |= quarantined
            parts = parts[~np.isin(parts, self._parts_with(quarantined))]
        self._frees.free(parts[::-1], touches_above=bool(self._batch.num_freed[slot] > 0))

    def free_quarantined(self, slices: tuple[int, ...]) -> None:
        """Frees slices that were in quarantine, as far as none of the same block is left there."""
        assert self._quarantined.issuperset(slices)
        self._quarantined.difference_update(slices)
        parts = self._parts_with(slices)
        self.pool.free(parts[~np.isin(parts, self._parts_with(self._quarantined))][::-1])

    def free_passed(self, slots: np.ndarray) -> None:
        """Frees the parts of these slots' computed blocks that neither their next token nor any later one sees."""
        batch, pool = self._batch, self.pool
        unseen = np.minimum(pool.parts.unseen(batch.computed[slots]), batch.done[slots, None] // batch.block_size)
        passed = (unseen > batch.unseen[slots]).any(axis=1)
        for slot, after in zip(slots[passed].tolist(), unseen[passed], strict=True):
            before = batch.unseen[slot].copy()
            batch.unseen[slot] = np.maximum(before, after)
            self._frees.free(pool.parts.passed(batch.block_table[slot], before, batch.unseen[slot])[::-1])

    def _parts_with(self, slices: Iterable[int]) -> np.ndarray:
        return self.pool.parts.parts_with(np.array(list(slices), dtype=np.int32))

    def _free_unseen(self, slots: np.ndarray, window: int) -> None:
        """Frees the blocks of these decoding slots that neither their next token nor any later one sees.

        They stay cached while nobody needs the room. The last block that was entered in the cache is kept in any case:
        the next one is entered below it.
        """
        batch = self._batch
        unseen = (batch.computed[slots] - window + 1) // batch.block_size
        behind = unseen > batch.num_freed[slots]
        for slot, end in zip(slots[behind].tolist(), unseen[behind].tolist(), strict=True):
            start = int(batch.num_freed[slot])
            end = max(start, min(end, int(batch.num_entered[slot]) - 1))
            self._frees.free(batch.block_table[slot, start:end][::-1].copy())
            batch.block_table[slot, start:end] = 0
            batch.num_freed[slot] = end
