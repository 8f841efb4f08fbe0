"""Models whose attention has a window: blocks behind it are let go of, and no token tells."""

import random

import pytest

from services.engine.blocks.prefix_cache import CacheEvents
from services.engine.runner.simulated import SimulatedRunner
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.schedulers.prefill import PrefillScheduler
from services.engine.sequences.batch_state import Phase
from services.engine.sequences.request import Kind
from tests.engine.harness import Driven, make_engine
from tests.engine.stepping import run_greedy
from tests.seeds import first_of

BLOCK_SIZE = 4


def oracle(prompt: list[int], num_tokens: int, window: int) -> list[int]:
    """The runner alone, with nobody who would let go of a block."""
    (row,) = run_greedy(SimulatedRunner(100, BLOCK_SIZE, window=window), [prompt], num_tokens, chunk=1000)
    return row.generated


def blocks_held(driven: Driven) -> int:
    return driven.engine.runner.num_blocks - driven.engine.sequences.pool.available


@pytest.mark.parametrize("window", [1, 3, 4, 5, 10, 16, 33])
def test_a_long_generation_holds_the_blocks_of_its_window(window: int):
    driven = make_engine(window=window)
    prompt = list(range(100, 150))
    handle = driven.submit(prompt, 150)
    while driven.step():
        if (driven.engine.sequences.batch.phase == Phase.DECODE).any() and len(driven.tokens[handle]) > 1:
            assert blocks_held(driven) <= -(-window // BLOCK_SIZE) + 1
    assert driven.tokens[handle] == oracle(prompt, 150, window)
    driven.assert_baseline()


def test_the_next_turn_finds_what_was_let_go_of_while_nobody_needed_the_room():
    driven = make_engine(window=10)
    prompt = list(range(30))
    first = driven.submit(prompt, 60)
    driven.run()
    turn = prompt + driven.tokens[first] + [1, 2, 3, 4, 5]
    second = driven.submit(turn, 20)
    driven.run()
    assert driven.cached[second] == (30 + 60 - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert driven.tokens[second] == oracle(turn, 20, 10)


def test_a_finished_sequence_is_evicted_from_its_end():
    driven = make_engine(window=10, num_blocks=40, max_model_len=128)
    prompt = list(range(30))
    first = driven.submit(prompt, 60)
    driven.run()
    driven.submit(list(range(500, 580)), 1)
    driven.run()
    again = driven.submit(prompt + driven.tokens[first], 1)
    driven.run()
    assert driven.cached[again] == (40 - 20 - 1) * BLOCK_SIZE


def test_what_lies_below_a_block_that_was_given_away_is_found_by_nobody():
    """Be it held still, or generated later; what lies above it is."""
    driven = make_engine(window=10, num_blocks=30, max_model_len=100)
    prompt = list(range(40))
    first = driven.submit(prompt, 50)
    while len(driven.tokens.get(first, [])) < 10:
        driven.step()
    driven.submit(list(range(500, 590)), 1)
    driven.run()
    assert driven.tokens[first] == oracle(prompt, 50, 10)
    again = driven.submit(prompt + driven.tokens[first], 1)
    driven.run()
    assert driven.cached[again] == 12
    driven.assert_baseline()


def test_a_prompt_to_hand_off_keeps_all_its_blocks():
    driven = make_engine(window=5, scheduler=PrefillScheduler(8))
    driven.submit(list(range(40)), 5, kind=Kind.PRODUCE)
    driven.run()
    assert sum(len(part.blocks) for part in driven.announced) == 10
    assert blocks_held(driven) == 10


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", first_of(1, range(4)))
@pytest.mark.parametrize("window", [1, 4, 7, 12])
def test_no_schedule_changes_a_token(window: int, seed: int, depth: int):
    """Few blocks, shared prefixes, equal prompts, next turns; preempted, evicted, let go of, found again."""
    rng = random.Random(seed)
    driven = make_engine(
        window=window,
        num_blocks=24,
        max_model_len=80,
        max_num_seqs=6,
        scheduler=DecodeScheduler(rng.choice([12, 40]), prefill_chunk=rng.choice([3, 16])),
        depth=depth,
    )
    stems = [[rng.randrange(1000) for _ in range(rng.randint(1, 30))] for _ in range(3)]
    prompts: dict[int, list[int]] = {}
    known: dict[int, int] = {}
    for _ in range(12):
        for _ in range(rng.randint(0, 3)):
            stem = rng.choice(stems)
            prompt = stem + [rng.randrange(3) for _ in range(rng.randint(0, 4))]
            prompts[driven.submit(prompt, rng.randint(1, 40))] = prompt
        for _ in range(rng.randint(1, 40)):
            driven.step()
            follow(driven.engine.sequences.pool.cache.take_events(), known)
        if finished := [handle for handle in driven.finish if len(prompts[handle]) < 40]:
            handle = rng.choice(finished)
            stems.append((prompts[handle] + driven.tokens[handle])[:50])
    driven.run()
    driven.assert_baseline()
    for handle, prompt in prompts.items():
        assert driven.tokens[handle] == oracle(prompt, len(driven.tokens[handle]), window)
        assert driven.finish[handle]


def follow(events: CacheEvents, known: dict[int, int]) -> None:
    """What the outside is told of the cache: a parent is there before its children, and goes after them."""
    for node, parent, tokens in events:
        if tokens is not None:
            assert parent in known or parent == 0
            known[node] = parent
        else:
            del known[node]
            assert node not in known.values()
