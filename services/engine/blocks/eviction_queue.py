"""The queue of evictable blocks, least recently used first: a list that is linked both ways through arrays.

    oldest ⇄ ... ⇄ newest       each entry is a block; the entry `num_blocks` stands for both ends

Blocks leave it from anywhere. Each operation takes time by the number of blocks that it is given, whatever happened
before: there is nothing to tidy up later.
"""

import numpy as np

_FEW = 4  # blocks that are added or removed sooner one by one than all at once


class EvictionQueue:
    """Block ids 0 to num_blocks - 1, each at most once."""

    def __init__(self, num_blocks: int) -> None:
        self._end = num_blocks
        self._next = np.full(num_blocks + 1, num_blocks, dtype=np.int32)
        self._previous = self._next.copy()
        # Rises from entry to entry, so that blocks can be sorted by their places; 0: not in the queue.
        self._stamp = np.zeros(num_blocks, dtype=np.int64)
        self._last_stamp = 0
        self._size = 0
        # The same memory: one number of it is read and written in a third of the time.
        self._next_at, self._previous_at = self._next.data, self._previous.data
        self._stamp_at = self._stamp.data

    def __len__(self) -> int:
        return self._size

    @property
    def oldest(self) -> int:
        """The block that is evicted next; the queue must not be empty."""
        assert self._size
        return self._next_at[self._end]

    def has(self, block: int) -> bool:
        """True when the block is in the queue."""
        return self._stamp_at[block] != 0

    def which(self, blocks: np.ndarray) -> np.ndarray:
        """Tells which of int32[n] blocks are in the queue, as bool[n]."""
        inside: np.ndarray = self._stamp[blocks] != 0
        return inside

    def append(self, blocks: np.ndarray) -> None:
        """Adds int32[n] blocks at the end, in order; none may be in the queue."""
        if len(blocks) <= _FEW:
            for block in blocks.tolist():
                self._append_one(block)
            return
        newest = self._previous_at[self._end]
        self._next_at[newest] = first = int(blocks[0])
        self._previous_at[self._end] = last = int(blocks[-1])
        self._next[blocks[:-1]] = blocks[1:]
        self._next_at[last] = self._end
        self._previous[blocks[1:]] = blocks[:-1]
        self._previous_at[first] = newest
        self._stamp[blocks] = np.arange(self._last_stamp + 1, self._last_stamp + 1 + len(blocks))
        self._last_stamp += len(blocks)
        self._size += len(blocks)

    def remove(self, blocks: np.ndarray) -> None:
        """Removes int32[n] blocks, which must be in the queue."""
        if len(blocks) <= _FEW:
            for block in blocks.tolist():
                self.remove_one(block)
            return
        ordered = blocks[np.argsort(self._stamp[blocks], kind="stable")]  # which is fast where a sequence freed them
        before, after = self._previous[ordered], self._next[ordered]
        apart = after[:-1] != ordered[1:]  # others stand between a block and the one after it
        starts, ends = np.concatenate([[True], apart]), np.concatenate([apart, [True]])
        before, after = before[starts], after[ends]
        self._next[before] = after
        self._previous[after] = before
        self._stamp[blocks] = 0
        self._size -= len(blocks)

    def remove_one(self, block: int) -> None:
        """Removes a block, which must be in the queue."""
        before, after = self._previous_at[block], self._next_at[block]
        self._next_at[before] = after
        self._previous_at[after] = before
        self._stamp_at[block] = 0
        self._size -= 1

    def _append_one(self, block: int) -> None:
        newest = self._previous_at[self._end]
        self._next_at[newest] = self._previous_at[self._end] = block
        self._next_at[block], self._previous_at[block] = self._end, newest
        self._last_stamp += 1
        self._stamp_at[block] = self._last_stamp
        self._size += 1

    def to_list(self) -> list[int]:
        """Lists all blocks, oldest first. The list ends, also where the links make a cycle."""
        found: list[int] = []
        block = self._next_at[self._end]
        while block != self._end and len(found) <= self._size:
            found.append(block)
            block = self._next_at[block]
        return found

    def check(self) -> None:
        """Asserts that the links agree both ways, and with the stamps. Slow; for tests and for an idle worker."""
        blocks = self.to_list()
        assert len(blocks) == self._size, "a cycle, or an end too early"
        ring = [self._end, *blocks, self._end]
        assert self._previous[ring[1:]].tolist() == ring[:-1], "links that differ"
        stamps = self._stamp[blocks]
        assert (np.diff(stamps) > 0).all(), "stamps that do not rise"
        assert np.array_equal(np.sort(blocks), np.flatnonzero(self._stamp)), "stamps of blocks that are not queued"
