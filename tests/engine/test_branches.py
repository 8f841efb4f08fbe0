"""Several choices over one prompt: computed once, forked, and from then on sequences like any others."""

import random
from typing import Any

import numpy as np
import pytest

from kvtransfer.ids import AttemptId, GatewayId
from kvtransfer.messages import FirstToken
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.schedulers.prefill import PrefillScheduler
from services.engine.sequences.batch_state import Phase
from services.engine.sequences.request import Kind
from services.engine.sequences.request_table import State
from services.protocol.outcomes import FailureCode, FinishReason
from tests.engine.harness import GATEWAY, Driven, make_engine, reference

SEEDS = (3, 1, 4)
WARM: dict[str, Any] = {"temperature": 1.0}


def says(prompt: list[int], count: int, seed: int, **sampling) -> list[int]:
    return reference(prompt, count, seed=seed, **WARM, **sampling)


def phases(driven: Driven) -> list[Phase]:
    return [Phase(phase) for phase in driven.engine.sequences.batch.phase.tolist() if phase]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 21])
@pytest.mark.parametrize("chunk", [2, 64])
def test_each_choice_has_the_tokens_of_a_request_with_its_seed(length: int, chunk: int, depth: int):
    """Prompts that end inside of a block of four, and at its end."""
    driven = make_engine(scheduler=DecodeScheduler(chunk + 30, prefill_chunk=chunk), depth=depth)
    prompt = list(range(100, 100 + length))
    other = driven.submit([7, 7, 7], 12)
    handle = driven.submit(prompt, 9, seeds=SEEDS, **WARM)
    driven.run()
    for choice, seed in enumerate(SEEDS, start=1):
        assert driven.tokens[handle + choice] == says(prompt, 9, seed)
        assert driven.cached[handle + choice] == 0
        assert driven.finish[handle + choice] == FinishReason.LENGTH
    assert len({tuple(driven.tokens[handle + choice]) for choice in (1, 2, 3)}) == 3
    assert handle not in driven.tokens
    assert driven.tokens[other] == reference([7, 7, 7], 12)
    driven.assert_baseline()


def test_the_prompt_is_computed_once_and_its_full_blocks_are_shared():
    """After the fork, 21 tokens in blocks of four: five blocks shared, and one for each choice."""
    driven = make_engine()
    handle = driven.submit(list(range(21)), 9, seeds=SEEDS, **WARM)
    while Phase.BRANCH in phases(driven) or not phases(driven):
        driven.step()
    sequences = driven.engine.sequences
    slots = [sequences.requests.slot_of(AttemptId(GatewayId(GATEWAY), handle + choice)) for choice in (1, 2, 3)]
    tables = [sequences.batch.blocks(slot) for slot in slots if slot is not None]
    assert [len(table) for table in tables] == [6, 6, 6]
    assert tables[0][:5] == tables[1][:5] == tables[2][:5]
    assert len({table[5] for table in tables}) == 3
    assert sequences.pool.num_blocks - sequences.pool.available == 8
    assert sequences.requests.slot_of(AttemptId(GatewayId(GATEWAY), handle)) is None


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("dropped", [[1], [2], [3], [1, 2], [2, 3]])
def test_a_choice_that_is_given_up_before_the_fork_takes_nothing_along(dropped: list[int], depth: int):
    driven = make_engine(scheduler=DecodeScheduler(4), depth=depth)
    prompt = list(range(18))
    handle = driven.submit(prompt, 6, seeds=SEEDS, **WARM)
    driven.step()
    assert Phase.BRANCH in phases(driven)
    for choice in dropped:
        driven.engine.sequences.free(AttemptId(GatewayId(GATEWAY), handle + choice))
    driven.run()
    for choice, seed in enumerate(SEEDS, start=1):
        assert driven.tokens.get(handle + choice) == (None if choice in dropped else says(prompt, 6, seed))
    driven.assert_baseline()


def test_giving_up_the_prompt_gives_up_its_choices():
    driven = make_engine(scheduler=DecodeScheduler(4))
    handle = driven.submit(list(range(18)), 6, seeds=SEEDS)
    driven.step()
    assert Phase.BRANCH in phases(driven)
    assert len(driven.engine.sequences.requests.ids) == 4
    driven.engine.sequences.free(AttemptId(GatewayId(GATEWAY), handle))
    driven.run()
    assert driven.tokens == {}
    driven.assert_baseline()


def test_prefill_samples_a_first_token_for_each_choice_that_goes_on():
    """The one whose first token is a stop token ends here; it is no part of the handoff."""
    prompt = list(range(10))
    firsts = [says(prompt, 1, seed)[0] for seed in SEEDS]
    driven = make_engine(scheduler=PrefillScheduler(64))
    handle = driven.submit(prompt, 5, kind=Kind.PRODUCE, seeds=SEEDS, stop_token_ids=(firsts[1],), **WARM)
    driven.run()
    (announced,) = driven.announced
    assert len(announced.blocks) == 3
    assert announced.first_tokens == (FirstToken(handle + 1, firsts[0], None), FirstToken(handle + 3, firsts[2], None))
    assert [driven.tokens[handle + choice] for choice in (1, 2, 3)] == [[first] for first in firsts]
    assert driven.finish == {handle + 2: FinishReason.STOP}
    sequences = driven.engine.sequences
    assert sequences.requests.ids == {AttemptId(GatewayId(GATEWAY), handle)}
    sequences.free(AttemptId(GatewayId(GATEWAY), handle))
    driven.assert_baseline()


def test_choices_that_all_end_at_their_first_token_are_not_handed_off():
    driven = make_engine(scheduler=PrefillScheduler(64))
    prompt = list(range(10))
    stops = tuple(says(prompt, 1, seed)[0] for seed in SEEDS)
    driven.submit(prompt, 5, kind=Kind.PRODUCE, seeds=SEEDS, stop_token_ids=stops, **WARM)
    driven.run()
    assert driven.announced == []
    driven.assert_baseline()


@pytest.mark.parametrize("kind", [Kind.PRODUCE, Kind.LOCAL])
@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)])
def test_choices_that_may_all_choose_no_token_leave_nothing(kind: Kind, seeds: tuple[int, ...]):
    """Each fails; with them ends a handoff, which tells the consumer."""
    driven = make_engine(scheduler=PrefillScheduler(16) if kind is Kind.PRODUCE else None)
    banned: dict[str, Any] = {"allowed_token_ids": (7,), "logit_bias": ((7, -100.0),)}
    handle = driven.submit(list(range(19)), 5, kind=kind, paired_with=5, seeds=seeds, **WARM, **banned)
    driven.run()
    failed = [failure.handle for failure in driven.failures]
    choices = [handle + number for number in range(1, len(seeds) + 1)]
    assert failed == [*choices, handle] if kind is Kind.PRODUCE else choices
    assert driven.announced == [] or not any(announced.first_tokens for announced in driven.announced)
    driven.assert_baseline()


def test_one_token_each_is_prefill_s_alone():
    driven = make_engine(scheduler=PrefillScheduler(64))
    handle = driven.submit(list(range(9)), 1, seeds=SEEDS, **WARM)
    driven.run()
    assert [driven.tokens[handle + choice] for choice in (1, 2, 3)] == [says(list(range(9)), 1, seed) for seed in SEEDS]
    driven.assert_baseline()


def test_more_choices_than_there_are_slots_are_refused():
    driven = make_engine(max_num_seqs=3)
    driven.submit([1, 2, 3], 4, seeds=SEEDS)
    driven.take()
    assert [failure.code for failure in driven.failures] == [FailureCode.TOO_LARGE]
    driven.assert_baseline()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_small_pools_preempt_and_change_no_token(seed: int, depth: int):
    """Prompts are preempted with the choices that wait for them, and choices alone."""
    rng = random.Random(seed)
    scheduler = DecodeScheduler(12, prefill_chunk=3)
    driven = make_engine(num_blocks=24, max_num_seqs=8, scheduler=scheduler, depth=depth)
    expected: dict[int, list[int]] = {}
    for _ in range(12):
        prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 20))]
        seeds = tuple(rng.randrange(2**32) for _ in range(rng.choice([0, 0, 2, 3])))
        count = rng.randint(1, 16)
        own = rng.randrange(2**32)
        handle = driven.submit(prompt, count, seeds=seeds, seed=own, **WARM)
        numbered = enumerate(seeds, start=handle + 1) if seeds else [(handle, own)]
        expected |= {number: says(prompt, count, of) for number, of in numbered}
        for _ in range(rng.randrange(4)):
            driven.step()
    driven.run()
    assert driven.failures == []
    assert driven.tokens == expected
    driven.assert_baseline()


@pytest.mark.parametrize("depth", [0, 1])
def test_penalties_of_choices_count_each_one_s_own_tokens(depth: int):
    prompt = [5, 6, 7, 5]
    penalties: dict[str, Any] = {"frequency_penalty": 1.5, "repetition_penalty": 1.5}
    driven = make_engine(vocab_size=12, depth=depth)
    handle = driven.submit(prompt, 30, seeds=SEEDS, **WARM, **penalties)
    driven.run()
    for choice, seed in enumerate(SEEDS, start=1):
        assert driven.tokens[handle + choice] == says(prompt, 30, seed, vocab_size=12, **penalties)


def test_the_prompt_s_scores_are_said_once_under_its_own_handle():
    driven = make_engine()
    handle = driven.submit(list(range(9)), 4, seeds=SEEDS, num_prompt_logprobs=2, **WARM)
    driven.run()
    assert list(driven.scores) == [handle]
    assert len(driven.scores[handle]) == 8
    assert np.all([len(score.top) == 2 for score in driven.scores[handle]])


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("dropped", [[1], [3], [1, 2], [1, 2, 3]])
@pytest.mark.parametrize("kind", [Kind.LOCAL, Kind.PRODUCE])
def test_a_choice_that_is_aborted_while_its_group_waits_is_not_computed(kind: Kind, dropped: list[int], depth: int):
    scheduler = DecodeScheduler(64) if kind is Kind.LOCAL else PrefillScheduler(16)
    driven = make_engine(num_blocks=12, scheduler=scheduler, depth=depth)
    first = driven.submit(list(range(40)), 3 if kind is Kind.LOCAL else 1)
    driven.step()
    prompt = list(range(100, 118))
    handle = driven.submit(prompt, 6, kind=kind, seeds=SEEDS, **WARM)
    driven.step()
    assert handle in [request.id.handle for request in driven.engine.sequences.requests.in_state(State.WAITING)]
    for choice in dropped:
        driven.engine.sequences.free(AttemptId(GatewayId(GATEWAY), handle + choice))
        driven.engine.sequences.check()
    driven.run()
    assert first in driven.finish
    for choice, seed in enumerate(SEEDS, start=1):
        expected = says(prompt, 6 if kind is Kind.LOCAL else 1, seed)
        assert driven.tokens.get(handle + choice) == (None if choice in dropped else expected)
    driven.engine.sequences.free(AttemptId(GatewayId(GATEWAY), handle))
    driven.assert_baseline()


def test_a_choice_that_is_aborted_while_its_group_is_preempted_does_not_come_back():
    """The group's prompt and an older sequence do not fit together once that one has grown."""
    driven = make_engine(num_blocks=12, scheduler=DecodeScheduler(3, prefill_chunk=1))
    driven.submit(list(range(8)), 40)
    for _ in range(4):
        driven.step()
    prompt = list(range(100, 118))
    handle = driven.submit(prompt, 4, seeds=SEEDS, **WARM)
    requests = driven.engine.sequences.requests
    while not requests.in_state(State.PREEMPTED):
        assert driven.step()
    assert [request.id.handle for request in requests.in_state(State.PREEMPTED)] == [handle]
    driven.engine.sequences.free(AttemptId(GatewayId(GATEWAY), handle + 2))
    driven.run()
    assert [driven.tokens.get(handle + choice) for choice in (1, 2, 3)] == [
        says(prompt, 4, SEEDS[0]),
        None,
        says(prompt, 4, SEEDS[2]),
    ]
    driven.assert_baseline()


def test_a_prompt_that_is_computed_ends_with_the_last_of_its_choices():
    driven = make_engine(scheduler=DecodeScheduler(4))
    handle = driven.submit(list(range(18)), 6, seeds=SEEDS)
    driven.step()
    for choice in (1, 2, 3):
        assert Phase.BRANCH in phases(driven)
        driven.engine.sequences.free(AttemptId(GatewayId(GATEWAY), handle + choice))
    driven.assert_baseline()
