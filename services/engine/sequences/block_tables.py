"""Block tables: their blocks at admission, at growth and at the end, and blocks in quarantine.

A sequence with an attention window frees its first blocks while it runs:

    block table   [0 ─── freed ───┬─── referenced ───]
                               num_freed        num_blocks
"""

import numpy as np

from services.engine.blocks.block_pool import BlockPool
from services.engine.blocks.deferred_frees import DeferredFrees
from services.engine.sequences.batch_state import BatchState


class BlockTables:
    """Allocates and frees the blocks of slots."""

    def __init__(self, batch: BatchState, pool: BlockPool, frees: DeferredFrees, window: int | None) -> None:
        """window: of the model's attention, in tokens; None: there is none."""
        self._batch = batch
        self._pool = pool
        self._frees = frees
        self._window = window
        self._quarantined: set[int] = set()  # blocks

    @property
    def num_quarantined(self) -> int:
        """Blocks in quarantine."""
        return len(self._quarantined)

    def allocate(self, cached: np.ndarray, num_blocks: int, watermark: int) -> np.ndarray | None:
        """References int32[n] cached blocks and allocates those that follow them, up to num_blocks in all.

        None, and no change, where the pool would then have fewer than `watermark` blocks available.
        """
        self._pool.reference(cached)
        count = num_blocks - len(cached)
        fresh = self._pool.allocate(count) if self._pool.available - count >= watermark else None
        if fresh is None:
            self._pool.free(cached[::-1])
            return None
        return np.concatenate([cached, fresh])

    def grow(self, slots: np.ndarray, num_positions: int | np.ndarray = 1) -> bool:
        """Allocates the blocks for the next positions of these decoding slots that they lack; all or none.

        num_positions: of each slot, or int[n]. Frees first the blocks that lie behind the window of the next position.
        Returns False where the pool has too few.
        """
        batch = self._batch
        if self._window is not None:
            self._free_unseen(slots, self._window)
        ends, room = batch.computed[slots] + num_positions, batch.num_blocks[slots] * batch.block_size
        is_short = ends > room
        if not is_short.any():
            return True
        short = slots[is_short]
        counts = -(-(ends[is_short] - room[is_short]) // batch.block_size)
        fresh = self._pool.allocate(int(counts.sum()))
        if fresh is None:
            return False
        first = batch.num_blocks[short]
        within = np.arange(len(fresh)) - np.repeat(np.cumsum(counts) - counts, counts)
        batch.block_table[np.repeat(short, counts), np.repeat(first, counts) + within] = fresh
        batch.num_blocks[short] = first + counts
        return True

    def free(self, slot: int, quarantined: frozenset[int] = frozenset()) -> None:
        """Frees a slot's blocks but for the quarantined ones; full blocks that were computed stay cached."""
        blocks = self._batch.table(slot)
        if quarantined:
            stays = np.isin(blocks, list(quarantined))
            self._quarantined.update(blocks[stays].tolist())
            blocks = blocks[~stays]
        self._frees.free(blocks[::-1], touches_above=bool(self._batch.num_freed[slot] > 0))

    def free_quarantined(self, blocks: tuple[int, ...]) -> None:
        """Frees blocks that were in quarantine."""
        assert self._quarantined.issuperset(blocks)
        self._quarantined.difference_update(blocks)
        self._pool.free(np.array(blocks[::-1], dtype=np.int32))

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
