"""Some bytes of every block of a pool, as a pool of shorter blocks: what moves between parts of two workers."""

from collections.abc import Iterator, Sequence

import numpy as np

from kvtransfer.block_memory import BlockMemory
from kvtransfer.regions import ranges_of


class RangesOf:
    """`BlockBytes` whose blocks are some ranges of a pool's blocks, laid end to end."""

    def __init__(self, memory: BlockMemory, ranges: Sequence[range]) -> None:
        """ranges: of a whole block, which the pool has. Raises ValueError for others."""
        there = ranges_of(memory.regions)
        for own in ranges:
            if not own or not any(own.start >= each.start and own.stop <= each.stop for each in there):
                raise ValueError(f"bytes {own.start} to {own.stop} of a block are not in this pool")
        self.memory, self.ranges = memory, tuple(ranges)
        self.num_blocks = memory.num_blocks
        self.block_bytes = sum(map(len, ranges))

    def read(self, blocks: np.ndarray, start: int, end: int) -> bytes:
        """See `BlockBytes.read`."""
        return b"".join(
            self.memory.read(block, there.start, there.stop) for block, there, _ in self._spans(blocks, start, end)
        )

    def write(self, blocks: np.ndarray, start: int, data: bytes | memoryview) -> None:
        """See `BlockBytes.write`."""
        source = memoryview(data)
        for block, there, here in self._spans(blocks, start, start + len(data)):
            self.memory.write(block, there.start, source[here])

    def _placed(self) -> Iterator[tuple[range, int]]:
        """Yields each range, and the place of its first byte in a block of these."""
        first = 0
        for own in self.ranges:
            yield own, first
            first += len(own)

    def _spans(self, blocks: np.ndarray, start: int, end: int) -> Iterator[tuple[np.ndarray, range, slice]]:
        """Yields, for each range of each block of bytes `start` to `end`, the block, its bytes and their slice."""
        for index in range(start // self.block_bytes, -(-end // self.block_bytes)):
            for own, place in self._placed():
                first = index * self.block_bytes + place
                begins, ends = max(first, start), min(first + len(own), end)
                if begins < ends:
                    shift = own.start - first
                    yield (
                        blocks[index : index + 1],
                        range(begins + shift, ends + shift),
                        slice(begins - start, ends - start),
                    )
