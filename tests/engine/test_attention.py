"""Paged attention against a plain float64 reference."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from kvtransfer.layout import KvLayout
from services.engine.attention.base import PagedQueries
from services.engine.attention.by_layer import Windows
from services.engine.attention.cpu_attention import CpuAttention
from services.engine.attention.torch_attention import TILE, TorchAttention
from services.engine.kernels.base import Scoring

NUM_LAYERS = 3
BACKENDS: dict[str, Callable[..., Any]] = {
    "torch": TorchAttention,
    "cpu-without-kernels": partial(CpuAttention, fused=False),
    "cpu": partial(CpuAttention, fused=True),
}


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs over every backend."""
    monkeypatch.setattr(Case, "backend", staticmethod(BACKENDS[request.param]), raising=False)


@dataclass
class Case:
    """Random rows over a scattered pool, whose unwritten slots are NaN."""

    backend: ClassVar[Callable[..., Any]]
    lengths: list[int]  # of each row, new tokens included
    counts: list[int]  # new tokens of each row
    head_dim: int = 32
    num_heads: int = 6
    num_kv_heads: int = 2
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    has_sinks: bool = False
    scale: float | None = None  # None: 1 / sqrt(head_dim)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.layout = KvLayout(
            NUM_LAYERS, self.num_kv_heads, self.head_dim, self.block_size, str(self.dtype).removeprefix("torch.")
        )
        needed = [-(-length // self.block_size) for length in self.lengths]
        self.pool = torch.full(self.layout.shape(sum(needed) + 1), math.nan, dtype=self.dtype)
        ids = np.random.default_rng(0).permutation(sum(needed)) + 1  # block 0 belongs to nobody
        self.tables = np.zeros((len(needed), max(needed) + 2), np.int32)
        for row, (count, end) in enumerate(zip(needed, np.cumsum(needed), strict=True)):
            self.tables[row, :count] = ids[end - count : end]
        shape = (NUM_LAYERS, 2, sum(self.lengths), self.num_kv_heads, self.head_dim)
        self.kv = torch.randn(shape, generator=generator).to(self.dtype)
        queries = (NUM_LAYERS, sum(self.counts), self.num_heads, self.head_dim)
        self.q = torch.randn(queries, generator=generator).to(self.dtype)
        sinks = torch.randn(NUM_LAYERS, self.num_heads, generator=generator) if self.has_sinks else None
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        self.scoring = Scoring(scale, self.softcap, sinks)
        self.attention = self.backend(self.pool, self.layout, self.num_heads, self.scoring)

    def share(self, num_rows: int, num_tokens: int) -> None:
        """The first rows have the same first tokens, and blocks for them."""
        starts = np.cumsum([0, *self.lengths[:-1]])
        for row in range(1, num_rows):
            self.tables[row, : num_tokens // self.block_size] = self.tables[0, : num_tokens // self.block_size]
            self.kv[:, :, starts[row] : starts[row] + num_tokens] = self.kv[:, :, :num_tokens]

    def tokens(self, first: list[int], last: list[int]) -> torch.Tensor:
        """Indices into kv of each row's tokens from first to last."""
        starts = np.cumsum([0, *self.lengths[:-1]])
        pieces = [np.arange(s + a, s + b) for s, a, b in zip(starts, first, last, strict=True)]
        return torch.from_numpy(np.concatenate(pieces))

    def run(self, window: Windows = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """All layers: first everything but the new tokens is written (rows that have some), then the step."""
        before = [length - count for length, count in zip(self.lengths, self.counts, strict=True)]
        old = [row for row, length in enumerate(before) if length]
        if old:
            plan = self.attention.prepare(
                self._queries([before[row] for row in old], [before[row] for row in old], old)
            )
            chosen = self.tokens([0] * len(before), before)
            for layer in range(NUM_LAYERS):
                self.attention.write(plan, layer, *self.kv[layer, :, chosen])
        plan = self.attention.prepare(self._queries(self.lengths, self.counts, list(range(len(before)))), window)
        chosen = self.tokens(before, self.lengths)
        results = []
        for layer in range(NUM_LAYERS):
            self.attention.write(plan, layer, *self.kv[layer, :, chosen])
            out, lse = self.attention.attend(plan, layer, self.q[layer], *self.kv[layer, :, chosen])
            results.append((out.clone(), lse.clone()))
        return results

    def expected(self, layer: int, window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Row by row, in float64."""
        outs, lses = [], []
        group = self.num_heads // self.num_kv_heads
        kv = self.kv[layer].double().repeat_interleave(group, dim=2)
        query_ends, ends = np.cumsum(self.counts), np.cumsum(self.lengths)
        for row, (length, count) in enumerate(zip(self.lengths, self.counts, strict=True)):
            q = self.q[layer, query_ends[row] - count : query_ends[row]].double()
            k, v = kv[:, ends[row] - length : ends[row]]
            scores = torch.einsum("qhd,khd->hqk", q, k) * self.scoring.scale
            behind = torch.arange(length - count, length)[:, None] - torch.arange(length)
            hidden = (behind < 0) | (behind >= (window or length))
            if self.softcap is not None:
                scores = self.softcap * (scores / self.softcap).tanh()
            scores = scores.masked_fill(hidden, -math.inf)
            if self.scoring.sinks is not None:  # a key without a value
                sink = self.scoring.sinks[layer].double()[:, None, None].expand(-1, count, 1)
                scores = torch.cat((scores, sink), dim=-1)
                v = torch.cat((v, torch.zeros_like(v[:1])))
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
            lses.append(scores.logsumexp(-1).T)
        return torch.cat(outs), torch.cat(lses)

    def _queries(self, lengths: list[int], counts: list[int], rows: list[int]) -> PagedQueries:
        starts = np.cumsum([0, *counts], dtype=np.int32)
        return PagedQueries(starts, np.array(lengths, np.int32), self.tables[rows])


def check(case: Case, window: int | None = None) -> None:
    exact = case.dtype == torch.float32
    for layer, (out, lse) in enumerate(case.run(window)):
        expected, expected_lse = case.expected(layer, window)
        assert out.shape == case.q[layer].shape
        assert lse.dtype == torch.float32
        torch.testing.assert_close(out.double(), expected, atol=2e-6 if exact else 2e-2, rtol=1e-5 if exact else 2e-2)
        torch.testing.assert_close(
            lse.double(), expected_lse, atol=5e-6 if exact else 2e-2, rtol=1e-6 if exact else 1e-2
        )


DECODE = ([1, 16, 17, 100, 33, 250], [1] * 6)
MIXED = ([1, 40, 17, 100, 300, 64, 5], [1, 40, 1, 37, 300, 1, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("lengths", "counts"), [DECODE, MIXED, ([48, 48], [1, 1]), ([30], [30])])
def test_rows_of_any_mixture(lengths: list[int], counts: list[int], dtype: torch.dtype) -> None:
    check(Case(lengths, counts, dtype=dtype))


@pytest.mark.few(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 24, 40, 64, 80, 96, 128])
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    check(Case([50, 20, 90], [1, 20, 33], head_dim=head_dim, dtype=dtype))


@pytest.mark.few(4)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_single_tokens_over_many_keys(head_dim: int, window: int | None) -> None:
    lengths = [1, 31, 32, 33, 64, 129, 400]
    check(Case(lengths, [1] * len(lengths), head_dim=head_dim, dtype=torch.bfloat16), window)


@pytest.mark.few(4)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (4, 1), (8, 2), (10, 2)])
def test_groups_of_queries(num_heads: int, num_kv_heads: int) -> None:
    check(Case([50, 20, 90], [1, 20, 33], num_heads=num_heads, num_kv_heads=num_kv_heads))


@pytest.mark.few(1)
def test_groups_of_more_than_four_queries_in_bfloat16() -> None:
    check(Case([50, 20, 190], [1, 20, 1], num_heads=10, num_kv_heads=2, dtype=torch.bfloat16))


@pytest.mark.few(2)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 1, 64), (32, 2, 128), (8, 2, 256)])
def test_single_tokens_of_many_or_wide_heads(
    num_heads: int, num_kv_heads: int, head_dim: int, window: int | None
) -> None:
    shape: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    case = Case([1, 50, 20, 190], [1] * 4, **shape, dtype=torch.bfloat16)
    case.kv[:, 0, -190:] *= torch.linspace(0, 8, 190).view(-1, 1, 1)  # scores that grow
    check(case, window)
    case = Case([700, 650, 720, 40], [1] * 4, **shape, dtype=torch.bfloat16)
    case.share(3, 600)
    check(case, window)


@pytest.mark.few(1)
def test_single_tokens_of_many_heads_in_float32() -> None:
    check(Case([1, 50, 20, 190], [1] * 4, num_heads=32, num_kv_heads=2, head_dim=128))


@pytest.mark.parametrize("backend", ["cpu"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_lies_behind_the_last_key_does_not_matter(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """To kernels of single tokens: a block that another worker sent may have anything there."""
    case = Case([1, 20, 33, 47], [1] * 4, dtype=dtype)
    prepare = case.attention.prepare

    def prepare_and_spoil(queries: PagedQueries, window: int | None = None) -> Any:
        plan = prepare(queries, window)
        for table, length in zip(queries.block_tables, queries.seq_lens.tolist(), strict=True):
            case.pool[table[(length - 1) // 16], :, :, :, (length - 1) % 16 + 1 :] = math.nan
        return plan

    monkeypatch.setattr(case.attention, "prepare", prepare_and_spoil)
    check(case)


@pytest.mark.few(4)
@pytest.mark.parametrize("block_size", [1, 8, 32, 64])
def test_block_sizes(block_size: int) -> None:
    check(Case(*MIXED, block_size=block_size))


@pytest.mark.few(1)
@pytest.mark.parametrize("block_size", [8, 32])
def test_block_sizes_in_bfloat16(block_size: int) -> None:
    check(Case(*MIXED, block_size=block_size, dtype=torch.bfloat16))


@pytest.mark.few(1)
def test_prompts_longer_than_what_amx_takes_at_once() -> None:
    """Keys in several segments, rows in several tiles."""
    check(Case([1100, 1300, 3], [1100, 20, 1], head_dim=128, dtype=torch.bfloat16))


def test_scores_that_grow_along_the_keys_in_bfloat16() -> None:
    """Sums over the keys before are made smaller, again and again."""
    case = Case([600, 600, 450], [500, 1, 20], dtype=torch.bfloat16)
    starts = np.cumsum([0, *case.lengths[:-1]])
    for start, length in zip(starts, case.lengths, strict=True):
        case.kv[:, 0, start : start + length] *= torch.linspace(0, 8, length).view(-1, 1, 1)
    check(case)


@pytest.mark.few(4)
@pytest.mark.parametrize("count", [TILE - 1, TILE, TILE + 1, 3 * TILE + 7])
def test_queries_longer_than_a_tile(count: int) -> None:
    check(Case([count + 100, count, 3], [count, count, 1]))


@pytest.mark.few(6)
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_sees_none_of_the_keys_that_others_of_its_tile_see(head_dim: int, dtype: torch.dtype) -> None:
    """A prompt with a window has such queries. Each head_dim has a scale of its own, which hidden scores get too."""
    check(Case([300], [300], head_dim=head_dim, num_heads=4, dtype=dtype), 24)


@pytest.mark.parametrize("scale", [1e-5, 5.0, 100.0])
def test_scores_of_any_scale_hide_keys(scale: float) -> None:
    """Some models' settings name it. What is hidden stays so; rounded scores are off by more, the larger they are."""
    case = Case([300, 150, 77], [300, 1, 77], scale=scale, block_size=8)
    for layer, (out, lse) in enumerate(case.run(24)):
        expected, expected_lse = case.expected(layer, 24)
        torch.testing.assert_close(out.double(), expected, atol=1e-5 + 1e-5 * scale, rtol=0)
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5 + 1e-5 * scale, rtol=0)


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_behind_a_window_are_not_read(
    block_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their entries name block 0, which is all NaN."""
    case = Case([100, 77, 90], [1, 1, 40], block_size=block_size, dtype=dtype)
    prepare = case.attention.prepare

    def prepare_and_free(queries: PagedQueries, window: int | None = None) -> Any:
        if window is not None:
            seen = queries.seq_lens - np.diff(queries.query_starts) + 1 - window  # first key of the row's first token
            for table, first_key in zip(queries.block_tables, seen.tolist(), strict=True):
                table[: first_key // block_size] = 0
        return prepare(queries, window)

    monkeypatch.setattr(case.attention, "prepare", prepare_and_free)
    check(case, 20)


@pytest.mark.few(2)
@pytest.mark.parametrize("backend", ["cpu"], indirect=True)
@pytest.mark.parametrize(("block_size", "window"), [(16, None), (8, 30), (32, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_narrowed_plan_attends_as_the_whole_one(block_size: int, window: int | None, dtype: torch.dtype) -> None:
    case = Case([700, 40, 300], [400, 40, 200], block_size=block_size, dtype=dtype)
    check_narrowed(case, torch.tensor([399, 0, 431, 639, 399]), window)


@pytest.mark.parametrize("backend", ["cpu"], indirect=True)
def test_a_narrowed_plan_has_the_prefixes_that_rows_share() -> None:
    case = Case([1100, 1090, 300], [1, 1, 200])
    case.share(2, 1088)
    narrowed = check_narrowed(case, torch.tensor([0, 1, 201]), None)
    assert narrowed.work.at(0).several is not None


def check_narrowed(case: Case, wanted: torch.Tensor, window: int | None) -> Any:
    """Returns the plan of the wanted tokens."""
    whole = case.run(window)
    plan = case.attention.prepare(case._queries(case.lengths, case.counts, [0, 1, 2]), window)
    new = case.tokens([length - count for length, count in zip(case.lengths, case.counts, strict=True)], case.lengths)
    narrowed = case.attention.narrow(plan, wanted, 0)
    tolerance = 2e-6 if case.dtype == torch.float32 else 2e-2
    for layer, (out, lse) in enumerate(whole):
        case.attention.write(plan, layer, *case.kv[layer, :, new])
        nothing = case.kv[layer, 0, :0]
        found, found_lse = case.attention.attend(narrowed, layer, case.q[layer, wanted], nothing, nothing)
        torch.testing.assert_close(found, out[wanted], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(found_lse, lse[wanted], atol=max(tolerance, 5e-6), rtol=1e-6)
    assert case.attention.narrow(plan, torch.zeros(len(new) // 16 + 1, dtype=torch.int64), 0) is None
    return narrowed


@pytest.mark.few(8)
@pytest.mark.parametrize("window", [1, 7, 64, 10_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_hides_older_tokens(window: int, dtype: torch.dtype) -> None:
    """Long rows too, where whole stretches of keys are hidden."""
    check(Case([*MIXED[0], 1500], [*MIXED[1], 1], dtype=dtype), window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_with_windows_of_their_own(dtype: torch.dtype) -> None:
    """One step: rows that share a prefix, which the first layer alone attends to together, and longer rows."""
    lengths = [1160, 1130, 1140, 40, 300]
    case = Case(lengths, [1, 1, 1, 40, 30], dtype=dtype)
    case.share(3, 1120)
    windows = (None, 24, 100)
    exact = dtype == torch.float32
    for layer, (out, lse) in enumerate(case.run(windows)):
        expected, expected_lse = case.expected(layer, windows[layer])
        torch.testing.assert_close(out.double(), expected, atol=2e-6 if exact else 2e-2, rtol=1e-5 if exact else 2e-2)
        torch.testing.assert_close(
            lse.double(), expected_lse, atol=5e-6 if exact else 2e-2, rtol=1e-6 if exact else 1e-2
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(0.5, True), (None, True)])
def test_soft_caps_and_sinks(softcap: float | None, has_sinks: bool, dtype: torch.dtype) -> None:
    """In rows that share a prefix, which count their sink once; with a window too."""
    lengths = [1160, 1130, 1140, 40, 300]
    shape: dict[str, Any] = {"dtype": dtype, "softcap": softcap, "has_sinks": has_sinks}
    case = Case(lengths, [1, 1, 1, 40, 30], **shape)
    case.share(3, 1120)
    check(case)
    check(Case(lengths, [1, 20, 1, 40, 30], **shape), 50)


def test_many_rows_are_attended_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that would need too much memory at once is cut; the results do not tell."""
    monkeypatch.setattr("services.engine.attention.torch_attention.PART_ELEMENTS", 1 << 16)
    check(Case([*range(1, 60)], [1] * 59))


def test_writing_goes_to_the_named_slots_alone() -> None:
    """Every other slot keeps its bytes, but for the rest of a block that is begun: that is cleared."""
    case = Case([20, 16], [1, 16])
    case.run()
    first, second, other = case.tables[0, 1], case.tables[1, 0], 0
    assert torch.equal(case.pool[first][:, 1, 0, 3], case.kv[1, 0, 19])
    assert torch.equal(case.pool[second][:, 2, 1, 5], case.kv[2, 1, 25])
    assert (case.pool[first][:, :, :, 4:] == 0).all()
    assert case.pool[other].isnan().all()


def test_index_work_beyond_two_to_the_31_elements() -> None:
    """Offsets are 64 bits wide: a sparse pool of 2**31 elements and more, whose last block is used."""
    layout = KvLayout(num_layers=64, num_kv_heads=8, head_dim=128, block_size=64, dtype="bfloat16")
    num_blocks = 2**31 // (64 * 8 * 128 * 64 * 2) + 2
    raw = np.zeros(num_blocks * layout.block_bytes, np.uint8)  # not touched: costs no memory
    pool = torch.from_numpy(raw).view(torch.bfloat16).view(layout.shape(num_blocks))
    attention = Case.backend(pool, layout, 8, Scoring(128**-0.5))
    table = np.array([[num_blocks - 1]], np.int32)
    plan = attention.prepare(PagedQueries(np.array([0, 1], np.int32), np.array([1], np.int32), table))
    k, v = torch.full((1, 8, 128), 2.0).bfloat16(), torch.full((1, 8, 128), 3.0).bfloat16()
    attention.write(plan, 63, k, v)
    out, _ = attention.attend(plan, 63, k, k, v)
    assert torch.equal(out, v)
    assert pool[-1, :, 63, 0, 0].eq(2).all()


SHARED = [
    ([700, 650, 720, 40], [1, 1, 1, 1]),  # a group that decodes, and one beside it
    ([700, 650, 720, 40], [20, 10, 100, 40]),  # that prefills after a prefix
    ([700, 650, 720, 710, 40], [1, 30, 1, 1, 7]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("lengths", "counts"), SHARED)
def test_rows_that_share_a_prefix(lengths: list[int], counts: list[int], dtype: torch.dtype) -> None:
    """The last row shares nothing."""
    case = Case(lengths, counts, dtype=dtype)
    case.share(len(lengths) - 1, 600)
    check(case)
