"""Pages of a pool are there before they are used, and not long before."""

import asyncio
import mmap

import numpy as np

from kvtransfer.block_memory import HostBlocks
from services.engine.blocks.block_pool import BlockPool
from services.engine.blocks.prefix_cache import PrefixCache
from services.engine.kernels.cpu.huge_pages import allocate
from services.worker.pages_ahead import PagesAhead
from tests.gateway.dispatch_stack import eventually

BLOCK_BYTES, NUM_BLOCKS = 2 << 20, 40
AHEAD = 8


def resident_blocks(blocks: HostBlocks) -> int:
    """Blocks' worth of pages that the kernel has given, by /proc/self/pagemap: bit 63 of each page's 64."""
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(blocks.regions[0].address // mmap.PAGESIZE * 8)
        pages = np.frombuffer(file.read(NUM_BLOCKS * BLOCK_BYTES // mmap.PAGESIZE * 8), dtype="<u8")
    return int((pages >> np.uint64(63)).sum()) * mmap.PAGESIZE // BLOCK_BYTES


async def test_pages_are_ready_ahead_of_what_was_used():
    blocks = HostBlocks(allocate(NUM_BLOCKS * BLOCK_BYTES).reshape(NUM_BLOCKS, BLOCK_BYTES))
    pool = BlockPool(NUM_BLOCKS, PrefixCache(NUM_BLOCKS, 16))
    task = asyncio.create_task(PagesAhead(blocks, lambda: pool.num_used, AHEAD * BLOCK_BYTES).run())
    await eventually(lambda: resident_blocks(blocks) == AHEAD)
    first = pool.allocate(10)
    assert first is not None
    await eventually(lambda: resident_blocks(blocks) == 10 + AHEAD)
    pool.free(first)
    assert pool.allocate(12) is not None
    await eventually(lambda: resident_blocks(blocks) == 12 + AHEAD)
    assert not task.done()
    assert pool.allocate(25) is not None
    async with asyncio.timeout(60):
        await task
    assert resident_blocks(blocks) == NUM_BLOCKS
