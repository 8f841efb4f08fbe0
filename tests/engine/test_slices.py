"""Models whose layers have different windows: each group frees what its window has passed, and no token tells."""

import numpy as np
import pytest

from kvtransfer.ids import AttemptId, GatewayId
from kvtransfer.layer_groups import LayerGroups
from services.engine.blocks.sliced_pool import SlicedPool
from services.engine.schedulers.prefill import PrefillScheduler
from services.engine.sequences.batch_state import Phase
from services.engine.sequences.request import Kind
from tests.engine.fuzz import Oracle
from tests.engine.harness import GATEWAY, Driven, make_engine

BLOCK_SIZE = 4
NUM_LATER = 2  # slices of the group with a window


def groups_of(window: int) -> LayerGroups:
    return LayerGroups((None, window), (((0,),), ((1,), (2,))))


def oracle(prompt: list[int], num_tokens: int, window: int) -> list[int]:
    says, tokens = Oracle(1000, (None, window, window), 1 << 20), list(prompt)
    for _ in range(num_tokens):
        tokens.append(says.follower(tokens))
    return tokens[len(prompt) :]


def held(driven: Driven) -> int:
    """Slices that somebody needs."""
    return driven.engine.runner.num_blocks - driven.engine.sequences.pool.available


def in_window(window: int) -> int:
    return -(-window // BLOCK_SIZE) + 1


def has(driven: Driven) -> np.ndarray:
    """Of which nodes the slices with a window are there, and the number of all nodes."""
    pool = driven.engine.sequences.pool
    assert isinstance(pool, SlicedPool)
    there: np.ndarray = pool.parts.has[0] & pool.cache.is_node
    return there


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("window", [1, 4, 5, 10, 33])
def test_a_long_generation_holds_the_slices_that_its_windows_see(window: int, depth: int) -> None:
    driven = make_engine(num_blocks=400, groups=groups_of(window), depth=depth)
    prompt = list(range(100, 150))
    handle = driven.submit(prompt, 150)
    while driven.step():
        if (driven.engine.sequences.batch.phase == Phase.DECODE).any() and len(driven.tokens[handle]) > 2:
            num_blocks = -(-(50 + len(driven.tokens[handle]) + 1 + depth) // BLOCK_SIZE)
            assert held(driven) <= num_blocks + NUM_LATER * (in_window(window) + depth)
    assert driven.tokens[handle] == oracle(prompt, 150, window)
    driven.assert_baseline()


def test_a_prompt_frees_slices_chunk_by_chunk_and_hands_off_what_the_next_token_sees() -> None:
    window = 9
    driven = make_engine(num_blocks=400, groups=groups_of(window), scheduler=PrefillScheduler(16))
    handle = driven.submit(list(range(100)), 5, kind=Kind.PRODUCE)
    driven.step()
    before = held(driven)
    assert before == 25 * (1 + NUM_LATER) - NUM_LATER * (16 - window + 1) // BLOCK_SIZE
    while driven.step():
        assert held(driven) < before
        before = held(driven)
    seen = 25 - (100 - window + 1) // BLOCK_SIZE
    assert held(driven) == sum(len(part.blocks) for part in driven.announced) == 25 + NUM_LATER * seen
    blocks = [block for part in driven.announced for block in part.blocks]
    assert len(set(blocks)) == len(blocks)
    assert [part.first_index for part in driven.announced] == [0, 4, 8, 12, 16, 20, 20 + 4 + NUM_LATER]
    driven.engine.sequences.free(AttemptId(GatewayId(GATEWAY), handle))
    driven.assert_baseline()


def test_the_next_turn_is_a_hit_while_the_slices_that_it_sees_are_there() -> None:
    driven = make_engine(num_blocks=400, groups=groups_of(10))
    prompt = list(range(30))
    first = driven.submit(prompt, 60)
    driven.run()
    turn = prompt + driven.tokens[first] + [1, 2, 3, 4, 5]
    second = driven.submit(turn, 20)
    driven.run()
    assert driven.cached[second] == (30 + 60 - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert driven.tokens[second] == oracle(turn, 20, 10)


def test_slices_behind_a_window_are_evicted_first_and_a_prompt_that_needs_them_brings_them_back() -> None:
    window = 9
    driven = make_engine(num_blocks=110, groups=groups_of(window), max_model_len=140)
    prompt = list(range(100))
    first = driven.submit(prompt, 4)
    driven.run()
    driven.submit(list(range(500, 548)), 1)  # takes room of slices that nobody sees
    driven.run()
    lost = ~has(driven)[driven.engine.sequences.pool.cache.is_node]
    assert lost.any()

    longer = prompt + driven.tokens[first] + [7]
    second = driven.submit(longer, 2)
    driven.run()
    assert driven.cached[second] == 100, "all that the next token sees is there"
    assert driven.tokens[second] == oracle(longer, 2, window)

    middle = prompt[:50] + [7] * 5
    third, num_nodes = driven.submit(middle, 4), len(driven.engine.sequences.pool.cache)
    driven.run()
    assert driven.cached[third] < 48
    assert driven.tokens[third] == oracle(middle, 4, window)
    assert len(driven.engine.sequences.pool.cache) <= num_nodes + 2, "blocks that the cache has are not there twice"
    fourth = driven.submit([*middle[:-1], 8], 4)
    driven.run()
    assert driven.cached[fourth] == 52
    assert driven.tokens[fourth] == oracle([*middle[:-1], 8], 4, window)
    driven.assert_baseline()


def test_choices_share_the_slices_of_their_prompt() -> None:
    window = 6
    driven = make_engine(num_blocks=400, groups=groups_of(window))
    prompt = list(range(41))
    handle = driven.submit(prompt, 12, seeds=(1, 2, 3))
    driven.run()
    for choice in (1, 2, 3):
        assert driven.tokens[handle + choice] == oracle(prompt, 12, window)
    driven.assert_baseline()


def test_a_preempted_sequence_is_computed_again() -> None:
    window = 6
    driven = make_engine(num_blocks=60, groups=groups_of(window), max_model_len=60)
    prompts = [list(range(start, start + 20)) for start in (0, 200, 400)]
    handles = [driven.submit(prompt, 35) for prompt in prompts]
    driven.run()
    for handle, prompt in zip(handles, prompts, strict=True):
        assert driven.tokens[handle] == oracle(prompt, 35, window)
    driven.assert_baseline()


def test_a_received_prompt_needs_the_slices_that_its_next_token_sees() -> None:
    window = 9
    driven = make_engine(num_blocks=400, groups=groups_of(window))
    handle = driven.submit(list(range(100)), 5, kind=Kind.CONSUME)
    id = AttemptId(GatewayId(GATEWAY), handle)
    driven.engine.sequences.requests.enqueue(id)
    driven.engine.admit(0.0)
    (reserved,) = driven.engine.take_outputs().reserved
    seen = 26 - (100 - window + 1) // BLOCK_SIZE  # with the block of the next position
    assert len(reserved.blocks) == held(driven) == 26 + NUM_LATER * seen
    assert reserved.num_cached == 0
    driven.engine.sequences.free(id, tuple(reserved.blocks[20:27]))
    driven.engine.sequences.check()
    assert driven.engine.sequences.tables.num_quarantined == 7
    driven.engine.sequences.free_quarantined(tuple(reserved.blocks[20:24]))
    driven.engine.sequences.check()
    driven.engine.sequences.free_quarantined(tuple(reserved.blocks[24:27]))
    driven.assert_baseline()
