"""Sequences whose namespaces or media differ share no block from there on, whatever their token ids are."""

import random
from typing import Any

import numpy as np
import pytest

from services.engine.blocks.prefix_cache import NO_BLOCK, PrefixCache
from services.engine.sequences.batch_state import Phase
from services.protocol.block_hash import BlockHash, block_names, child_hash, root_hash
from services.protocol.contents import COMMON, Contents, Media
from tests.engine.fuzz import Traffic
from tests.engine.harness import Driven, make_engine, reference

PROMPT = list(range(10, 22))  # blocks of 4


def cached(driven: Driven, prompt: list[int], **fields: Any) -> int:
    handle = driven.submit(prompt, 1, **fields)
    driven.run()
    return driven.cached[handle]


def image(digest: bytes, start: int, length: int = 2) -> tuple[Media, ...]:
    return (Media(start, length, digest),)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_is_cached_for_its_own_adapter_and_salt(depth: int):
    driven = make_engine(depth=depth)
    for namespace in ({}, {"adapter": "a"}, {"salt": "a"}, {"salt": "a", "adapter": "a"}, {"adapter": "b"}):
        assert [cached(driven, PROMPT, **namespace) for _ in range(2)] == [0, 8]
    driven.assert_baseline()


@pytest.mark.parametrize("depth", [0, 1])
def test_prompts_share_blocks_up_to_the_one_where_their_media_differ(depth: int):
    driven = make_engine(depth=depth)
    assert cached(driven, PROMPT, media=image(b"a", 6)) == 0
    assert cached(driven, PROMPT, media=image(b"a", 6)) == 8
    assert cached(driven, PROMPT, media=image(b"b", 6)) == 4
    assert cached(driven, PROMPT) == 4
    assert cached(driven, PROMPT, media=image(b"a", 0)) == 0
    assert cached(driven, PROMPT, media=image(b"a", 6)) == 8
    driven.assert_baseline()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_block_in_which_media_begin_and_that_an_answer_fills_is_of_these_media(depth: int):
    driven, prompt = make_engine(depth=depth), PROMPT[:10]
    first = driven.submit(prompt, 9, media=image(b"a", 9, 1))
    driven.run()
    assert driven.tokens[first] == reference(prompt, 9)
    longer = prompt + driven.tokens[first]
    assert cached(driven, longer, media=image(b"b", 9, 1)) == 8
    assert cached(driven, longer) == 8
    assert cached(driven, longer, media=image(b"a", 9, 1)) == 16
    driven.assert_baseline()


@pytest.mark.long
def test_no_block_is_shared_across_names_in_random_traffic(monkeypatch: pytest.MonkeyPatch):
    """Through admission, preemption, choices, handoffs and eviction: after each step, every block of a sequence that
    is in the trie has the name that the sequence's own namespace and contents give it.
    """
    chance, submit, step = random.Random(1), Driven.submit, Driven.step
    num_marked = 0

    def submit_named(driven: Driven, prompt: list[int], max_tokens: int, **fields: Any) -> int:
        start = chance.randrange(len(prompt))
        media = image(chance.choice([b"a", b"b"]), start, chance.randint(1, len(prompt) - start))
        drawn = {"adapter": chance.choice(["", "", "a"]), "media": chance.choice([(), media])}
        return submit(driven, prompt, max_tokens, **{**drawn, **fields})

    def step_checked(driven: Driven) -> bool:
        nonlocal num_marked
        stepped = step(driven)
        batch, cache = driven.engine.sequences.batch, driven.engine.sequences.pool.cache
        for slot in np.flatnonzero(batch.phase != Phase.FREE).tolist():
            capsule = batch.request(slot).capsule
            contents = Contents(batch.known_tokens(slot), capsule.media)
            names = block_names("", capsule.namespace, contents, batch.block_size)
            for index, block in enumerate(batch.table(slot).tolist(), start=int(batch.num_freed[slot])):
                if cache.is_node[block]:
                    assert name_of(cache, block) == names[index]
                    num_marked += bool(capsule.media) and index >= capsule.media[0].start // batch.block_size
        return stepped

    monkeypatch.setattr(Driven, "submit", submit_named)
    monkeypatch.setattr(Driven, "step", step_checked)
    for seed in range(60):
        Traffic(seed).run()
    assert num_marked > 1000


def name_of(cache: PrefixCache, block: int) -> BlockHash:
    """The name of a cached block, by what the trie has of it and of the blocks above it."""
    chain = [*cache.ancestors(block)[::-1], block]
    name = root_hash("", cache._namespaces.get(chain[0], COMMON))
    for each in chain:
        assert (each in cache._namespaces) <= (cache._parent[each] == NO_BLOCK)
        name = child_hash(name, cache._content[each].tobytes(), cache._marks.get(each, b""))
    return name
