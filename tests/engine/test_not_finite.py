"""Numbers that are not finite: the request ends, nothing of it stays in a cache, and the runner is checked."""

from typing import Any

import numpy as np
import pytest

from kvtransfer.block_memory import HostBlocks
from services.config import Pooling
from services.engine.engine import Engine
from services.engine.runner.base import StepInput
from services.engine.runner.simulated import SimulatedRunner
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.schedulers.prefill import PrefillScheduler
from services.engine.self_check import SelfCheck, SelfCheckError
from services.engine.sequences.request import Kind
from services.protocol.contents import Contents
from services.protocol.outcomes import FailureCode
from tests.engine.harness import Driven, make_engine, reference

NAN = 777  # the token whose embedding is NaN
PROMPT = list(range(1, 41))  # ten blocks; three chunks
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def spoilt(at: int) -> list[int]:
    """The prompt with the NaN token at this place."""
    return [*PROMPT[:at], NAN, *PROMPT[at + 1 :]]


def assert_failed_without_a_trace(driven: Driven, handle: int, num_cached: int = 0) -> None:
    """The request failed, once, and the prefix cache has so many nodes."""
    assert [failure.handle for failure in driven.failures] == [handle]
    assert driven.failures[0].code is FailureCode.NOT_FINITE
    assert driven.engine.num_not_finite == 1
    assert len(driven.engine.sequences.pool.cache) == num_cached
    driven.assert_baseline()


def matched(driven: Driven, prompt: list[int]) -> int:
    """Blocks of the prompt that the prefix cache has."""
    return len(driven.engine.sequences.pool.cache.match(Contents(np.array([*prompt, 0], np.int32))).blocks)


@pytest.mark.few(14)
@DEPTHS
@pytest.mark.parametrize("at", [0, 3, 15, 16, 31, 32, 39])
@pytest.mark.parametrize("wants", [{}, {"num_logprobs": 2}, {"num_prompt_logprobs": 1}, {"temperature": 1.0}], ids=str)
def test_a_request_ends_in_an_error_and_leaves_nothing(wants: dict[str, Any], at: int, depth: int) -> None:
    """Wherever in the prompt it is; with others in the same steps, which notice nothing."""
    driven = make_engine(nan_token=NAN, depth=depth)
    handle = driven.submit(spoilt(at), 5, **wants)
    others = {driven.submit([token, token], 6): [token, token] for token in (3, 5)}
    driven.run()
    assert {other: driven.tokens[other] for other in others} == {
        other: reference(prompt, 6) for other, prompt in others.items()
    }
    assert handle not in driven.tokens
    assert_failed_without_a_trace(driven, handle, num_cached=2)  # one block of each of the others


@DEPTHS
def test_all_choices_of_a_prompt_end_with_it(depth: int) -> None:
    driven = make_engine(nan_token=NAN, depth=depth)
    handle = driven.submit(spoilt(20), 5, seeds=(1, 2, 3), temperature=1.0)
    driven.run()
    assert_failed_without_a_trace(driven, handle)


@DEPTHS
@pytest.mark.parametrize("window", [None, 8, 2])
def test_a_token_that_was_generated_can_be_the_one(window: int | None, depth: int) -> None:
    """The request ends after the tokens that were right; blocks that it freed behind its window are withdrawn too."""
    sound = make_engine(window=window)
    sound.submit(PROMPT, 9)
    sound.run()
    (tokens,) = sound.tokens.values()
    driven = make_engine(nan_token=tokens[5], depth=depth, window=window)
    handle = driven.submit(PROMPT, 9)
    driven.run()
    assert driven.tokens[handle] == tokens[:6]
    assert_failed_without_a_trace(driven, handle)


@DEPTHS
@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("at", [0, 18, 39])
def test_an_embedding_ends_in_an_error(at: int, pooling: Pooling, depth: int) -> None:
    """Also one that is pooled of other tokens: its blocks are no use to anyone."""
    driven = make_engine(nan_token=NAN, depth=depth, scheduler=PrefillScheduler(16))
    handle = driven.embed(spoilt(at), pooling)
    driven.run()
    assert driven.embeddings.keys() <= {handle}
    if pooling is not Pooling.CLS or at == 0:
        assert not driven.embeddings
    assert_failed_without_a_trace(driven, handle)


@DEPTHS
@pytest.mark.parametrize("at", [0, 18, 39])
def test_no_block_is_announced_from_the_step_on_that_computed_it(at: int, depth: int) -> None:
    driven = make_engine(nan_token=NAN, depth=depth, scheduler=PrefillScheduler(16))
    handle = driven.submit(spoilt(at), 5, kind=Kind.PRODUCE, paired_with=5)
    driven.run()
    assert sum(len(announced.blocks) for announced in driven.announced) == at // 16 * 4
    assert_failed_without_a_trace(driven, handle)


@DEPTHS
def test_blocks_that_a_request_found_in_the_cache_are_not_trusted_any_more(depth: int) -> None:
    """Their content may be the reason. Who uses them goes on, and what others cached beside them stays."""
    driven = make_engine(depth=depth)
    for tail in (50, 60):
        driven.submit([*PROMPT[:16], *[tail] * 9], 2)
    driven.submit([9] * 9, 2)
    driven.run()
    user = driven.submit([*PROMPT[:16], 70], 30)
    for _ in range(4):
        driven.step()
    runner = driven.engine.runner
    assert isinstance(runner, SimulatedRunner)
    runner.nan_token = NAN
    handle = driven.submit([*PROMPT[:16], NAN], 5)
    driven.run()
    assert driven.tokens[user] == reference([*PROMPT[:16], 70], 30)
    assert matched(driven, PROMPT) == 0
    assert matched(driven, [9] * 8) == 2
    assert_failed_without_a_trace(driven, handle, num_cached=2)


@DEPTHS
def test_a_request_that_waits_for_blocks_of_such_a_prompt_computes_its_own(depth: int) -> None:
    """And one that runs over blocks which are withdrawn makes no later block ready below them."""
    driven = make_engine(nan_token=NAN, depth=depth)
    handle = driven.submit([*PROMPT, NAN], 5)
    others = [driven.submit([*PROMPT, token, *range(100, 140)], 4) for token in (50, 51)]
    driven.run()
    for other, token in zip(others, (50, 51), strict=True):
        assert driven.tokens[other] == reference([*PROMPT, token, *range(100, 140)], 4)
    assert [failure.handle for failure in driven.failures] == [handle]
    driven.assert_baseline()


@pytest.mark.parametrize("max_model_len", [1, 2, 5, 100, 4096])
@pytest.mark.parametrize("block_size", [1, 4, 256])
def test_a_check_passes_again_and_again_and_touches_no_block_of_the_pool(block_size: int, max_model_len: int) -> None:
    runner = SimulatedRunner(3, block_size)
    memory = runner.kv_memory()
    assert isinstance(memory, HostBlocks)
    before = memory.array.copy()
    check = SelfCheck(runner, max_model_len)
    check.learn()
    check.repeat()
    assert (memory.array == before).all()


def test_one_damaged_token_is_no_reason_to_refuse_a_model() -> None:
    """Another prompt is tried."""
    first = np.random.default_rng(0).integers(0, 1000, 50, np.int32)
    SelfCheck(SimulatedRunner(3, 4, nan_token=int(first[3])), 50).learn()


def test_a_model_of_which_nothing_is_finite_is_refused() -> None:
    with pytest.raises(SelfCheckError, match="whatever the prompt"):
        SelfCheck(SimulatedRunner(3, 4, vocab_size=1, nan_token=0), 50).learn()


@DEPTHS
def test_an_engine_whose_runner_fails_the_check_ends_before_a_token_of_that_step_leaves(depth: int) -> None:
    """Nobody is told that the request is at fault."""
    driven = make_engine(depth=depth)
    runner = driven.engine.runner
    assert isinstance(runner, SimulatedRunner)
    driven.submit([5, 5], 100)
    while not driven.tokens:
        driven.step()
    before = dict(driven.tokens)
    runner.nan_token = int(driven.engine.check._tokens[7])  # from now on
    driven.submit([runner.nan_token, 8], 5)
    with pytest.raises(SelfCheckError, match="self-check failed"):
        driven.run()
    assert {handle: tokens[: len(before[handle])] for handle, tokens in driven.tokens.items()} == before
    assert not driven.failures


class CheckedRunner(SimulatedRunner):
    """Counts the steps of checks."""

    num_checked = 0

    def launch(self, step: StepInput) -> None:
        self.num_checked += bool(np.isin(step.tokens.block_tables, list(self.spare_blocks)).all())
        super().launch(step)


@DEPTHS
def test_a_client_that_sends_such_requests_in_a_loop_has_the_runner_checked_every_few_seconds(depth: int) -> None:
    runner = CheckedRunner(100, 4, late=depth > 0, nan_token=NAN)
    engine = Engine(
        runner, DecodeScheduler(64), max_num_seqs=8, max_model_len=100, eos_token_ids=(), pipeline_depth=depth
    )
    driven = Driven(engine)
    engine.check.learn()
    of_one_check = runner.num_checked // 2
    runner.num_checked = 0
    for _ in range(3):
        for _ in range(20):
            driven.submit([3, NAN], 5)
            driven.run()
        driven.now += 10
    assert runner.num_checked == 3 * of_one_check > 0
    assert engine.num_not_finite == len(driven.failures) == 60
    driven.assert_baseline()
