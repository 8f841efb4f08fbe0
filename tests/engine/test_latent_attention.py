"""Multi-head latent attention: both of its forms, by torch and by kernels, compute what `transformers` does."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtransfer.layout import KvLayout
from services.engine.attention.base import PagedQueries
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


@pytest.mark.few(2)
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


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_unwritten_blocks_hold_does_not_matter(dtype: str, plain: tuple[Path, Reference]) -> None:
    clean, poisoned = load(plain[0], dtype=dtype), load(plain[0], dtype=dtype)
    poisoned.kv_memory().array[:] = 0xFF  # every float of it is NaN
    prompts = prompts_of([3, 40, 77])
    expected, found = (run_greedy(runner, prompts, 12, chunk=60, num_logprobs=0) for runner in (clean, poisoned))
    assert [row.generated for row in found] == [row.generated for row in expected]
    assert np.isfinite([logprobs[0] for row in found for logprobs in row.logprobs]).all()


@pytest.mark.few(1)
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


@pytest.mark.few(1)
@pytest.mark.parametrize("num_heads", [3, 16, 40, 128])
def test_a_step_reads_each_latent_once_for_all_heads(num_heads: int) -> None:
    """The keys of a tile are copied once: a row that decodes is one tile, whose keys are as many as the row has."""
    layout = KvLayout(1, 1, 24 + 8, 16, "float32", num_planes=1)
    latent = Latent(
        kv_rank=24, q_rank=None, nope_dim=16, rope_dim=8, value_dim=16, is_interleaved=True, score_factor=1.0
    )
    seq_lens = np.array([4096, 1, 17, 130], np.int32)
    blocks = np.arange(4 * 256, dtype=np.int32).reshape(4, 256)
    attention = LatentCpuAttention(torch.zeros(layout.shape(1024)), layout, num_heads, latent, fused=True)
    plan = attention.prepare(PagedQueries(np.arange(5, dtype=np.int32), seq_lens, blocks))
    (tiles,) = plan.absorbed.passes
    assert tiles.first_keys.tolist() == [0] * 4
    read = tiles.limits[tiles.starts[1:] - 1].sum() * layout.token_bytes
    assert read == seq_lens.sum() * layout.token_bytes


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "kv_rank"), [(5, 48), (20, 48), (40, 18)])
def test_kernels_attend_as_float64_does_and_no_worse_than_torch(
    num_heads: int, kv_rank: int, dtype: torch.dtype
) -> None:
    """Single tokens and some of a row, at borders of tiles and of segments; torch's result is that of the same form."""
    generator = torch.Generator().manual_seed(7)
    rope_dim, name = 8, str(dtype).removeprefix("torch.")
    latent = Latent(
        kv_rank=kv_rank, q_rank=None, nope_dim=16, rope_dim=8, value_dim=16, is_interleaved=True, score_factor=1.0
    )
    layout = KvLayout(2, 1, kv_rank + rope_dim, 16, name, num_planes=1)
    seq_lens = np.array([1, 128, 129, 300, 60], np.int32)
    starts = np.array([0, 1, 2, 3, 4, 30], np.int32)
    tables = np.random.default_rng(1).permutation(5 * 19).astype(np.int32).reshape(5, 19)
    queries = PagedQueries(starts, seq_lens, tables)
    pool = torch.randn(layout.shape(95), generator=generator).to(dtype)
    q = torch.randn(30, num_heads, kv_rank + rope_dim, generator=generator).to(dtype)
    products = _Unchanged()
    errors = []
    for fused in (True, False):
        attention = LatentCpuAttention(pool.clone(), layout, num_heads, latent, fused=fused)
        attention._least_expanded = float("inf")
        plan = attention.prepare(queries)
        attention._pool.copy_(pool)  # `prepare` clears blocks that new tokens begin
        nope, rope = q[..., :kv_rank].contiguous(), q[..., kv_rank:].contiguous()
        found = attention.attend(plan, 1, nope, rope, products)
        errors.append(_error(found, q, pool, queries, latent))
    assert errors[0] <= max(1.05 * errors[1], 1e-6)


class _Unchanged:
    """`LatentProducts` that change nothing."""

    expansions = ()

    def absorb(self, q_nope: torch.Tensor) -> torch.Tensor:
        return q_nope

    def values(self, found: torch.Tensor) -> torch.Tensor:
        return found.clone()


def _error(found: torch.Tensor, q: torch.Tensor, pool: torch.Tensor, queries: PagedQueries, latent: Latent) -> float:
    """Root of the mean squared difference from attention in float64, over layer 1 of the pool."""
    squares, count = 0.0, 0
    for row, length in enumerate(queries.seq_lens.tolist()):
        begin, end = queries.query_starts[row : row + 2].tolist()
        rows = pool[queries.block_tables[row], 0, 1, 0].flatten(0, 1)[:length].double()
        scores = torch.einsum("qhd,kd->hqk", q[begin:end].double(), rows) * latent.scale
        positions = torch.arange(length - (end - begin), length)
        scores.masked_fill_(torch.arange(length) > positions[:, None], -torch.inf)
        expected = torch.einsum("hqk,kd->qhd", scores.softmax(-1), rows[:, : latent.kv_rank])
        squares += float((found[begin:end].double() - expected).square().sum())
        count += expected.numel()
    return float((squares / count) ** 0.5)
