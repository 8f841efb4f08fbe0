"""The step loop over the simulated runner: whatever the schedule, a request's tokens are those it has when alone."""

import random
import sys

import numpy as np
import pytest

from kvtransfer.ids import AttemptId, WorkerId
from kvtransfer.messages import FirstToken
from services.engine.runner.base import StepLogprobs
from services.engine.runner.simulated import SimulatedRunner
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.schedulers.prefill import PrefillScheduler
from services.engine.sequences.batch_state import Phase
from services.engine.sequences.request import Kind
from services.engine.sequences.request_table import State
from services.protocol.outcomes import FailureCode, FinishReason
from services.protocol.sampling import FEW_ALTERNATIVES
from tests.engine.harness import GATEWAY, make_engine, reference


def random_prompts(seed: int, number: int, longest: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1000) for _ in range(rng.randint(1, longest))] for _ in range(number)]


@pytest.mark.few(3)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_tokens_do_not_depend_on_batching_or_chunks(chunk: int, depth: int):
    driven = make_engine(scheduler=DecodeScheduler(chunk + 30, prefill_chunk=chunk), depth=depth)
    prompts = random_prompts(1, 20)
    handles = [driven.submit(prompt, 15) for prompt in prompts]
    driven.run()
    for handle, prompt in zip(handles, prompts, strict=True):
        assert driven.tokens[handle] == reference(prompt, 15)
        assert driven.finish[handle] == FinishReason.LENGTH
    driven.assert_baseline()


@pytest.mark.few(2)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_scores_of_a_prompt_do_not_depend_on_chunks_or_cache(chunk: int, depth: int):
    """Each token from the second on, once and in order; also where a prefix is cached, and beside requests without."""
    prompts = [[*range(20), *prompt] for prompt in random_prompts(1, 6)]
    wide = [3, None, 0, 300, None, 5]
    driven = make_engine(scheduler=DecodeScheduler(chunk + 30, prefill_chunk=chunk), depth=depth)
    handles = [driven.submit(prompt, 5, num_prompt_logprobs=width) for prompt, width in zip(prompts, wide, strict=True)]
    driven.run()
    for handle, prompt, width in zip(handles, prompts, wide, strict=True):
        assert driven.tokens[handle] == reference(prompt, 5)
        if width is None:
            assert handle not in driven.scores
            continue
        assert driven.cached[handle] == 0
        assert len(driven.scores[handle]) == len(prompt) - 1
        for position, score in enumerate(driven.scores[handle], start=1):
            expected = reference(prompt[:position], 1)[0]
            assert score.sampled == -((prompt[position] - expected) % 1000)
            assert score.rank == 1 - score.sampled
            assert [*score.top] == [((expected + rank) % 1000, -rank) for rank in range(width)]
    driven.assert_baseline()


def test_a_prefix_hit_shortens_the_work_and_changes_no_token():
    driven = make_engine()
    prompt = random_prompts(2, 1)[0] + list(range(24))
    first = driven.submit(prompt, 9)
    driven.run()
    second = driven.submit([*prompt, 5, 6, 7], 9)
    driven.run()
    assert driven.cached[first] == 0
    assert driven.cached[second] == len(prompt) // 4 * 4
    assert driven.tokens[second] == reference([*prompt, 5, 6, 7], 9)


def test_the_next_turn_finds_prompt_and_generated_blocks():
    """After P prompt and G generated tokens, ⌊(P + G - 1) / b⌋ blocks: the last token's KV was never computed."""
    for prompt_len in range(5, 13):
        driven = make_engine()
        prompt = list(range(100, 100 + prompt_len))
        first = driven.submit(prompt, 10)
        driven.run()
        turn = prompt + driven.tokens[first] + [1, 2, 3, 4, 5]
        second = driven.submit(turn, 5)
        driven.run()
        assert driven.cached[second] == (prompt_len + 10 - 1) // 4 * 4
        assert driven.tokens[second] == reference(turn, 5)


def test_the_last_prompt_token_is_always_computed():
    driven = make_engine()
    prompt = list(range(16))
    for expected in (0, 12):
        handle = driven.submit(prompt, 4)
        driven.run()
        assert driven.cached[handle] == expected
    driven.assert_baseline()


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_prompts_that_arrive_together_compute_a_shared_prefix_once(role: str):
    scheduler = DecodeScheduler(64) if role == "decode" else PrefillScheduler(64)
    driven = make_engine(scheduler=scheduler)
    prefix = list(range(80))
    kind, max_tokens = (Kind.LOCAL, 3) if role == "decode" else (Kind.PRODUCE, 3)
    handles = [driven.submit([*prefix, 500 + index], max_tokens, kind=kind) for index in range(32)]
    driven.run()
    assert sorted(driven.cached[handle] for handle in handles) == [0] + [80] * 31


def test_when_the_owner_of_a_pending_prefix_goes_the_next_one_does_the_work():
    driven = make_engine(scheduler=DecodeScheduler(8))
    prefix = list(range(80))
    handles = [driven.submit([*prefix, index], 3) for index in range(4)]
    driven.step()
    (owner,) = driven.engine.sequences.requests.in_state(State.RUNNING)
    driven.engine.sequences.free(owner.id)
    driven.run()
    survivors = [handle for handle in handles if handle != owner.id.handle]
    for handle in survivors:
        assert driven.tokens[handle] == reference([*prefix, handle - 1], 3)
    driven.assert_baseline()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_tiny_pool_preempts_and_changes_no_token(depth: int):
    driven = make_engine(num_blocks=16, max_model_len=64, depth=depth)
    prompts = random_prompts(3, 12, longest=12)
    handles = [driven.submit(prompt, 20) for prompt in prompts]
    preemptions = 0
    while driven.step():
        preemptions += len(driven.engine.sequences.requests.in_state(State.PREEMPTED))
    assert preemptions > 0
    for handle, prompt in zip(handles, prompts, strict=True):
        assert driven.tokens[handle] == reference(prompt, 20)
    driven.assert_baseline()


def test_eviction_is_leaf_first_and_keeps_shared_prefixes():
    driven = make_engine(num_blocks=24, max_model_len=64)
    prefix = list(range(16))
    for index in range(40):
        handle = driven.submit([*prefix, 300 + index, *range(600 + index, 608 + index)], 6)
        driven.run()
        assert driven.cached[handle] == (16 if index else 0)
    driven.assert_baseline()


@pytest.mark.parametrize("prompt_len", [3, 8])
def test_sequences_that_generate_the_same_text_share_its_blocks(prompt_len: int):
    """Of the prompt too, whose full last block each has to compute itself."""
    driven = make_engine()
    prompt = list(range(prompt_len))
    handles = [driven.submit(prompt, 30) for _ in range(4)]
    for _ in range(25):
        driven.step()
    sequences = driven.engine.sequences
    tables = [sequences.batch.blocks(slot) for slot in sequences.batch.slots_in(Phase.DECODE).tolist()]
    num_full = min(len(driven.tokens[handle]) + prompt_len - 1 for handle in handles) // 4
    assert num_full >= 5
    assert [table[:num_full] for table in tables] == [tables[0][:num_full]] * 4
    held = {block for table in tables for block in table}
    assert sequences.pool.num_blocks - sequences.pool.available == len(held)
    assert len(held) <= num_full + 2 * len(handles)  # and what each of them is filling

    driven.run()
    for handle in handles:
        assert driven.tokens[handle] == reference(prompt, 30)
    nodes = [(parent, tokens) for _, parent, tokens in sequences.pool.cache.take_events() if tokens is not None]
    assert len(nodes) == len(set(nodes)) == (prompt_len + 30 - 1) // 4
    driven.assert_baseline()


def test_generated_blocks_are_hits_while_their_sequence_still_runs():
    driven = make_engine()
    prompt = list(range(10))
    long = driven.submit(prompt, 40)
    for _ in range(20):
        driven.step()
    text = prompt + driven.tokens[long]
    follower = driven.submit([*text, 1, 2], 3)
    driven.step()
    assert driven.cached[follower] == (len(text) - 1) // 4 * 4
    driven.run()
    assert driven.tokens[follower] == reference([*text, 1, 2], 3)
    driven.assert_baseline()


@pytest.mark.parametrize("depth", [0, 1])
def test_generated_duplicates_are_freed_and_their_twins_outlive_newer_children(depth: int):
    """Two rows generate the same blocks: the second's are freed, its further ones hang below the first's."""
    driven = make_engine(num_blocks=12, max_model_len=40, depth=depth)
    prompt = [1, 2, 3]
    short, long = driven.submit(prompt, 10), driven.submit(prompt, 18)
    driven.run()
    assert driven.tokens[long][:10] == driven.tokens[short]
    again = driven.submit(prompt + driven.tokens[long], 2)
    driven.run()
    assert driven.cached[again] == (3 + 18 - 1) // 4 * 4
    for index in range(10):  # push everything out, which asserts the order of eviction
        driven.submit([50 + index] * 30, 2)
        driven.run()
    driven.assert_baseline()


@pytest.mark.parametrize("depth", [0, 1])
def test_eos_stops_and_stop_tokens_stop_unless_ignored(depth: int):
    alone = reference([4, 5, 6], 30)
    eos = alone[10]
    assert eos not in alone[:10]
    for options, length in (
        ({}, 11),
        ({"ignore_eos": True}, 30),
        ({"ignore_eos": True, "stop_token_ids": (alone[5],)}, 6),
        ({"stop_token_ids": (*tuple(range(1000, 1020)), alone[3])}, 4),
    ):
        driven = make_engine(eos_token_ids=(eos,), depth=depth)
        handle = driven.submit([4, 5, 6], 30, **options)
        driven.run()
        assert driven.tokens[handle] == alone[:length]
        assert driven.finish[handle] == (FinishReason.LENGTH if length == 30 else FinishReason.STOP)
        driven.assert_baseline()


@pytest.mark.parametrize("depth", [0, 1])
def test_min_tokens_bans_eos_until_then(depth: int):
    alone = reference([4, 5, 6], 30)
    driven = make_engine(eos_token_ids=(alone[4],), depth=depth)
    handle = driven.submit([4, 5, 6], 30, min_tokens=10)
    driven.run()
    assert driven.tokens[handle][:4] == alone[:4]
    assert alone[4] not in driven.tokens[handle][:10]
    assert len(driven.tokens[handle]) >= 10


@pytest.mark.parametrize("depth", [0, 1])
def test_the_context_limit_ends_a_sequence(depth: int):
    driven = make_engine(max_model_len=20, depth=depth)
    handle = driven.submit(list(range(15)), 100)
    driven.run()
    assert len(driven.tokens[handle]) == 5
    assert driven.finish[handle] == FinishReason.LENGTH
    driven.assert_baseline()


def test_what_cannot_fit_the_empty_pool_is_refused_for_good_also_in_the_queue():
    driven = make_engine(num_blocks=8, max_model_len=256)
    driven.submit(list(range(20)), 2)
    driven.submit(list(range(32)), 2)  # with its next position, one block too many
    driven.run()
    assert [(failure.handle, failure.code) for failure in driven.failures] == [(2, FailureCode.TOO_LARGE)]
    driven.assert_baseline()


def test_what_fits_only_without_the_quarantine_is_refused_not_now():
    driven = make_engine(num_blocks=8, max_model_len=256)
    sequences = driven.engine.sequences
    driven.submit(list(range(8)), 2, kind=Kind.CONSUME, paired_with=3)
    (id,) = sequences.requests.ids
    sequences.requests.enqueue(id)
    driven.step()
    (reserved,) = sequences.requests.in_state(State.RUNNING)
    slot = sequences.requests.slot_of(reserved.id)
    assert slot is not None
    quarantined = tuple(sequences.batch.blocks(slot)[:2])
    sequences.free(id, quarantined)
    driven.submit(list(range(100, 127)), 2)
    driven.take()
    assert [failure.code for failure in driven.failures] == [FailureCode.NOT_NOW]
    sequences.free_quarantined(quarantined)
    handle = driven.submit(list(range(100, 127)), 2)
    driven.run()
    assert len(driven.tokens[handle]) == 2
    driven.assert_baseline()


@pytest.mark.parametrize("depth", [0, 1])
def test_prefill_announces_full_blocks_after_each_chunk_and_the_rest_with_the_first_token(depth: int):
    driven = make_engine(scheduler=PrefillScheduler(10), depth=depth)
    driven.submit(list(range(26)), 5, kind=Kind.PRODUCE)
    driven.run()
    assert [len(part.blocks) for part in driven.announced] == [2, 3, 2]
    assert [part.first_tokens for part in driven.announced[:-1]] == [(), ()]
    assert driven.announced[-1].first_tokens == (FirstToken(1, reference(list(range(26)), 1)[0], None),)
    sequences = driven.engine.sequences
    assert sequences.pool.available == sequences.pool.num_blocks - 7
    sequences.free(driven.announced[0].id)
    driven.assert_baseline()


def test_prefill_serves_short_prompts_first_but_starves_none():
    driven = make_engine(scheduler=PrefillScheduler(16, tokens_per_waited_s=100.0))
    long = driven.submit(list(range(200)), 2, kind=Kind.PRODUCE)
    order: list[int] = []
    for index in range(60):
        driven.submit([index] * 16, 2, kind=Kind.PRODUCE)
        driven.now += 0.1
        driven.step()
        order += [part.id.handle for part in driven.announced if part.first_tokens and part.id.handle not in order]
    assert order[0] != long
    assert long in order


def test_a_consumer_over_a_quarter_of_the_pool_waits_for_one_below_it():
    driven = make_engine(num_blocks=40, scheduler=PrefillScheduler(1000))
    for index in range(5):
        driven.submit([index] * 16, 2, kind=Kind.PRODUCE, paired_with=1)  # 4 blocks each; a share is 10
    other = driven.submit(list(range(900, 980)), 2, kind=Kind.PRODUCE, paired_with=2)
    driven.step()
    assert driven.engine.sequences.requests.blocks_charged_to(WorkerId(1)) == 12
    assert other in driven.tokens


def test_prefill_refuses_what_needs_more_than_one_token_here():
    driven = make_engine(scheduler=PrefillScheduler(64))
    driven.submit([1, 2, 3], 2)
    one = driven.submit([1, 2, 3], 1)
    driven.run()
    assert [failure.code for failure in driven.failures] == [FailureCode.UNSUPPORTED]
    assert driven.tokens[one] == reference([1, 2, 3], 1)
    driven.assert_baseline()


def test_running_streams_keep_their_pace_beside_a_long_prompt():
    driven = make_engine(scheduler=DecodeScheduler(1000, prefill_chunk=8))
    handle = driven.submit([1, 2, 3], 30)
    driven.step()
    driven.submit(list(range(200)), 2)
    for _ in range(20):
        before = len(driven.tokens[handle])
        driven.step()
        assert len(driven.tokens[handle]) == before + 1


def test_a_prompt_takes_what_running_streams_leave_of_a_step():
    driven = make_engine(scheduler=DecodeScheduler(40))
    driven.submit([1, 2, 3], 30)
    driven.step()
    prompt = driven.submit(list(range(3 * 39)), 2)
    for has_token in (False, False, True):
        driven.step()
        assert (prompt in driven.tokens) is has_token


def test_requests_past_their_deadline_are_given_up_wherever_they_are():
    driven = make_engine(max_num_seqs=2)
    for _ in range(4):
        driven.submit([1, 2, 3, 4, 5], 200)
    driven.step()
    for request in driven.engine.sequences.requests.in_state(State.WAITING):
        request.deadline = 5.0
    driven.engine.sequences.batch.deadline[:] = 5.0
    driven.engine.sequences.fail_expired(6.0)
    driven.take()
    assert [failure.code for failure in driven.failures] == [FailureCode.DEADLINE] * 4
    driven.assert_baseline()


def lines_per_step(batch_size: int, steps: int) -> float:
    """Python lines executed in our code in a decode step, averaged; one row in 16 fills a block."""
    driven = make_engine(
        num_blocks=20_000, block_size=16, max_num_seqs=batch_size, scheduler=DecodeScheduler(100_000), vocab_size=30_000
    )
    for index in range(batch_size):
        driven.submit([index] * (5 + index % 16), 200)
    driven.step()
    assert (driven.engine.sequences.batch.phase == Phase.DECODE).sum() == batch_size
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        if "/services/" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        return trace

    sys.settrace(trace)
    for _ in range(steps):
        driven.engine.step(driven.now)
        driven.engine.take_outputs()
    sys.settrace(None)
    return lines / steps


def test_the_lines_of_a_decode_step_grow_with_nothing_but_the_blocks_that_fill():
    few, many = lines_per_step(16, 32), lines_per_step(256, 32)
    lines_per_filled_block = (many - few) / ((256 - 16) / 16)
    assert lines_per_filled_block < 50


def test_a_row_with_many_alternatives_makes_no_other_one_wider():
    """Also where a sequence before it was aborted while the step was under way."""
    driven = make_engine(depth=1)
    gone = driven.submit([5, 6], 9, num_logprobs=1)
    few, many = driven.submit([1, 2], 3, num_logprobs=2), driven.submit([3, 4], 3, num_logprobs=1000)
    driven.step()
    driven.engine.sequences.free(AttemptId(GATEWAY, gone))
    driven.run()
    for handle, width in ((few, 2), (many, 1000)):
        assert len(driven.logprobs[handle]) == 3
        for token, found in zip(driven.tokens[handle], driven.logprobs[handle], strict=True):
            assert [*found.top] == [((token + place) % 1000, -place) for place in range(width)]
    rows = StepLogprobs.joined([logprobs_of_widths([2, 300]), logprobs_of_widths([300])])
    assert rows.top_ids.shape == (3, FEW_ALTERNATIVES)
    assert sorted(rows.wide) == [1, 2]
    assert sorted(rows.rows(np.array([True, False, True])).wide) == [1]


def logprobs_of_widths(widths: list[int]) -> StepLogprobs:
    tokens = np.zeros(len(widths), np.int32)
    return SimulatedRunner(1, 16)._spread(tokens, tokens, np.array(widths, np.int32))


def test_logprobs_come_with_the_rows_that_asked():
    driven = make_engine()
    plain, asked = driven.submit([1, 2], 3), driven.submit([3, 4], 3, num_logprobs=2)
    driven.engine.step(driven.now)
    (rows,) = driven.engine.take_outputs().rows
    widths = dict(zip(rows.handles.tolist(), rows.widths.tolist(), strict=True))
    assert widths == {plain: -1, asked: 2}
    assert rows.logprobs is not None
    assert rows.logprobs.top_ids.shape == (2, 2)
    assert np.array_equal(rows.logprobs.top_ids[:, 0], rows.tokens)
