"""A decode worker that damages the KV of some blocks after it has read and checked them, as no worker does."""

import numpy as np

from kvtransfer.ids import WorkerId
from kvtransfer.transports import nixl
from kvtransfer.transports.base import BlockRead, Memory, ReadEnd


class DamagingTransport(nixl.NixlTransport):
    """Reports a read as it ended, and then blocks [first, end) of it hold what the blocks after them hold."""

    first, end = 0, 0

    def __init__(self, worker_id: WorkerId, memory: Memory, part: int = 0) -> None:
        super().__init__(worker_id, memory, part)
        self._memory = memory
        self._destinations: dict[int, np.ndarray] = {}

    def post(self, read: BlockRead) -> None:
        self._destinations[read.read_id] = read.destination
        super().post(read)

    def poll(self) -> list[ReadEnd]:
        ends = super().poll()
        for ended in ends:
            self._damage(self._destinations.pop(ended.read_id))
        return ends

    def _damage(self, blocks: np.ndarray) -> None:
        num, pool = self.end - self.first, self._memory.blocks
        if len(blocks) >= self.end + num:
            others = pool.read(blocks[self.end : self.end + num], 0, num * pool.block_bytes)
            pool.write(blocks[self.first : self.end], 0, others)


def corrupt_reads(first: int, end: int) -> None:
    """From now on, the NIXL transports of this process damage what they read."""
    DamagingTransport.first, DamagingTransport.end = first, end
    nixl.NixlTransport = DamagingTransport  # type: ignore[misc]
