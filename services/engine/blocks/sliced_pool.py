"""The block pool of a model whose layers have different windows: blocks are numbers, and their slices are memory.

References and the queue of evictable ones are of parts (`sliced_parts.py`). All slices of a part are in one of the
places that `block_pool.py` names. Of the later parts of its blocks a sequence references only those that its next token
sees. A part that nobody references stays cached, if its block is, until its room is needed.
"""

import numpy as np

from kvtransfer.layer_groups import LayerGroups
from services.engine.blocks.block_pool import BlockPool
from services.engine.blocks.eviction_queue import EvictionQueue
from services.engine.blocks.sliced_cache import SlicedCache
from services.engine.blocks.sliced_parts import SlicedBlocks


class SlicedPool(BlockPool):
    """Reference counts of parts, and generations of slices, for slice ids 0 to num_blocks - 1."""

    cache: SlicedCache
    parts: SlicedBlocks

    def __init__(self, num_slices: int, block_size: int, groups: LayerGroups) -> None:
        parts = SlicedBlocks(num_slices, block_size, groups)
        super().__init__(num_slices, SlicedCache(parts, block_size))
        self.parts = parts
        num_parts = len(parts.sizes) * parts.num_ids
        self._references = np.zeros(num_parts, dtype=np.int32)
        self._evictable = EvictionQueue(num_parts)
        self._num_evictable_slices = 0
        self._free_ids = np.arange(parts.num_ids, dtype=np.int32)[::-1].copy()
        self._num_free_ids = parts.num_ids

    @property
    def available(self) -> int:
        """Slices that can be allocated now."""
        return self._num_free + self._num_evictable_slices

    def allocate(self, count: int, unseen: np.ndarray | None = None) -> np.ndarray | None:
        """See `BlockPool.allocate`."""
        wanted = self.parts.wanted(count, np.zeros(len(self.parts.has)) if unseen is None else unseen)
        needed = int(wanted.sum())
        if needed > self.available:
            return None
        while self._num_free < needed:
            self._evict_oldest()
        self._num_free -= needed
        self.num_used = max(self.num_used, self.num_blocks - self._num_free)
        slices = self._free[self._num_free : self._num_free + needed][::-1].copy()
        self.generations[slices] += np.uint64(1)
        self._num_free_ids -= count
        blocks = self._free_ids[self._num_free_ids : self._num_free_ids + count][::-1].copy()
        self._references[self.parts.fill(blocks, wanted, slices)] = 1
        return blocks

    def reference(self, parts: np.ndarray) -> None:
        """See `BlockPool.reference`."""
        unreferenced = parts[self._references[parts] == 0]
        assert self._evictable.which(unreferenced).all()
        self._remove_evictable(unreferenced)
        self._references[parts] += 1

    def free(self, parts: np.ndarray) -> None:
        """See `BlockPool.free`."""
        assert (self._references[parts] > 0).all()
        self._references[parts] -= 1
        unreferenced = parts[self._references[parts] == 0]
        cached = self.cache.is_node[unreferenced % self.parts.num_ids]
        self._evictable.append(unreferenced[cached])
        self._num_evictable_slices += self._num_slices(unreferenced[cached])
        self._release(unreferenced[~cached])

    def replace(self, block: int, twin: int, unseen: np.ndarray) -> np.ndarray | None:
        """See `BlockPool.replace`. The twin gets the parts that it lacks and the sequence has."""
        part, has = self.parts.part, self.parts.has
        groups = [g for g, n in enumerate(unseen.tolist(), start=1) if n <= 0]
        lacking = [g for g in groups if not has[g - 1, twin]]
        if any(self._references[part(g, block)] > 1 for g in lacking):
            return None  # another sequence's table has the block, too
        there = [g for g in groups if g not in lacking]
        self.reference(np.array([twin, *(part(g, twin) for g in there)], dtype=np.int32))
        for g in lacking:
            self.parts.move(g, block, twin)
            self._references[part(g, twin)], self._references[part(g, block)] = 1, 0
        if lacking:
            self.cache.parts_changed()
        return np.array([block, *(part(g, block) for g in there)], dtype=np.int32)

    def evict(self, top: int) -> int:
        """See `BlockPool.evict`."""
        subtree = self.cache.subtree(top)
        for block in subtree:
            self.cache.remove(block)
        groups = np.arange(len(self.parts.sizes))[::-1, None]
        parts = (np.array(subtree, dtype=np.int32) + groups * self.parts.num_ids).reshape(-1).astype(np.int32)
        evictable = parts[self._evictable.which(parts)]
        self._remove_evictable(evictable)
        self._release(evictable)
        return len(subtree)

    def check(self) -> None:
        """Asserts that every slice and every part is in exactly one place. Slow; for tests and for an idle worker."""
        self._evictable.check()
        num_groups, num_ids = len(self.parts.sizes), self.parts.num_ids
        references = self._references.reshape(num_groups, num_ids)
        evictable = np.zeros(num_groups * num_ids, dtype=np.bool_)
        evictable[self._evictable.to_list()] = True
        is_free = np.zeros(num_ids, dtype=np.bool_)
        is_free[self._free_ids[: self._num_free_ids]] = True
        assert is_free.sum() == self._num_free_ids, "a block id that is free twice"
        has = np.concatenate([~is_free[None], self.parts.has])
        assert (references >= 0).all()
        assert np.array_equal(has, (references > 0) | evictable.reshape(num_groups, num_ids)), "parts that nobody has"
        assert not ((references > 0).reshape(-1) & evictable).any(), "an evictable part that is referenced"
        assert (references[1:] <= references[0]).all(), "a part of a block that its sequence does not have"
        assert self.cache.is_node[np.flatnonzero(evictable) % num_ids].all(), "an evictable part without a node"
        assert not self.cache.is_node[is_free].any(), "a node without a block"
        assert self._num_evictable_slices == self._num_slices(np.flatnonzero(evictable)), "evictable slices"
        self._check_slices(has[self.parts.group_of].T)

    def _check_slices(self, there: np.ndarray) -> None:
        """Asserts that the slices that blocks have, bool[blocks, S], are theirs alone."""
        rows, num_ids = self.parts.rows, self.parts.num_ids
        owners = np.arange(num_ids)[:, None] + self.parts.group_of * num_ids
        assert np.array_equal(self.parts.part_of[rows[there]], owners[there]), "a slice of another part"
        assert not rows[~there].any(), "a slice that was given away is in a row"
        every = np.sort(np.concatenate([self._free[: self._num_free], rows[there]]))
        assert np.array_equal(every, np.arange(self.num_blocks)), "slices in two places, or in none"

    def _num_slices(self, parts: np.ndarray) -> int:
        return int(self.parts.sizes[parts // self.parts.num_ids].sum())

    def _remove_evictable(self, parts: np.ndarray) -> None:
        self._evictable.remove(parts)
        self._num_evictable_slices -= self._num_slices(parts)

    def _evict_oldest(self) -> None:
        """Evicts the part that was used longest ago; with a first part, all nodes below it."""
        oldest = self._evictable.oldest
        if oldest < self.parts.num_ids:
            self.num_evicted += self.evict(oldest)
            return
        part = np.array([oldest], dtype=np.int32)
        self._remove_evictable(part)
        self._release(part)
        self.cache.parts_changed()
        self.num_evicted += 1

    def _release(self, parts: np.ndarray) -> None:
        """Makes the slices of int32[n] parts free, and the ids of blocks whose first part is among them."""
        for group in range(len(self.parts.sizes)):
            blocks = parts[parts // self.parts.num_ids == group] % self.parts.num_ids
            if not len(blocks):
                continue
            slices = self.parts.empty(group, blocks)
            self._free[self._num_free : self._num_free + len(slices)] = slices
            self._num_free += len(slices)
            if group == 0:
                self._free_ids[self._num_free_ids : self._num_free_ids + len(blocks)] = blocks
                self._num_free_ids += len(blocks)
