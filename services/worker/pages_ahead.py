"""Pages of the KV pool, asked of the kernel ahead of their first use.

A pool of the default size may never be used in full, so a worker does not take it at the start (`--kv-memory` does).
Then the first use of each page would wait for the kernel, and on a virtual machine for its host as well.
"""

import asyncio
from collections.abc import Callable

from kvtransfer.block_memory import BlockMemory
from services.engine.runner.memory import populate

AHEAD_BYTES = 256 << 20
_AT_ONCE = 4 << 20  # the kernel keeps this process from mapping other memory meanwhile
_LOOK_S = 0.25


class PagesAhead:
    """Keeps some pages ready beyond those that were used. num_used: returns the blocks that were, from block 0 on."""

    def __init__(self, blocks: BlockMemory, num_used: Callable[[], int], ahead_bytes: int = AHEAD_BYTES) -> None:
        self._blocks = blocks
        self._num_used = num_used
        self._ahead_bytes = ahead_bytes
        self._ready = 0  # bytes, from block 0 on

    async def run(self) -> None:
        """Asks for pages until all are there, or none is given: by an older kernel, or where the pool is a GPU's."""
        block_bytes, size = self._blocks.block_bytes, self._blocks.num_blocks * self._blocks.block_bytes
        while self._ready < size:
            wanted = min(self._num_used() * block_bytes + self._ahead_bytes, size)
            if self._ready >= wanted:
                await asyncio.sleep(_LOOK_S)
                continue
            end = min(self._ready + _AT_ONCE, wanted)
            if not await asyncio.to_thread(populate, self._blocks, self._ready, end):
                return
            self._ready = end
