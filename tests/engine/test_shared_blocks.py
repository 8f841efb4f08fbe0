"""Sequences that share blocks of the prefix trie, while others that compute or read the same content come and go.

The harness checks the trie and the pool after every step.
"""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from kvtransfer.ids import AttemptId, GatewayId
from kvtransfer.messages import FirstToken
from services.engine.runner.simulated import SimulatedRunner
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.sequences.batch_state import Phase
from services.engine.sequences.request import Kind
from tests.engine.harness import GATEWAY, Driven, make_engine, reference
from tests.seeds import first_of

WARM: dict[str, Any] = {"temperature": 1.0}
SEEDS = (3, 1, 4)


@cache
def says(prompt: tuple[int, ...], count: int, seed: int) -> list[int]:
    return reference(list(prompt), count, seed=seed, **WARM)


def id_of(handle: int) -> AttemptId:
    return AttemptId(GatewayId(GATEWAY), handle)


def blocks_of(driven: Driven, handle: int) -> list[int]:
    slot = driven.engine.sequences.requests.slot_of(id_of(handle))
    assert slot is not None
    return driven.engine.sequences.batch.blocks(slot)


def land(driven: Driven, handle: int, num_blocks: int) -> None:
    """The first so many blocks of a received prompt are here, after those that were here before."""
    sequences, runner = driven.engine.sequences, driven.engine.runner
    assert isinstance(runner, SimulatedRunner)
    slot = sequences.requests.slot_of(id_of(handle))
    assert slot is not None
    size = runner.layout.block_size
    first = int(sequences.batch.done[slot]) // size
    tokens = np.zeros(num_blocks * size)
    known = sequences.batch.known_tokens(slot)[: num_blocks * size]
    tokens[: len(known)] = known
    content = np.stack([tokens, np.arange(len(tokens))]).reshape(2, num_blocks, size).swapaxes(0, 1)
    runner._pool[blocks_of(driven, handle)[first:num_blocks]] = content[first:]
    driven.engine.arrived(id_of(handle), num_blocks)


def abort(driven: Driven, handle: int) -> None:
    driven.engine.sequences.free(id_of(handle))


def fail(driven: Driven, handle: int) -> None:
    """As a read fails whose end is unknown: its blocks stay out of use for a while."""
    blocks = tuple(blocks_of(driven, handle))
    driven.engine.sequences.free(id_of(handle), quarantined=blocks)
    driven.engine.sequences.free_quarantined(blocks[::2])


@pytest.mark.few(24)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("leave", [abort, fail])
@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("num_choices", [2, 3])
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_choices_share_a_block_that_a_lost_read_would_have_brought(
    num_blocks: int, num_choices: int, steps: int, leave: Callable[[Driven, int], None], depth: int
):
    """Its owner leaves before the choices fork, at that moment, or later; then they decode four blocks."""
    driven = make_engine(depth=depth, num_blocks=40, max_model_len=64)
    prompt = list(range(4 * num_blocks))
    read = driven.submit(prompt, 9, kind=Kind.CONSUME)
    driven.engine.sequences.requests.enqueue(id_of(read))
    driven.step()
    land(driven, read, num_blocks - 1)
    handle = driven.submit(prompt, 17, seeds=SEEDS[:num_choices], **WARM)
    for _ in range(steps):
        driven.step()
    leave(driven, read)
    driven.run()
    for choice, seed in enumerate(SEEDS[:num_choices], start=1):
        assert driven.tokens[handle + choice] == says(tuple(prompt), 17, seed)
    driven.engine.sequences.check()
    assert not driven.engine.sequences.requests.ids


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("leave", [abort, fail])
@pytest.mark.parametrize("steps", range(4))
def test_choices_share_a_block_that_another_prompt_began_to_compute(
    steps: int, leave: Callable[[Driven, int], None], depth: int
):
    driven = make_engine(depth=depth, scheduler=DecodeScheduler(2))
    prompt = list(range(8))
    other = driven.submit(prompt, 9)
    for _ in range(2 + depth):
        driven.step()
    handle = driven.submit(prompt, 17, seeds=SEEDS, **WARM)
    for _ in range(steps):
        driven.step()
    leave(driven, other)
    driven.run()
    for choice, seed in enumerate(SEEDS, start=1):
        assert driven.tokens[handle + choice] == says(tuple(prompt), 17, seed)


def test_a_handoff_does_not_wait_for_a_slower_one_of_the_same_prompt():
    """It waits as long as the other one has as many blocks announced, and shares what had arrived by then."""
    driven, prompt = make_engine(), list(range(14))
    requests, engine = driven.engine.sequences.requests, driven.engine
    slow, fast = (driven.submit(prompt, 3, kind=Kind.CONSUME) for _ in range(2))
    for handle in (slow, fast):
        requests.enqueue(id_of(handle), 1)
        driven.step()
    land(driven, slow, 1)
    driven.step()
    assert requests.slot_of(id_of(fast)) is None
    requests.enqueue(id_of(fast), 4)
    driven.step()
    assert blocks_of(driven, fast)[0] == blocks_of(driven, slow)[0]
    land(driven, fast, 4)
    tokens = reference(prompt, 3)
    engine.ready(id_of(fast), (FirstToken(fast, tokens[0], None),))
    driven.run()
    assert driven.tokens[fast] == tokens
    land(driven, slow, 4)
    engine.ready(id_of(slow), (FirstToken(slow, tokens[0], None),))
    driven.run()
    assert driven.tokens[slow] == tokens
    assert not requests.ids


def test_a_prompt_waits_for_blocks_that_are_announced_and_for_others_as_long_as_it_takes_to_compute_them():
    driven, prompt = make_engine(), list(range(14))
    requests = driven.engine.sequences.requests
    slow = driven.submit(prompt, 3, kind=Kind.CONSUME)
    requests.enqueue(id_of(slow), 1)
    driven.step()
    own = driven.submit(prompt, 3)
    driven.now += 60
    driven.step()
    assert requests.slot_of(id_of(own)) is None  # its first block is on its way
    land(driven, slow, 1)
    late = driven.submit(prompt, 3)
    driven.step()
    assert requests.slot_of(id_of(own)) is not None
    assert requests.slot_of(id_of(late)) is None
    assert blocks_of(driven, own)[0] == blocks_of(driven, slow)[0]
    driven.now += 10 / 2000
    driven.run()
    tokens = reference(prompt, 3)
    assert (driven.tokens[own], driven.tokens[late]) == (tokens, tokens)
    land(driven, slow, 4)
    driven.engine.ready(id_of(slow), (FirstToken(slow, tokens[0], None),))
    driven.run()
    assert driven.tokens[slow] == tokens
    assert not requests.ids


class Traffic:
    """Requests for prompts that mostly end at a block border, in an engine with few blocks of two tokens."""

    MAX_TOKENS = 9

    def __init__(self, seed: int, depth: int) -> None:
        self.rng = random.Random(seed)
        self.driven = make_engine(
            num_blocks=self.rng.choice([12, 24]),
            block_size=2,
            max_num_seqs=8,
            max_model_len=20,
            scheduler=DecodeScheduler(self.rng.choice([4, 16]), prefill_chunk=2),
            depth=depth,
        )
        self.stems = [tuple(self.rng.randrange(1000) for _ in range(8)) for _ in range(2)]
        self.asked: dict[int, tuple[tuple[int, ...], int, int]] = {}  # by handle: prompt, tokens, seed
        self.reads: dict[int, list[int]] = {}  # by handle of what is received: the handles that will say something
        self.quarantined: list[tuple[int, ...]] = []

    def submit(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.stems)[: rng.choice([2, 4, 6, 8, 8, 7])]
        count, seeds = rng.randint(2, self.MAX_TOKENS), SEEDS[: rng.choice([0, 2, 3])]
        kind = rng.choice([Kind.LOCAL, Kind.CONSUME])
        handle = self.driven.submit(list(prompt), count, kind=kind, seeds=seeds, seed=5, **WARM)
        asked = dict(enumerate(seeds, handle + 1)) or {handle: 5}
        self.asked |= {each: (prompt, count, seed) for each, seed in asked.items()}
        if kind is Kind.CONSUME:
            self.reads[handle] = list(asked)
            self.driven.engine.sequences.requests.enqueue(id_of(handle))

    def receiving(self) -> list[int]:
        """Handles of the prompts whose blocks are being read."""
        batch = self.driven.engine.sequences.batch
        return [batch.request(slot).id.handle for slot in batch.slots_in(Phase.RECEIVING).tolist()]

    def read_on(self, handle: int) -> None:
        """One more block of a prompt is here, or the last one with the first tokens."""
        sequences = self.driven.engine.sequences
        slot = sequences.requests.slot_of(id_of(handle))
        assert slot is not None
        prompt = tuple(sequences.batch.known_tokens(slot).tolist())
        num_blocks = int(sequences.batch.done[slot]) // 2 + 1
        land(self.driven, handle, min(num_blocks, -(-len(prompt) // 2)))
        if num_blocks * 2 >= len(prompt):
            firsts = [FirstToken(each, says(*self.asked[each])[0], None) for each in self.reads[handle]]
            self.driven.engine.ready(id_of(handle), tuple(firsts))

    def drop(self, handle: int) -> None:
        """Lets go of a request; where it is being read, the read may still write to its blocks."""
        sequences = self.driven.engine.sequences
        slot = sequences.requests.slot_of(id_of(handle))
        quarantined: tuple[int, ...] = ()
        if slot is not None and sequences.batch.phase[slot] == Phase.RECEIVING and self.rng.random() < 0.5:
            quarantined = tuple(sequences.batch.blocks(slot)[int(sequences.batch.done[slot]) // 2 :])
            self.quarantined.append(quarantined)
        sequences.free(id_of(handle), quarantined)

    def happen(self) -> None:
        """Some of all that can happen, and a step."""
        rng, sequences = self.rng, self.driven.engine.sequences
        if len(sequences.requests.ids) < 12 and rng.random() < 0.4:
            self.submit()
        if rng.random() < 0.5 and (receiving := self.receiving()):
            self.read_on(rng.choice(receiving))
        if rng.random() < 0.2 and (known := sorted(sequences.requests.ids, key=lambda id: id.handle)):
            self.drop(rng.choice(known).handle)
        if rng.random() < 0.3 and self.quarantined:
            sequences.free_quarantined(self.quarantined.pop())
        self.driven.step()

    def settle(self) -> None:
        """Whatever was begun comes to its end."""
        while self.quarantined:
            self.driven.engine.sequences.free_quarantined(self.quarantined.pop())
        while self.driven.step() or self.receiving():
            for handle in self.receiving():
                self.read_on(handle)


@pytest.mark.few(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", first_of(2, range(6)))
def test_whoever_comes_and_goes_blocks_are_in_their_places_and_tokens_are_right(seed: int, depth: int):
    """Requests with several choices and without, computed and received, given up at any time; few blocks."""
    traffic = Traffic(seed, depth)
    for _ in range(200):
        traffic.happen()
    traffic.settle()
    traffic.driven.assert_baseline()
    assert len(traffic.driven.finish) > 20
    for handle, tokens in traffic.driven.tokens.items():
        prompt, count, of = traffic.asked[handle]
        assert tokens == says(prompt, count, of)[: len(tokens)]
        assert len(tokens) == count or handle not in traffic.driven.finish
