"""The worker's log of what its cache holds, by hash."""

import asyncio

from services.engine.prefix_cache import ROOT_NODE, NodeAdded, NodeEvicted
from services.prefix_index.memory import MemoryPrefixIndex
from services.protocol.block_hash import BlockHash
from services.protocol.messages import BlockEvents
from services.worker.block_log import BlockLog


async def test_a_block_that_comes_and_goes_in_one_message_is_gone_for_readers():
    published: list[tuple[list[BlockHash], list[BlockHash]]] = []
    log = BlockLog("fingerprint", lambda added, evicted: published.append((added, evicted)))
    log.append([NodeAdded(1, ROOT_NODE, b"a"), NodeAdded(2, ROOT_NODE, b"b"), NodeEvicted(2)])
    await asyncio.sleep(0)
    ((added, evicted),) = published
    index = MemoryPrefixIndex()
    index.apply(7, BlockEvents(sequence=2, snapshot=False, added=added, evicted=evicted))
    (kept,) = log.snapshot().added
    assert await index.depths([kept]) == {7: 1}
    assert await index.depths(evicted) == {}
