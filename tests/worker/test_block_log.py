"""The worker's log of what its cache holds, by hash."""

import asyncio

import numpy as np

from kvtransfer.ids import WorkerId
from services.engine.blocks.prefix_cache import ROOT_NODE, CacheEvents
from services.prefix_index.memory import MemoryPrefixIndex
from services.protocol.block_hash import BlockHash, block_hashes, root_hash
from services.protocol.contents import Namespace
from services.protocol.messages import BlockEvents
from services.worker.block_log import BlockLog


async def test_a_block_that_comes_and_goes_in_one_message_is_gone_for_readers():
    published: list[tuple[list[BlockHash], list[BlockHash]]] = []
    log = BlockLog("fingerprint")
    log.subscribe(lambda added, evicted: published.append((list(added), list(evicted))))
    events = CacheEvents()
    events.added(1, ROOT_NODE, b"a")
    events.added(2, ROOT_NODE, b"b")
    events.evicted(2)
    log.append(events)
    await asyncio.sleep(0)
    ((added, evicted),) = published
    index = MemoryPrefixIndex()
    index.apply(WorkerId(7), BlockEvents(sequence=2, snapshot=False, added=added, evicted=evicted))
    (kept,) = log.cached()
    assert await index.depths([kept]) == {7: 1}
    assert await index.depths(evicted) == {}


async def test_blocks_below_a_salt_have_hashes_of_their_own():
    log = BlockLog("fingerprint")
    tokens = np.arange(2, dtype=np.int32)
    events = CacheEvents(namespaces={1: Namespace("salt")})
    for node, parent, at in ((1, ROOT_NODE, 0), (2, 1, 1), (3, ROOT_NODE, 0)):
        events.added(node, parent, tokens[at].tobytes())
    log.append(events)
    await asyncio.sleep(0)
    salted = block_hashes(root_hash("fingerprint", Namespace("salt")), tokens, block_size=1)
    assert log.cached() == [*salted, block_hashes(root_hash("fingerprint"), tokens, block_size=1)[0]]


async def test_each_block_is_told_with_the_first_of_its_chain():
    firsts: dict[BlockHash, BlockHash] = {}
    log = BlockLog("fingerprint")
    log.subscribe(lambda added, evicted: firsts.update({**added, **evicted}))
    tokens = np.arange(4, dtype=np.int32)
    chain = block_hashes(root_hash("fingerprint"), tokens, block_size=1)
    other = block_hashes(root_hash("fingerprint"), tokens[2:], block_size=1)
    events = CacheEvents()
    for at in range(4):
        events.added(at + 1, at, tokens[at].tobytes())
    events.added(9, ROOT_NODE, tokens[2].tobytes())
    events.evicted(4)
    log.append(events)
    await asyncio.sleep(0)
    assert firsts == dict.fromkeys(chain, chain[0]) | {other[0]: other[0]}
