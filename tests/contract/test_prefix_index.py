"""One suite over every implementation of PrefixIndex."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.prefix_index.base import PrefixIndex
from services.prefix_index.memory import MemoryPrefixIndex
from services.protocol.block_hash import BlockHash, block_hashes, root_hash
from services.protocol.messages import BlockEvents

ALICE, BOB = 11, 22


@pytest.fixture(params=[MemoryPrefixIndex])
def index(request: pytest.FixtureRequest) -> PrefixIndex:
    made: PrefixIndex = request.param()
    return made


def chain_of(length: int, first_token: int = 0) -> list[BlockHash]:
    return block_hashes(root_hash("model"), np.arange(first_token, first_token + 4 * length, dtype=np.int32), 4)


def snapshot(hashes: list[BlockHash]) -> BlockEvents:
    return BlockEvents(0, True, hashes, [])


def change(added: list[BlockHash], evicted: list[BlockHash]) -> BlockEvents:
    return BlockEvents(1, False, added, evicted)


async def test_an_empty_index_knows_nobody(index: PrefixIndex):
    assert await index.depths(chain_of(3)) == {}
    assert await index.depths([]) == {}


@pytest.mark.parametrize("held", range(1, 20))
async def test_depth_is_the_length_of_the_held_prefix(index: PrefixIndex, held: int):
    chain = chain_of(19)
    index.apply(ALICE, snapshot(chain[:held]))
    assert await index.depths(chain) == {ALICE: held}


async def test_a_longer_cached_chain_than_the_prompt_counts_only_as_far_as_the_prompt(index: PrefixIndex):
    index.apply(ALICE, snapshot(chain_of(9)))
    assert await index.depths(chain_of(4)) == {ALICE: 4}


async def test_another_prompt_is_no_hit(index: PrefixIndex):
    index.apply(ALICE, snapshot(chain_of(9)))
    assert await index.depths(chain_of(9, first_token=1)) == {}


async def test_each_worker_has_its_own_depth(index: PrefixIndex):
    chain = chain_of(8)
    index.apply(ALICE, snapshot(chain[:2]))
    index.apply(BOB, snapshot(chain[:7]))
    assert await index.depths(chain) == {ALICE: 2, BOB: 7}


async def test_added_and_evicted_blocks_change_the_depth(index: PrefixIndex):
    chain = chain_of(8)
    index.apply(ALICE, snapshot(chain[:4]))
    index.apply(ALICE, change(chain[4:], []))
    assert await index.depths(chain) == {ALICE: 8}
    index.apply(ALICE, change([], chain[5:]))
    assert await index.depths(chain) == {ALICE: 5}


async def test_a_block_evicted_and_computed_again_within_one_message_is_held(index: PrefixIndex):
    chain = chain_of(2)
    index.apply(ALICE, snapshot(chain))
    index.apply(ALICE, change([chain[1]], [chain[1]]))
    assert await index.depths(chain) == {ALICE: 2}


async def test_a_snapshot_replaces_what_was_known(index: PrefixIndex):
    chain = chain_of(8)
    index.apply(ALICE, snapshot(chain))
    index.apply(ALICE, snapshot(chain[:1]))
    assert await index.depths(chain) == {ALICE: 1}


async def test_a_dropped_worker_is_gone_and_the_others_stay(index: PrefixIndex):
    chain = chain_of(3)
    index.apply(ALICE, snapshot(chain))
    index.apply(BOB, snapshot(chain))
    index.drop(ALICE)
    index.drop(ALICE)
    assert await index.depths(chain) == {BOB: 3}


@settings(deadline=None)
@given(st.integers(0, 70), st.integers(0, 70))
async def test_depth_is_exact_for_any_lengths(length: int, held: int):
    chain = chain_of(70)
    index = MemoryPrefixIndex()
    index.apply(ALICE, snapshot(chain[:held]))
    expected = min(length, held)
    assert await index.depths(chain[:length]) == ({ALICE: expected} if expected else {})


def test_a_block_of_a_worker_costs_at_most_200_bytes():
    """Measured with the hashes' own memory, where the table is fullest and where it has just grown."""
    index = MemoryPrefixIndex()
    raw = np.random.default_rng(0).bytes(16 * 50_000)
    tracemalloc.start()
    try:
        for start in range(0, 50_000, 1_000):
            added = [BlockHash(raw[16 * at : 16 * at + 16]) for at in range(start, start + 1_000)]
            index.apply(ALICE, change(added, []))
            if start >= 10_000:
                del added
                assert tracemalloc.get_traced_memory()[0] / (start + 1_000) < 200
    finally:
        tracemalloc.stop()
