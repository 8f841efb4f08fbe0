"""Multi-head latent attention: both of its forms, by torch and by kernels, compute what `transformers` does."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.engine.attention.expanded_prompts import least_expanded
from services.engine.attention.latent import Latent
from services.engine.attention.latent_cpu_attention import LatentCpuAttention
from services.engine.engine import Engine
from services.engine.kernels.cpu import team
from services.engine.models import decoder
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.sequences.request_table import State
from tests.checkpoints import write_checkpoint
from tests.engine.harness import Driven
from tests.engine.oracle import Reference, possible_ranks, prompts_of
from tests.engine.stepping import run_greedy
from tests.engine.test_torch_runner import load

# Of `tests.checkpoints.LATENT`, from which so many new tokens of a row on the expanded form is taken.
LEAST_EXPANDED = 48


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """A checkpoint in float32, and its reference. No layer has experts, so all layers are kernels'."""
    directory = write_checkpoint(tmp_path_factory.mktemp("plain"), "deepseek_v3", first_k_dense_replace=2)
    return directory, Reference(directory)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("chunk", [LEAST_EXPANDED - 1, LEAST_EXPANDED, 200])
def test_prompts_in_either_form_and_in_both(kernels: str, chunk: int, plain: tuple[Path, Reference]) -> None:
    """The first chunk of a prompt may be expanded and the rest absorbed, beside rows that decode."""
    directory, reference = plain
    prompts = prompts_of([1, 37, 90, 150])
    runner = load(directory, kernels=kernels, block_size=8)
    rows = run_greedy(runner, prompts, 12, chunk=chunk)
    assert [row.generated for row in rows] == [reference.tokens(prompt, 12) for prompt in prompts]


def test_long_prompts_are_expanded_where_that_takes_fewer_products() -> None:
    """DeepSeek-V2-Lite and V3 have such numbers; with a wide V, no prompt is."""
    published = Latent(
        kv_rank=512, q_rank=None, nope_dim=128, rope_dim=64, value_dim=128, is_interleaved=True, score_factor=1.0
    )
    assert 170 < least_expanded(published) < 171
    tiny = replace(published, kv_rank=24, nope_dim=16, rope_dim=8, value_dim=16)
    assert least_expanded(tiny) == LEAST_EXPANDED
    assert least_expanded(replace(tiny, value_dim=40)) == float("inf")


def test_kv_is_one_plane_of_one_head(plain: tuple[Path, Reference]) -> None:
    layout = load(plain[0]).layout
    assert (layout.num_kv_heads, layout.num_planes, layout.head_dim) == (1, 1, 24 + 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_unwritten_blocks_hold_does_not_matter(dtype: str, plain: tuple[Path, Reference]) -> None:
    clean, poisoned = load(plain[0], dtype=dtype), load(plain[0], dtype=dtype)
    poisoned.kv_memory().array[:] = 0xFF  # every float of it is NaN
    prompts = prompts_of([3, 40, 77])
    expected, found = (run_greedy(runner, prompts, 12, chunk=60, num_logprobs=0) for runner in (clean, poisoned))
    assert [row.generated for row in found] == [row.generated for row in expected]
    assert np.isfinite([logprobs[0] for row in found for logprobs in row.logprobs]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_steps_compute_what_others_do(
    dtype: str, plain: tuple[Path, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit; all steps without an expanded prompt are recorded."""
    replayed: list[Hashable] = []
    steps, expanded = 0, 0
    replay, prepare = team.Team.replay, LatentCpuAttention.prepare

    def spied(self: team.Team, key: Hashable, inputs: Sequence[torch.Tensor], body: Callable[[], Any]) -> Any:
        replayed.append(key)
        return replay(self, key, inputs, body)

    def counted(self: LatentCpuAttention, *arguments: Any) -> Any:
        nonlocal steps, expanded
        plan = prepare(self, *arguments)
        expanded += plan.expanded is not None
        steps += 1
        return plan

    monkeypatch.setattr(team.Team, "replay", spied)
    monkeypatch.setattr(LatentCpuAttention, "prepare", counted)

    def run() -> list[tuple[list[int], list[Any]]]:
        runner, prompts = load(plain[0], dtype=dtype), prompts_of([5, 40, 77])
        rows = [row for _ in range(2) for row in run_greedy(runner, prompts, 12, chunk=64, num_logprobs=2)]
        return [(row.tokens, row.logprobs) for row in rows]

    recorded = run()
    assert expanded > 0
    assert len(replayed) == steps - expanded
    assert len(set(replayed)) <= steps / 2
    monkeypatch.setattr(decoder, "_MAX_RECORDED_TOKENS", 0)
    assert run() == recorded


def test_choices_prompt_logprobs_and_prefix_hits(plain: tuple[Path, Reference]) -> None:
    directory, reference = plain
    scheduler = DecodeScheduler(64, prefill_chunk=13)
    engine = Engine(load(directory, block_size=8), scheduler, max_num_seqs=8, max_model_len=256, eos_token_ids=())
    driven, prompt = Driven(engine), prompts_of([61])[0]
    handle = driven.submit(prompt, 12, seeds=(1, 2), num_prompt_logprobs=3)
    driven.run()
    expected = reference.tokens(prompt, 12)
    assert [driven.tokens[handle + choice] for choice in (1, 2)] == [expected] * 2
    for score, token, logprobs in zip(driven.scores[handle], prompt[1:], reference.scores(prompt), strict=True):
        assert score.sampled == pytest.approx(float(logprobs[token]), abs=1e-4)
        assert score.rank in possible_ranks(logprobs, token)
    turn = [*prompt, *expected, 7, 8, 9]
    again = driven.submit(turn, 12)
    driven.run()
    assert driven.cached[again] >= 64
    assert driven.tokens[again] == reference.tokens(turn, 12)


def test_a_preempted_sequence_goes_on_as_it_would_have(plain: tuple[Path, Reference]) -> None:
    directory, reference = plain
    block_bytes = load(directory, block_size=8).layout.block_bytes
    runner = load(directory, block_size=8, kv_memory_bytes=26 * block_bytes)
    scheduler = DecodeScheduler(64, prefill_chunk=64)
    driven = Driven(Engine(runner, scheduler, max_num_seqs=4, max_model_len=200, eos_token_ids=()))
    prompts, preempted = prompts_of([60, 70]), False
    handles = [driven.submit(prompt, 60) for prompt in prompts]
    while driven.step():
        preempted |= bool(driven.engine.sequences.requests.in_state(State.PREEMPTED))
    assert preempted
    assert [driven.tokens[handle] for handle in handles] == [reference.tokens(prompt, 60) for prompt in prompts]
