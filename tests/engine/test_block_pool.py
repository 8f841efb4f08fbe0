"""The pool and the trie together, against a plain model of what may be cached and what must not be lost."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.blocks.block_pool import BlockPool
from services.engine.blocks.prefix_cache import NO_BLOCK, PrefixCache
from services.protocol.contents import Contents

BLOCK_SIZE = 2


def make(num_blocks: int) -> tuple[PrefixCache, BlockPool]:
    cache = PrefixCache(num_blocks, BLOCK_SIZE)
    return cache, BlockPool(num_blocks, cache)


def array(blocks: list[int]) -> np.ndarray:
    return np.array(blocks, dtype=np.int32)


def fill(cache: PrefixCache, pool: BlockPool, token_ids: np.ndarray) -> list[int] | None:
    """Takes what is cached, allocates and enters the rest, as an admission does; None when there is no room."""
    match = cache.match(Contents(np.append(token_ids, 0).astype(np.int32)))
    pool.reference(match.blocks)
    fresh = pool.allocate(len(token_ids) // BLOCK_SIZE - len(match.blocks))
    if fresh is None:
        pool.free(match.blocks[::-1])
        return None
    blocks: list[int] = match.blocks.tolist() + fresh.tolist()
    at = len(match.blocks)
    enter(cache, blocks[at - 1] if at else NO_BLOCK, blocks[at:], token_ids[at * BLOCK_SIZE :], pending=True)
    for block in fresh.tolist():
        cache.make_ready(block)
    return blocks


def enter(cache: PrefixCache, parent: int, chain: list[int], token_ids: np.ndarray, *, pending: bool) -> dict[int, int]:
    """Enters a chain of blocks, the first of them below `parent`; returns its twins."""
    parents = [parent, *chain][: len(chain)]
    return cache.insert(parents, chain, token_ids.reshape(-1, BLOCK_SIZE), pending=pending)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 20)), min_size=1, max_size=60
    )
)
def test_any_sequence_of_admissions_and_releases_keeps_every_block_in_one_place(operations: list):
    cache, pool = make(12)
    running: list[list[int]] = []
    known: dict[int, bytes] = {}
    evicted = 0
    for operation in operations:
        if isinstance(operation, int):
            if running:
                pool.free(array(running.pop(operation % len(running)))[::-1])
        elif (blocks := fill(cache, pool, np.repeat(np.array(operation, dtype=np.int32), BLOCK_SIZE))) is not None:
            running.append(blocks)
        pool.check()
        cache.check()
        assert all(cache.contains(block) for blocks in running for block in blocks)
        events = cache.take_events()
        evicted += events.tokens.count(None)
        if None in events.tokens:
            assert pool._num_free == 0, "more was evicted than was needed"
        for node, parent, tokens in events:  # a parent is there before its children, and goes after them
            if tokens is not None:
                assert parent in known or parent == 0
                known[node] = tokens
            else:
                del known[node]
    assert len(known) == len(cache)
    assert pool.num_evicted == evicted


def test_all_or_none():
    _, pool = make(4)
    assert pool.allocate(5) is None
    assert pool.available == 4
    blocks = pool.allocate(4)
    assert blocks is not None
    assert sorted(blocks.tolist()) == [0, 1, 2, 3]
    assert pool.allocate(1) is None


def test_a_generation_is_raised_with_new_content_and_only_then():
    cache, pool = make(2)
    blocks = fill(cache, pool, np.array([7, 7], dtype=np.int32))
    assert blocks is not None
    (block,) = blocks
    generation = int(pool.generations[block])
    pool.reference(array(blocks))
    pool.free(array([block]))
    pool.free(array([block]))
    assert fill(cache, pool, np.array([7, 7], dtype=np.int32)) == [block]
    assert int(pool.generations[block]) == generation
    pool.free(array([block]))
    assert pool.allocate(2) is not None
    assert int(pool.generations[block]) == generation + 1


def test_the_least_recently_used_leaf_is_evicted_first():
    cache, pool = make(4)
    old, new = (np.array([token] * 4, dtype=np.int32) for token in (1, 2))
    for tokens in (old, new, old):
        blocks = fill(cache, pool, tokens)
        assert blocks is not None
        pool.free(array(blocks)[::-1])
    pool.allocate(1)
    assert len(cache.match(Contents(np.append(old, 0).astype(np.int32))).blocks) == 2
    assert len(cache.match(Contents(np.append(new, 0).astype(np.int32))).blocks) == 1


def test_a_parent_that_is_let_go_of_first_takes_what_is_below_it_out_of_the_cache():
    """Children that are held stay held, without their content being found; those that are not are free again."""
    cache, pool = make(4)
    tokens = np.array([1, 1, 2, 2, 3, 3, 0], dtype=np.int32)
    blocks = fill(cache, pool, tokens[:6])
    assert blocks is not None
    top, middle, bottom = blocks
    for block in (top, bottom, middle):
        pool.free(array([block]))
    pool.reference(array([middle]))
    assert cache.subtree(top) == [bottom, middle, top]
    assert cache.ancestors(bottom) == [middle, top]
    cache.take_events()
    assert pool.allocate(2) is not None
    pool.check()
    cache.check()
    assert len(cache.take_events()) == 3
    assert len(cache.match(Contents(tokens)).blocks) == 0
    assert pool.available == 1
    pool.free(array([middle]))
    assert pool.available == 2


def test_freeing_twice_is_caught():
    _, pool = make(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.free(blocks)
    with pytest.raises(AssertionError):
        pool.free(blocks)


def test_no_use_of_a_cached_prefix_stops_the_engine_for_long():
    """In 1,200 uses of 500 blocks, and 20,000 of one, in a pool of 50,000: 60 ms when the queue was tidied up at times.

    CPU time of this thread, so that other processes do not count.
    """
    num_blocks, length = 50_000, 500
    cache, pool = make(num_blocks)
    chains = []
    for number in range(num_blocks // length):
        blocks = fill(cache, pool, np.arange(length * BLOCK_SIZE, dtype=np.int32) + number * 10_000)
        assert blocks is not None
        chains.append(array(blocks))
        pool.free(chains[-1][::-1])
    rng = np.random.default_rng(1)
    took = []
    for use in range(21_200):
        chain = chains[rng.integers(len(chains))][: 1 if use % 106 >= 6 else length]
        began = time.thread_time()
        pool.reference(chain)
        pool.free(chain[::-1])
        took.append(time.thread_time() - began)
    assert max(took) < 0.02
    pool.check()


def test_a_lookup_tells_a_pending_block_from_a_missing_one():
    cache, pool = make(4)
    blocks = pool.allocate(2)
    assert blocks is not None
    first, second = blocks.tolist()
    tokens = np.array([1, 2, 3, 4, 5], dtype=np.int32)
    enter(cache, NO_BLOCK, [first, second], tokens[:4], pending=True)
    assert cache.match(Contents(tokens)).next_is_pending
    version = cache.version
    cache.make_ready(first)
    assert cache.version > version
    match = cache.match(Contents(tokens))
    assert (match.blocks.tolist(), match.next_is_pending) == ([first], True)
    cache.remove(second)
    assert not cache.match(Contents(tokens)).next_is_pending
    assert len(cache.match(Contents(tokens[:2])).blocks) == 0


def test_events_that_were_taken_do_not_change() -> None:
    """They are looked at on another thread, while this one goes on; also when there were none."""
    cache, pool = make(4)
    taken = cache.take_events()
    fill(cache, pool, np.arange(4, dtype=np.int32))
    assert len(taken) == 0
    assert len(cache.take_events()) == 2


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_lookup_finds_what_a_walk_block_by_block_finds(data: st.DataObject):
    """Long chains that leave one another at any depth, some of them pending from some block on."""
    cache = PrefixCache(2000, BLOCK_SIZE)
    texts: list[list[int]] = []
    known: dict[tuple[int, ...], tuple[int, bool]] = {}  # by the tokens up to its end: block, pending
    fresh = iter(range(2000))
    for _ in range(data.draw(st.integers(1, 6))):
        stem = data.draw(st.sampled_from(texts)) if texts else []
        text = stem[: data.draw(st.integers(0, len(stem)))] + [data.draw(st.integers(0, 2))] * data.draw(
            st.integers(1, 150)
        )
        texts.append(text)
        pending_from = data.draw(st.integers(0, 200))
        parent, is_pending = NO_BLOCK, False
        for end in range(BLOCK_SIZE, len(text) + 1, BLOCK_SIZE):
            path = tuple(text[:end])
            if path not in known:
                is_pending |= end // BLOCK_SIZE > pending_from
                block = next(fresh)
                enter(cache, parent, [block], array(text[end - BLOCK_SIZE : end]), pending=is_pending)
                known[path] = (block, is_pending)
            parent, is_pending = known[path]
    cache.check()
    for text in texts:
        wanted = text[: data.draw(st.integers(0, len(text)))] + data.draw(st.lists(st.integers(0, 2), max_size=9)) + [0]
        walked, is_pending = [], False
        for end in range(BLOCK_SIZE, len(wanted), BLOCK_SIZE):
            if tuple(wanted[:end]) not in known:
                break
            block, is_pending = known[tuple(wanted[:end])]
            if is_pending:
                break
            walked.append(block)
        match = cache.match(Contents(array(wanted)))
        assert (match.blocks.tolist(), match.next_is_pending) == (walked, is_pending)
