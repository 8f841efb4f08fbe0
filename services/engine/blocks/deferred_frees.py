"""Frees blocks as soon as no step that was launched can read or write them any more.

A step that is under way has the block tables of its launch. So a block that a sequence frees meanwhile goes back to the
pool when the last step that was launched before has been collected. Steps are collected in the order of their launches.
"""

from collections import deque

import numpy as np

from services.engine.blocks.block_pool import BlockPool


class DeferredFrees:
    """Counts steps, and keeps the blocks that are to be freed after one of them."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._num_launched = 0  # steps
        self._num_collected = 0
        self._waiting: deque[tuple[int, np.ndarray, bool]] = deque()  # until so many steps are collected; see `free`

    @property
    def steps_under_way(self) -> bool:
        """True when a step was launched and not collected."""
        return self._num_launched > self._num_collected

    def step_launched(self) -> None:
        """Counts a step: blocks that are freed from now on may be used by it."""
        self._num_launched += 1

    def step_collected(self) -> None:
        """Frees the blocks that only waited for the oldest step under way, which is complete."""
        self._num_collected += 1
        while self._waiting and self._waiting[0][0] <= self._num_collected:
            _, blocks, touches_above = self._waiting.popleft()
            self._free(blocks, touches_above)

    def free(self, blocks: np.ndarray, *, touches_above: bool = False) -> None:
        """Frees int32[n] blocks, tail first, once no step under way can use them.

        touches_above: the blocks above these in the cache were freed before them; they count as used now, so that they
        are evicted after them.
        """
        if self.steps_under_way:
            self._waiting.append((self._num_launched, blocks, touches_above))
        else:
            self._free(blocks, touches_above)

    def _free(self, blocks: np.ndarray, touches_above: bool) -> None:
        pool, cache = self._pool, self._pool.cache
        pool.free(blocks)
        if touches_above and len(blocks) and cache.contains(top := int(blocks[-1])):
            pool.touch(np.array(cache.ancestors(top), dtype=np.int32))
