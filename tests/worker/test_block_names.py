"""A worker's trie, its block log and a gateway name the same blocks alike, and different ones differently."""

import asyncio
from itertools import takewhile
from typing import Any, cast

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.ids import WorkerId
from services.config import WorkerRole
from services.engine.blocks.prefix_cache import NO_BLOCK, PrefixCache
from services.gateway.dispatch.fleet import Fleet, LiveWorker
from services.gateway.dispatch.links import WorkerLink
from services.prefix_index.memory import MemoryPrefixIndex
from services.protocol.block_hash import BlockHash, block_names
from services.protocol.capsule import Capsule
from services.protocol.contents import Contents, Media, Namespace
from services.protocol.frames import Load
from services.protocol.messages import BlockEvents
from services.protocol.sampling import SamplingParams
from services.worker.block_log import BlockLog
from tests.gateway.scripted_worker import worker_hello
from tests.protocol.drawn_contents import CONTENTS, NAMESPACES

FINGERPRINT = "f" * 32  # of `worker_hello`
WORKER = WorkerId(7)
Asked = tuple[Contents, Namespace]


class Cached:
    """A trie that admits contents as an engine does, and the log that follows it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.trie = PrefixCache(256, block_size)
        self.log = BlockLog(FINGERPRINT)
        self._fresh = iter(range(256))

    def enter(self, asked: Asked, draw: Any) -> None:
        """Enters what is not cached, in chunks, some of which are pending at first."""
        contents, namespace = asked
        size, marks = self.block_size, contents.marks(self.block_size)
        chain: list[int] = self.trie.match(contents, namespace).blocks.tolist()
        num_full = len(contents.token_ids) // size
        while (at := len(chain)) < num_full:
            end = draw(st.integers(at + 1, num_full))
            blocks, pending = [next(self._fresh) for _ in range(at, end)], draw(st.booleans())
            twins = self.trie.insert(
                [chain[-1] if chain else NO_BLOCK, *blocks[:-1]],
                blocks,
                contents.token_ids[at * size : end * size].reshape(-1, size),
                pending=pending,
                namespace=namespace,
                marks={index - at: mark for index, mark in marks.items() if index >= at},
            )
            assert set(twins) <= {num_full - 1 - at}, "a look-up leaves out the last block alone"
            for index, block in enumerate(blocks):
                if pending and index not in twins:
                    self.trie.make_ready(block)
                chain.append(twins.get(index, block))
            self.trie.check()

    def evict(self, draw: Any) -> None:
        """Removes some leaves."""
        for _ in range(draw(st.integers(0, 3))):
            nodes = np.flatnonzero(self.trie.is_node).tolist()
            leaves = [block for block in nodes if self.trie.subtree(block) == [block]]
            if leaves:
                self.trie.remove(draw(st.sampled_from(leaves)))
        self.trie.check()

    async def logged(self) -> list[BlockHash]:
        """The names of all cached blocks, as the worker tells them."""
        self.log.append(self.trie.take_events())
        while not self.log.idle:
            await asyncio.sleep(0)
        return self.log.cached()


def live_worker(block_size: int) -> LiveWorker:
    hello = worker_hello(WorkerRole.DECODE, WORKER, fingerprint=FINGERPRINT, block_size=block_size)
    return LiveWorker(WORKER, cast(WorkerLink, None), hello, Load())


def and_a_token(contents: Contents) -> Contents:
    """With one more, since the last token is never a hit."""
    return contents._replace(token_ids=np.append(contents.token_ids, np.int32(5)).astype(np.int32))


def capsule_of(contents: Contents, namespace: Namespace) -> Capsule:
    num_prompt, params = len(contents.token_ids), SamplingParams(1)
    salt, adapter = namespace.salt, namespace.adapter
    capsule = Capsule(contents.token_ids, num_prompt, params, salt, adapter=adapter, media=contents.media)
    assert capsule.namespace == namespace
    return capsule


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(CONTENTS, NAMESPACES), min_size=1, max_size=6), st.integers(1, 3), st.data())
def test_what_a_worker_finds_is_what_it_tells_and_what_a_gateway_looks_for(
    asked: list[Asked], block_size: int, data: st.DataObject
):
    asyncio.run(_compare(asked, block_size, data.draw))


async def _compare(asked: list[Asked], block_size: int, draw: Any) -> None:
    cached, index = Cached(block_size), MemoryPrefixIndex()
    fleet = Fleet(index)
    fleet.add(live_worker(block_size))
    for each in asked:
        cached.enter(each, draw)
    entered = {
        name for contents, namespace in asked for name in block_names(FINGERPRINT, namespace, contents, block_size)
    }
    assert sorted(await cached.logged()) == sorted(entered)
    cached.evict(draw)
    known = await cached.logged()
    assert len(set(known)) == len(known) == len(cached.trie)
    index.apply(WORKER, BlockEvents(1, True, known, []))
    for contents in (and_a_token(contents) for contents, _ in asked):
        for _, namespace in asked:
            names = block_names(FINGERPRINT, namespace, contents, block_size)
            depth = len(list(takewhile(set(known).__contains__, names)))
            assert len(cached.trie.match(contents, namespace).blocks) == depth
            prefix = await fleet.look_up(capsule_of(contents, namespace))
            assert prefix.depths.get(WORKER, 0) == depth
            assert list(prefix.chains.values()) == [names]


async def test_long_chains_that_differ_in_media_alone_part_where_these_begin():
    """Long enough for a look-up to follow many blocks at once."""
    cached, token_ids = Cached(1), np.zeros(60, np.int32)
    plain, image = Contents(token_ids), Contents(token_ids, (Media(40, 3, b"image"),))
    for contents in (plain, image):
        cached.enter((contents, Namespace()), lambda strategy: 60 if strategy is not None else None)
    other = image._replace(media=(Media(40, 3, b"other"),))
    later = image._replace(media=(Media(41, 3, b"image"),))
    found = [len(cached.trie.match(each).blocks) for each in map(and_a_token, (plain, image, other, later))]
    assert found == [60, 60, 40, 41]
    assert len(await cached.logged()) == 80
