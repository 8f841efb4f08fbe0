"""Prefixes of different salts never meet, in the trie and in the engine."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.blocks.prefix_cache import NO_BLOCK, PrefixCache
from services.engine.sequences.batch_state import Phase
from services.protocol.contents import COMMON, Contents, Namespace
from tests.engine.fuzz import Traffic
from tests.engine.harness import Driven, make_engine, reference

PROMPT = list(range(10, 22))
SALTS = ["", "a", "b"]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_is_cached_for_its_own_salt_alone(depth: int):
    driven = make_engine(depth=depth)
    expected = reference(PROMPT, 6)
    for salt in SALTS:
        for cached in (0, 8):  # of 12 tokens in blocks of 4; the last token is always computed
            handle = driven.submit(PROMPT, 6, salt=salt)
            driven.run()
            assert driven.cached[handle] == cached
            assert driven.tokens[handle] == expected
    driven.assert_baseline()


def test_what_was_generated_is_cached_under_the_salt_too():
    driven = make_engine()
    first = driven.submit(PROMPT, 9, salt="a")
    driven.run()
    longer = PROMPT + driven.tokens[first]
    for salt, cached in (("b", 0), ("a", 20)):
        handle = driven.submit(longer, 1, salt=salt)
        driven.run()
        assert driven.cached[handle] == cached


def test_choices_and_preempted_sequences_keep_their_salt():
    driven = make_engine(num_blocks=14, max_num_seqs=8)
    handles = [driven.submit(PROMPT, 12, salt=salt) for salt in SALTS]
    driven.run()
    assert all(driven.tokens[handle] == reference(PROMPT, 12) for handle in handles)
    group = driven.submit(PROMPT, 3, salt="c", seeds=(1, 2))
    driven.run()
    assert driven.cached[group + 1] == 0
    driven.assert_baseline()


@pytest.mark.long
def test_no_block_is_shared_across_salts_in_random_traffic(monkeypatch: pytest.MonkeyPatch):
    """Through admission, preemption, choices, handoffs and eviction: after each step, the blocks of a sequence that are
    in the trie are below its own salt, and no other salt's sequence has them.
    """
    random_salts, submit, step = random.Random(1), Driven.submit, Driven.step
    num_salted = 0

    def submit_salted(driven: Driven, prompt: list[int], max_tokens: int, **fields: Any) -> int:
        return submit(driven, prompt, max_tokens, **{"salt": random_salts.choice(SALTS), **fields})

    def step_checked(driven: Driven) -> bool:
        nonlocal num_salted
        stepped = step(driven)
        batch, cache = driven.engine.sequences.batch, driven.engine.sequences.pool.cache
        salts: dict[int, str] = {}
        for slot in np.flatnonzero(batch.phase != Phase.FREE).tolist():
            salt = batch.request(slot).capsule.cache_salt
            for block in batch.table(slot).tolist():
                assert salts.setdefault(block, salt) == salt
                if cache.is_node[block]:
                    assert salt_above(cache, block) == salt
                    num_salted += bool(salt)
        return stepped

    monkeypatch.setattr(Driven, "submit", submit_salted)
    monkeypatch.setattr(Driven, "step", step_checked)
    for seed in range(60):
        Traffic(seed).run()
    assert num_salted > 1000


def salt_above(cache: PrefixCache, block: int) -> str:
    """The salt of the first block of a cached block's prefix."""
    while cache._parent[block] != NO_BLOCK:
        block = int(cache._parent[block])
    return cache._namespaces.get(block, COMMON).salt


@given(st.lists(st.tuples(st.sampled_from(SALTS), st.sampled_from([(1, 2), (1, 3), (4,)])), max_size=12))
def test_a_trie_of_salts_is_one_trie_for_each(chains: list[tuple[str, tuple[int, ...]]]):
    """With blocks of one token: what one salt's prompts enter, the others do not find."""
    trie, block = PrefixCache(64, 1), 0
    known: dict[str, set[tuple[int, ...]]] = {salt: set() for salt in SALTS}
    firsts: dict[tuple[str, tuple[int, ...]], int] = {}
    for salt, chain in chains:
        parent = NO_BLOCK
        for end in range(1, len(chain) + 1):
            prefix = chain[:end]
            if prefix not in known[salt]:
                tokens = np.array([[prefix[-1]]], dtype=np.int32)
                assert trie.insert([parent], [block], tokens, pending=False, namespace=Namespace(salt)) == {}
                known[salt].add(prefix)
                firsts[salt, prefix] = block
                block += 1
            parent = firsts[salt, prefix]
        trie.check()
    for salt in SALTS:
        for chain in ((1, 2), (1, 3), (4,)):
            found = trie.match(Contents(np.array([*chain, 0], dtype=np.int32)), Namespace(salt)).blocks.tolist()
            depth = max((end for end in range(len(chain) + 1) if chain[:end] in known[salt] or not end), default=0)
            assert found == [firsts[salt, chain[:end]] for end in range(1, depth + 1)]
    for salt, prefix in sorted(firsts, key=lambda key: -len(key[1])):
        trie.remove(firsts[salt, prefix])
        trie.check()
    assert len(trie) == 0
