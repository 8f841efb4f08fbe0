"""The step loop with a pipeline: a step is launched before the one under way is collected, and runs as late as it may.

What holds without one is tested with one where it is tested: tests with a `depth`.
"""

import random
from typing import Any

import numpy as np
import pytest

from kvtransfer.ids import AttemptId, GatewayId
from services.engine.engine import Engine
from services.engine.runner.base import Runner, StepInput, StepOutput
from services.engine.runner.simulated import SimulatedRunner
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.schedulers.prefill import PrefillScheduler
from services.engine.sequences.request import Kind
from services.engine.sequences.request_table import State
from services.protocol.outcomes import FinishReason
from tests.engine.harness import GATEWAY, Driven, make_engine, reference
from tests.seeds import first_of


class WatchedRunner(SimulatedRunner):
    """Says in which order it is spoken to, and how many of a step's tokens were unknown when it was launched."""

    def __init__(self) -> None:
        super().__init__(200, 4, late=True)
        self.events: list[str] = []
        self.num_carried: list[int] = []

    def launch(self, step: StepInput) -> None:
        self.events.append("launch")
        self.num_carried.append(int((step.tokens.token_ids < 0).sum()))
        super().launch(step)

    def collect(self) -> StepOutput:
        self.events.append("collect")
        return super().collect()


def watched() -> tuple[Driven, WatchedRunner]:
    runner = WatchedRunner()
    scheduler = DecodeScheduler(64)
    engine = Engine(runner, scheduler, max_num_seqs=8, max_model_len=64, eos_token_ids=(), pipeline_depth=1)
    return Driven(engine), runner


def id_of(handle: int) -> AttemptId:
    return AttemptId(GatewayId(GATEWAY), handle)


def test_a_step_is_launched_before_the_one_under_way_is_collected() -> None:
    """Also where nothing is known of what the step under way samples; each token of three sequences is carried over."""
    driven, runner = watched()
    handles = [driven.submit([index, 5, 6], 6) for index in range(3)]
    driven.run()
    assert [driven.tokens[handle] for handle in handles] == [reference([index, 5, 6], 6) for index in range(3)]
    decoding = runner.events[2:]  # after the prompts' step
    assert (
        decoding
        == ["launch", "launch", "collect", "launch", "collect", "launch", "collect", "launch"] + ["collect"] * 2
    )
    assert runner.num_carried == [0, 0, 3, 3, 3, 3]
    driven.assert_baseline()


def test_streams_are_smooth() -> None:
    """Each round brings every running sequence one token, whoever comes and goes beside it."""
    driven = make_engine(depth=1)
    handle = driven.submit([1, 2, 3], 60)
    while handle not in driven.tokens:
        driven.step()
    driven.step()
    rng = random.Random(0)
    while handle not in driven.finish:
        if rng.random() < 0.3:
            driven.submit([rng.randrange(1000) for _ in range(rng.randint(1, 20))], rng.randint(1, 9))
        before = {each: len(tokens) for each, tokens in driven.tokens.items()}
        driven.step()
        assert all(len(tokens) <= before.get(each, 0) + 1 for each, tokens in driven.tokens.items())
        assert len(driven.tokens[handle]) == before[handle] + 1


def test_what_was_under_way_for_a_sequence_that_stopped_is_dropped() -> None:
    alone = reference([4, 5, 6], 10)
    driven = make_engine(depth=1)
    stopping = driven.submit([4, 5, 6], 10, stop_token_ids=(alone[3],))
    other = driven.submit([7, 8, 9], 10)
    driven.run()
    assert driven.tokens[stopping] == alone[:4]
    assert driven.finish[stopping] == FinishReason.STOP
    assert driven.tokens[other] == reference([7, 8, 9], 10)
    driven.assert_baseline()


def test_a_slot_that_was_given_away_meanwhile_takes_nothing_of_its_predecessor() -> None:
    driven = make_engine(max_num_seqs=1, depth=1)
    first = driven.submit([1, 2, 3, 4, 5], 20)
    for _ in range(4):
        driven.step()
    assert driven.engine.sequences.frees.steps_under_way
    driven.engine.sequences.free(id_of(first))
    told = len(driven.tokens[first])
    second = driven.submit([9, 9, 9], 10)
    driven.run()
    assert len(driven.tokens[first]) == told
    assert driven.tokens[second] == reference([9, 9, 9], 10)
    driven.assert_baseline()


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_blocks_of_a_sequence_that_was_given_up_are_free_when_the_step_under_way_is_complete(role: str) -> None:
    """Its writes may still come: until then nobody is given these blocks, nor may data for others land there."""
    scheduler = DecodeScheduler(8) if role == "decode" else PrefillScheduler(8)
    driven = make_engine(depth=1, scheduler=scheduler)
    handle = driven.submit(list(range(40)), 20, kind=Kind.LOCAL if role == "decode" else Kind.PRODUCE)
    driven.step()
    driven.step()
    sequences = driven.engine.sequences
    held = sequences.pool.num_blocks - sequences.pool.available
    sequences.free(id_of(handle))
    assert not sequences.requests.ids
    assert sequences.pool.num_blocks - sequences.pool.available == held
    driven.run()
    driven.assert_baseline()


def test_a_prompt_that_stops_being_computed_keeps_its_blocks_until_it_is_let_go_of() -> None:
    driven = make_engine(depth=1, scheduler=PrefillScheduler(8))
    handle = driven.submit(list(range(40)), 20, kind=Kind.PRODUCE)
    driven.step()
    driven.step()
    sequences = driven.engine.sequences
    sequences.stop_computing(id_of(handle))
    driven.run()
    assert sequences.pool.num_blocks - sequences.pool.available == 10
    sequences.free(id_of(handle))
    driven.assert_baseline()


def test_nobody_is_preempted_while_a_step_is_under_way() -> None:
    """Two sequences that fill the pool together: one gives way with all the tokens it was told to have."""
    driven = make_engine(num_blocks=10, max_model_len=40, depth=1)
    handles = [driven.submit([index] * 9, 24) for index in range(2)]
    seen = 0
    while driven.step():
        for request in driven.engine.sequences.requests.in_state(State.PREEMPTED):
            seen += 1
            told = driven.tokens[request.id.handle]
            assert request.capsule.token_ids[9:].tolist() == told
    assert seen
    assert [driven.tokens[handle] for handle in handles] == [reference([index] * 9, 24) for index in range(2)]
    driven.assert_baseline()


@pytest.mark.parametrize("sampling", [{"frequency_penalty": 1.5}, {"bad_words": ((3, 4), (5,))}])
def test_logits_that_depend_on_the_tokens_so_far_wait_for_them(sampling: dict[str, Any]) -> None:
    """Also of a sequence that joins a running batch, and while it is there each round still brings one token."""
    driven, runner = watched()
    plain = driven.submit([1, 2, 3], 30)
    for _ in range(6):
        driven.step()
    penalised = driven.submit([4, 5, 6], 8, **sampling)
    while driven.step():
        pass
    assert driven.tokens[plain] == reference([1, 2, 3], 30)
    assert driven.tokens[penalised] == reference([4, 5, 6], 8, **sampling)
    assert "launch collect launch collect launch collect" in " ".join(runner.events)
    driven.assert_baseline()


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", first_of(2, range(8)))
def test_whatever_comes_and_goes_no_token_changes(seed: int) -> None:
    """Requests that are given up, stop, share prefixes, are preempted; over few blocks and slots."""
    rng = random.Random(seed)
    driven = make_engine(
        num_blocks=rng.choice([16, 40]),
        max_model_len=60,
        max_num_seqs=rng.choice([2, 6]),
        scheduler=DecodeScheduler(rng.choice([8, 40]), prefill_chunk=rng.choice([3, 16])),
        depth=1,
    )
    stems = [[rng.randrange(1000) for _ in range(rng.randint(1, 20))] for _ in range(3)]
    asked: dict[int, tuple[list[int], int]] = {}
    for _ in range(150):
        if rng.random() < 0.3:
            prompt, count = [*rng.choice(stems), rng.randrange(3)], rng.randint(1, 30)
            stops = (reference(prompt, count)[-1],) if rng.random() < 0.3 else ()
            widths: dict[str, Any] = {
                "num_logprobs": rng.choice([None, 2]),
                "num_prompt_logprobs": rng.choice([None, None, 1]),
            }
            asked[driven.submit(prompt, count, stop_token_ids=stops, **widths)] = (prompt, count)
        if rng.random() < 0.1 and asked:
            driven.engine.sequences.free(id_of(rng.choice(list(asked))))
        driven.step()
    driven.run()
    driven.assert_baseline()
    assert len(driven.finish) > len(asked) // 2
    for handle, tokens in driven.tokens.items():
        prompt, count = asked[handle]
        assert tokens == reference(prompt, count)[: len(tokens)]
    assert driven.scores
    for handle, scores in driven.scores.items():
        prompt, _ = asked[handle]
        for position, score in enumerate(scores, start=1):
            assert score.sampled == -((prompt[position] - reference(prompt[:position], 1)[0]) % 1000)


def test_a_late_runner_shows_a_block_that_is_used_too_early() -> None:
    """So that the tests above can fail: a step that was launched writes to its blocks when it is collected."""
    driven = make_engine(depth=1)
    handle = driven.submit([1, 2, 3, 4], 20)
    while handle not in driven.tokens:
        driven.step()
    driven.step()
    sequences, runner = driven.engine.sequences, driven.engine.runner
    slot = sequences.requests.slot_of(id_of(handle))
    assert slot is not None
    block = sequences.batch.blocks(slot)[-1]
    sequences.free(id_of(handle))
    before = content(runner, block)
    driven.run()
    assert content(runner, block) != before


def content(runner: Runner, block: int) -> bytes:
    """A block's KV as it is now."""
    return runner.kv_memory().read(np.array([block], dtype=np.uint32), 0, runner.layout.block_bytes)
