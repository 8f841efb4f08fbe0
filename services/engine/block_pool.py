"""The block pool: who holds which block, and which block is given out next.

Every block is in exactly one of three places:

    free       no references, no cached content      a stack: the block freed last is taken first
    evictable  no references, cached content         a queue, least recently used first
    held       references above zero

Blocks are freed tail-first, so in the queue a node's children stand before it and eviction is leaf-first by itself. A
sequence with an attention window lets go of its first blocks while it runs; to evict one of those takes all that is
below it out of the cache, also what is held: no lookup could reach it any more.
A block's generation is raised when it is given to new content, never while it is held.
"""

from collections import deque

import numpy as np

from services.engine.prefix_cache import PrefixCache


class BlockPool:
    """Reference counts, generations and the order of reuse, for block ids 0 to num_blocks - 1."""

    def __init__(self, num_blocks: int, cache: PrefixCache) -> None:
        self.num_blocks = num_blocks
        self.generations = np.zeros(num_blocks, dtype=np.uint64)  # registered with transports: never reallocated
        self._cache = cache
        self._references = np.zeros(num_blocks, dtype=np.int32)
        self._free = np.arange(num_blocks, dtype=np.int32)[::-1].copy()
        self._num_free = num_blocks
        # An entry of the queue is stamp * num_blocks + block, and valid while the stamp is the block's latest.
        self._queue: deque[int] = deque()
        self._stamp = np.zeros(num_blocks, dtype=np.int64)  # 0: not evictable
        self._last_stamp = 0
        self._num_evictable = 0

    @property
    def available(self) -> int:
        """Blocks that `allocate` could give out now."""
        return self._num_free + self._num_evictable

    def allocate(self, count: int) -> np.ndarray | None:
        """Gives out int32[count] blocks with one reference each, all or none; evicts cached ones where it must."""
        if count > self.available:
            return None
        while self._num_free < count:
            self._evict_oldest()
        self._num_free -= count
        blocks = self._free[self._num_free : self._num_free + count][::-1].copy()
        self._references[blocks] = 1
        self.generations[blocks] += np.uint64(1)
        return blocks

    def reference(self, blocks: np.ndarray) -> None:
        """One more reference to each of int32[n] blocks, all different, which have content: cached or held."""
        unreferenced = blocks[self._references[blocks] == 0]
        assert (self._stamp[unreferenced] != 0).all()
        self._stamp[unreferenced] = 0
        self._num_evictable -= len(unreferenced)
        self._references[blocks] += 1

    def free(self, blocks: np.ndarray) -> None:
        """One reference less to each of int32[n] blocks, all different: those of a sequence, tail first."""
        assert (self._references[blocks] > 0).all()
        self._references[blocks] -= 1
        unreferenced = blocks[self._references[blocks] == 0]
        cached = self._cache.is_node[unreferenced]
        self._num_evictable += int(np.count_nonzero(cached))
        self._enqueue(unreferenced[cached])
        freed = unreferenced[~cached]
        self._free[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)

    def touch(self, blocks: np.ndarray) -> None:
        """Cached blocks, nearest first, above what was released before: none of them is evicted before that."""
        self._enqueue(blocks[self._stamp[blocks] != 0])

    def check(self) -> None:
        """Asserts that every block is in exactly one place, and where its content is cached in the right one.

        Slow; for tests and for an idle worker.
        """
        free = np.sort(self._free[: self._num_free])
        evictable, held = np.flatnonzero(self._stamp), np.flatnonzero(self._references)
        assert len(evictable) == self._num_evictable
        assert np.array_equal(np.sort(np.concatenate([free, evictable, held])), np.arange(self.num_blocks))
        assert (self._references >= 0).all()
        assert not self._cache.is_node[free].any()
        assert self._cache.is_node[evictable].all()

    def _enqueue(self, blocks: np.ndarray) -> None:
        stamps = np.arange(self._last_stamp + 1, self._last_stamp + 1 + len(blocks))
        self._last_stamp += len(blocks)
        self._stamp[blocks] = stamps
        self._queue.extend((stamps * self.num_blocks + blocks).tolist())
        if len(self._queue) > 4 * self.num_blocks:
            self._queue = deque(entry for entry in self._queue if self._is_valid(entry))

    def _is_valid(self, entry: int) -> bool:
        stamp, block = divmod(entry, self.num_blocks)
        return bool(self._stamp[block] == stamp)

    def _evict_oldest(self) -> None:
        while not self._is_valid(entry := self._queue.popleft()):
            pass
        for block in self._cache.subtree(entry % self.num_blocks):
            self._cache.remove(block)
            if self._stamp[block] != 0:
                self._stamp[block] = 0
                self._num_evictable -= 1
                self._free[self._num_free] = block
                self._num_free += 1
