"""The block pool: how many references each block has, and which block is allocated next.

Every block is in exactly one of three places:

    free        no references, no cached content      a stack: the block freed last is taken first
    evictable   no references, cached content         a queue, least recently used first (eviction_queue.py)
    referenced  references above zero

Blocks are freed tail-first, so in the queue a node's children stand before it and eviction is leaf-first by itself. A
sequence with an attention window frees its first blocks while it runs; to evict one of those takes all nodes below it
out of the cache, also those of referenced blocks: no lookup could reach them any more.
A block's generation is raised when the block is allocated for new content, never while it is referenced.

Here a block is one part and one slice. Where layers have different windows, it has several: see `sliced_pool.py`.
"""

import numpy as np

from services.engine.blocks.eviction_queue import EvictionQueue
from services.engine.blocks.parts import WholeBlocks
from services.engine.blocks.prefix_cache import PrefixCache


class BlockPool:
    """Reference counts, generations and the order of reuse, for block ids 0 to num_blocks - 1."""

    parts: WholeBlocks  # of blocks

    def __init__(self, num_blocks: int, cache: PrefixCache) -> None:
        self.num_blocks = num_blocks
        self.generations = np.zeros(num_blocks, dtype=np.uint64)  # registered with transports: never reallocated
        self.cache = cache
        self.parts = WholeBlocks()
        self._references = np.zeros(num_blocks, dtype=np.int32)
        self._free = np.arange(num_blocks, dtype=np.int32)[::-1].copy()
        self._num_free = num_blocks
        self.num_used = 0  # blocks that were allocated at any time: those with the lowest ids. Any thread may read it
        self.num_evicted = 0  # cached blocks so far whose room was needed
        self._evictable = EvictionQueue(num_blocks)

    @property
    def available(self) -> int:
        """Blocks that can be allocated now."""
        return self._num_free + len(self._evictable)

    def allocate(self, count: int, unseen: np.ndarray | None = None) -> np.ndarray | None:
        """Allocates int32[count] blocks with one reference to each part, all or none; evicts cached ones where it must.

        unseen: see `parts.py`, counted from the first of these blocks; None: all their parts are needed. Returns None,
        and changes nothing, where there are too few.
        """
        if count > self.available:
            return None
        while self._num_free < count:
            self.num_evicted += self.evict(self._evictable.oldest)
        self._num_free -= count
        self.num_used = max(self.num_used, self.num_blocks - self._num_free)
        blocks = self._free[self._num_free : self._num_free + count][::-1].copy()
        self._references[blocks] = 1
        self.generations[blocks] += np.uint64(1)
        return blocks

    def reference(self, blocks: np.ndarray) -> None:
        """Adds a reference to each of int32[n] blocks, all different, which are cached or referenced already."""
        unreferenced = blocks[self._references[blocks] == 0]
        assert self._evictable.which(unreferenced).all()
        self._evictable.remove(unreferenced)
        self._references[blocks] += 1

    def free(self, blocks: np.ndarray) -> None:
        """Takes a reference from each of int32[n] blocks, all different: those of a sequence, tail first."""
        assert (self._references[blocks] > 0).all()
        self._references[blocks] -= 1
        unreferenced = blocks[self._references[blocks] == 0]
        cached = self.cache.is_node[unreferenced]
        self._evictable.append(unreferenced[cached])
        freed = unreferenced[~cached]
        self._free[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)

    def replace(self, block: int, twin: int, unseen: np.ndarray) -> np.ndarray | None:
        """References, for a sequence that has a block, the cached block with the same content in its place.

        unseen: counted from this block. Returns the parts of the block that the sequence is to free. None, and no
        change, where the twin has not all that the sequence needs.
        """
        self.reference(np.array([twin], dtype=np.int32))
        return np.array([block], dtype=np.int32)

    def touch(self, blocks: np.ndarray) -> None:
        """Moves evictable blocks, nearest first, to the end of the queue: none is evicted before the one below it."""
        touched = blocks[self._evictable.which(blocks)]
        self._evictable.remove(touched)
        self._evictable.append(touched)

    def check(self) -> None:
        """Asserts that every block is in exactly one place, and where its content is cached in the right one.

        Slow; for tests and for an idle worker.
        """
        free = np.sort(self._free[: self._num_free])
        self._evictable.check()
        evictable, referenced = np.array(self._evictable.to_list(), dtype=np.int32), np.flatnonzero(self._references)
        assert np.array_equal(np.sort(np.concatenate([free, evictable, referenced])), np.arange(self.num_blocks))
        assert (self._references >= 0).all()
        assert not self.cache.is_node[free].any()
        assert self.cache.is_node[evictable].all()

    def evict(self, top: int) -> int:
        """Takes a cached block and all below it out of the cache. Those that are not referenced become free.

        Returns how many blocks left the cache.
        """
        subtree = self.cache.subtree(top)
        for block in subtree:
            self.cache.remove(block)
            if self._evictable.has(block):
                self._evictable.remove_one(block)
                self._free[self._num_free] = block
                self._num_free += 1
        return len(subtree)
