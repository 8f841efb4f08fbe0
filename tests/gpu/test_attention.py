"""Paged attention in Triton against float64, over steps of `tests.gpu.checks.attention_step`."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvtransfer.layout import KvLayout
from services.engine.attention.base import PagedQueries
from services.engine.attention.triton_attention import Fp8Kv, TritonAttention, TritonPlan, WorkCut
from services.engine.kernels.base import Scoring
from tests.gpu.checks import attention as checks
from tests.gpu.checks.attention import run_case
from tests.gpu.checks.attention_step import Case, Step
from tests.gpu.checks.direct_staging import DirectStaging
from tests.seeds import first_of

MIXED: dict[str, Any] = {"seq_lens": (1, 33, 17, 70, 64, 5), "counts": (1, 33, 1, 20, 1, 2)}
DECODE: dict[str, Any] = {"seq_lens": (1, 16, 17, 90, 33), "counts": (1,) * 5}
LONG: dict[str, Any] = {"seq_lens": (600, 40, 1025), "counts": (1, 1, 1), "num_kv_heads": 1}
ONE: dict[str, Any] = {"num_kv_heads": 1, "num_layers": 1}


def verify(device: torch.device, **options) -> None:
    for check in run_case(Case(**options), device):
        assert check.ok, check


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
def test_rows_of_any_mixture(device: torch.device, rows: dict, dtype: torch.dtype) -> None:
    verify(device, **rows, dtype=dtype, group=3, num_layers=2 if dtype == torch.float32 else 1)


@pytest.mark.few(2)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_head_dims(device: torch.device, head_dim: int) -> None:
    verify(device, seq_lens=(50, 20), counts=(1, 20), head_dim=head_dim, **ONE, dtype=torch.bfloat16)


@pytest.mark.few(2)
@pytest.mark.parametrize("group", [1, 3, 5, 7, 8, 16])
def test_groups_of_queries(device: torch.device, group: int) -> None:
    verify(device, seq_lens=(50, 20, 90), counts=(1, 20, 33), group=group, **ONE)


@pytest.mark.few(1)
@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_block_sizes(device: torch.device, block_size: int) -> None:
    verify(device, seq_lens=(64, 65, 63, 128), counts=(1, 1, 63, 2), block_size=block_size, **ONE)


@pytest.mark.few(1)
@pytest.mark.parametrize("window", [1, 7, 64, 1000])
def test_a_window_hides_older_tokens(device: torch.device, window: int) -> None:
    verify(device, seq_lens=(5, 300, 200, 90), counts=(5, 40, 1, 90), window=window, **ONE)


@pytest.mark.parametrize("padded_rows", [None, 8])
def test_one_row_is_much_longer_than_the_others(device: torch.device, padded_rows: int | None) -> None:
    """Then tables are staged without what is unused."""
    verify(device, seq_lens=(3, 40, 700, 5, 17), counts=(1,) * 5, padded_rows=padded_rows, **ONE)


@pytest.mark.few(1)
@pytest.mark.parametrize("padded_rows", [None, 5])
@pytest.mark.parametrize("num_multiprocessors", [1, 12])
def test_long_rows_are_split(device: torch.device, num_multiprocessors: int, padded_rows: int | None) -> None:
    verify(device, **LONG, num_multiprocessors=num_multiprocessors, padded_rows=padded_rows, num_layers=1)


def test_a_long_chunk_alone_is_split(device: torch.device) -> None:
    verify(device, seq_lens=(4500,), counts=(3,), num_multiprocessors=8, dtype=torch.bfloat16, **ONE)


def test_a_window_in_a_split_row(device: torch.device) -> None:
    verify(device, **LONG, num_multiprocessors=12, window=700, num_layers=1)


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", [DECODE, MIXED, LONG], ids=["decode", "mixed", "long"])
def test_fp8_with_scales(device: torch.device, rows: dict) -> None:
    """Compared with what the pool holds."""
    verify(device, **rows, fp8=True, dtype=torch.bfloat16, num_multiprocessors=12, group=3)


@pytest.mark.few(1)
@pytest.mark.parametrize("padded_rows", [None, 12])
def test_rows_that_share_a_prefix(device: torch.device, padded_rows: int | None) -> None:
    """Two groups, one of which has a group inside, and one row beside them."""
    case = Case(
        seq_lens=(1100, 1090, 1153, 1217, 1089, 520, 513, 700, 40),
        counts=(1,) * 9,
        shared=((0, 5, 1088), (5, 8, 512), (6, 8, 512)),
        group=3,
        padded_rows=padded_rows,
        **ONE,
    )
    assert has_shared_items(Step(case, device))
    for check in run_case(case, device):
        assert check.ok, check


def test_more_rows_share_a_prefix_than_a_tile_takes(device: torch.device) -> None:
    lengths = tuple(600 + row for row in range(20))
    case = Case(seq_lens=lengths, counts=(1,) * 20, shared=((0, 20, 592),), group=8, dtype=torch.bfloat16, **ONE)
    assert has_shared_items(Step(case, device))
    for check in run_case(case, device):
        assert check.ok, check


@pytest.mark.parametrize("padded_rows", first_of(1, [8, None]))
def test_layers_with_windows_of_their_own(device: torch.device, padded_rows: int | None) -> None:
    """One step, recorded or not: the first layer alone attends to a prefix of all rows together."""
    case = Case(
        seq_lens=(1000, 999, 1005, 1010, 1001, 998, 30),
        counts=(1,) * 7,
        shared=((0, 6, 992),),
        window=(None, 20, 100),
        num_layers=3,
        num_kv_heads=1,
        head_dim=16,
        padded_rows=padded_rows,
    )
    assert has_shared_items(Step(case, device))
    for check in run_case(case, device):
        assert check.ok, check


@pytest.mark.parametrize("padded_rows", first_of(1, [None, 8]))
def test_soft_caps_and_sinks(device: torch.device, padded_rows: int | None) -> None:
    """In rows with one item and with several, after a shared prefix, and in longer rows."""
    counts = (1,) * 7 if padded_rows else (1,) * 6 + (25,)
    case = Case(
        seq_lens=(1000, 999, 1005, 1010, 1001, 998, 30),
        counts=counts,
        shared=((0, 6, 992),),
        softcap=0.7,
        sinks=True,
        num_layers=2,
        num_kv_heads=2,
        group=2,
        head_dim=16,
        padded_rows=padded_rows,
    )
    for check in run_case(case, device):
        assert check.ok, check


def has_shared_items(step: Step) -> bool:
    plan = step.plan(step.attention())
    return any(launch.kind == "shared" and int(launch.items[0, 0]) > 0 for launch in plan.work.at(0).launches)


@pytest.mark.long
def test_random_cases(device: torch.device) -> None:
    """Other ones with every seed; on a GPU, `loadtest.gpu` runs many and long ones."""
    for check in checks.check(device, seed=1, num_cases=4, max_tokens=60):
        assert check.ok, check


@pytest.mark.parametrize("window", first_of(1, [200, None]))
def test_with_fixed_splits_a_row_alone_is_the_row_in_a_batch(device: torch.device, window: int | None) -> None:
    """To the bit, for rows with one token and for longer ones."""
    case = Case(
        seq_lens=(600, 300, 40, 130),
        counts=(1, 1, 1, 50),
        split_keys=128,
        window=window,
        num_multiprocessors=12,
        dtype=torch.bfloat16,
        **ONE,
    )
    step = Step(case, device)
    out, lse = step.run()[0]
    starts = step.queries.query_starts
    for row, count in enumerate(case.counts):
        alone = Step(replace(case, num_multiprocessors=2), device)
        alone.case = replace(case, seq_lens=(case.seq_lens[row],), counts=(count,))
        mine = slice(starts[row], starts[row + 1])
        alone.tables, alone.kv, alone.q = alone.tables[row : row + 1], [alone.kv[row]], alone.q[:, mine]
        same_out, same_lse = alone.run()[0]
        assert torch.equal(same_out, out[mine])
        assert torch.equal(same_lse, lse[mine])


def addresses(plan: TritonPlan) -> list[object]:
    """What a graph would keep of a step's launches."""
    work = plan.work.at(0)
    assert work.merges is not None
    outputs = plan.outputs
    buffers = outputs.out, outputs.lse, outputs.partial_out, outputs.partial_lse
    grids = [(launch.kind, launch.grid) for launch in work.launches]
    return [*(buffer.data_ptr() for buffer in buffers), *grids, work.merges.shape, plan.offsets.shape]


class OneBuffer:
    """Puts arrays one after the other into a buffer that stays, as a runner with graphs does."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(1 << 20, dtype=torch.uint8, device=device)
        self.addresses: list[int] = []
        self._at = 0

    def start(self) -> None:
        """A step begins."""
        self._at, self.addresses = 0, []
        self._buffer.fill_(0xAA)

    def put(self, array: np.ndarray, *, fixed: bool = False) -> torch.Tensor:
        """See `Staging.put`."""
        part = self._buffer[self._at : self._at + array.nbytes]
        self.addresses.append(part.data_ptr())
        self._at += -(-array.nbytes // 16) * 16
        return (
            part.copy_(torch.from_numpy(array).view(-1).view(torch.uint8))
            .view(torch.from_numpy(array).dtype)
            .view(array.shape)
        )


def test_steps_of_a_bucket_launch_the_same(device: torch.device) -> None:
    """With and without splits and shared prefixes: only what lies at the staged addresses changes."""
    staging = OneBuffer(device)
    layout = KvLayout(num_layers=1, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32")
    attention = TritonAttention(
        torch.zeros(layout.shape(700), device=device), layout, 4, Scoring(0.25), staging=staging, cut=WorkCut(12)
    )
    kept = []
    tables = np.arange(600, dtype=np.int32).reshape(6, 100)
    alike = np.tile(tables[:1], (6, 1))
    for lengths, table in (([1], tables), ([1600] * 6, tables), ([900, 40], tables), ([1600] * 6, alike)):
        staging.start()
        starts = np.arange(len(lengths) + 1, dtype=np.int32)
        queries = PagedQueries(starts, np.array(lengths, np.int32), table[: len(lengths)])
        plan = attention.prepare_recorded(queries, 6)
        kept.append((addresses(plan), staging.addresses))
    assert all(other == kept[0] for other in kept)


def test_smaller_buckets_use_the_buffers_of_larger_ones(device: torch.device) -> None:
    step = Step(Case(seq_lens=(20,), counts=(1,), padded_rows=8), device)
    attention = step.attention()
    large, small, again = (attention.prepare_recorded(step.queries, rows).outputs for rows in (8, 4, 8))
    assert small.out.data_ptr() == large.out.data_ptr() == again.out.data_ptr()
    assert small.partial_out.data_ptr() == large.partial_out.data_ptr()
    assert len(small.out) == len(small.lse) == 4


def test_a_step_for_a_graph_has_one_token_a_row(device: torch.device) -> None:
    attention = Step(Case(seq_lens=(20,), counts=(1,)), device).attention()
    for starts, padded_rows in (([0, 2], 4), ([0, 1, 2], 1)):
        lengths = np.full(len(starts) - 1, 20, np.int32)
        queries = PagedQueries(np.array(starts, np.int32), lengths, np.ones((len(lengths), 2), np.int32))
        with pytest.raises(ValueError, match="step that is replayed"):
            attention.prepare_recorded(queries, padded_rows)


def test_what_it_does_not_support_is_refused(device: torch.device) -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=16, block_size=16, dtype="bfloat16")
    pool = torch.zeros(layout.shape(2), dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="17 query heads"):
        TritonAttention(pool, layout, 17, Scoring(1.0), staging=DirectStaging(device), cut=WorkCut(1))
    scales = torch.ones(1, 2, 1, device=device)
    with pytest.raises(ValueError, match="scales"):
        TritonAttention(
            pool,
            layout,
            1,
            Scoring(1.0),
            staging=DirectStaging(device),
            cut=WorkCut(1),
            fp8=Fp8Kv(scales, torch.bfloat16),
        )


def big_pool(device: torch.device) -> tuple[torch.Tensor, KvLayout]:
    """More than 2**31 elements."""
    layout = KvLayout(num_layers=64, num_kv_heads=8, head_dim=128, block_size=64, dtype="bfloat16")
    num_blocks = 2**31 // (64 * 8 * 128 * 64 * 2) + 2
    if device.type == "cuda":
        return torch.zeros(layout.shape(num_blocks), dtype=torch.bfloat16, device=device), layout
    raw = np.zeros(num_blocks * layout.block_bytes, np.uint8)  # not touched: costs no memory
    return torch.from_numpy(raw).view(torch.bfloat16).view(layout.shape(num_blocks)), layout


def test_offsets_beyond_two_to_the_31_elements(device: torch.device) -> None:
    """The pool's last block, in the last layer, is written and read."""
    pool, layout = big_pool(device)
    attention = TritonAttention(pool, layout, 8, Scoring(128**-0.5), staging=DirectStaging(device), cut=WorkCut(8))
    table = np.array([[len(pool) - 1]], np.int32)
    plan = attention.prepare(PagedQueries(np.array([0, 1], np.int32), np.array([1], np.int32), table))
    k = torch.full((1, 8, 128), 2.0, dtype=torch.bfloat16, device=device)
    v = torch.full((1, 8, 128), 3.0, dtype=torch.bfloat16, device=device)
    attention.write(plan, 63, k, v)
    out, _ = attention.attend(plan, 63, k, k, v)
    assert torch.equal(out, v)
    assert pool[-1, :, 63, 0, 0].eq(2).all()
    assert pool[-1, :, 63, 1, 0].eq(3).all()


def captured(launch: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """A CUDA graph of what is launched; without CUDA, the same launches again."""
    launch()
    if device.type == "cpu":
        return launch
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return lambda: graph.replay()


def test_a_graph_serves_other_steps(device: torch.device) -> None:
    """One capture, of a step without splits, serves ones with splits and with a shared prefix."""
    options: dict[str, Any] = {"num_multiprocessors": 12, "num_kv_heads": 1, "padded_rows": 6}
    cases = [
        Case(seq_lens=(1,), counts=(1,), **options),
        Case(seq_lens=(700, 40, 900), counts=(1, 1, 1), seed=1, **options),
        Case(seq_lens=(900,) * 6, counts=(1,) * 6, shared=((0, 6, 880),), seed=2, **options),
        Case(seq_lens=(17, 30), counts=(1, 1), seed=3, **options),
    ]
    steps = [Step(case, device) for case in cases]
    pool = torch.full(max((step.pool for step in steps), key=len).shape, math.nan, device=device)
    staging = OneBuffer(device)
    attention = TritonAttention(pool, steps[0].layout, 4, Scoring(0.125), staging=staging, cut=WorkCut(12))
    q = torch.zeros(6, 4, 64, device=device)
    k, v = torch.zeros(2, 6, 1, 64, device=device)

    staging.start()
    plan = attention.prepare_recorded(steps[0].queries, 6)
    out, lse = plan.outputs.out, plan.outputs.lse

    def launch() -> None:
        attention.write(plan, 1, k, v)
        attention.attend(plan, 1, q, k, v)

    replay = captured(launch, device)
    for step in steps:
        num_rows = len(step.case.seq_lens)
        pool[: len(step.pool)] = step.pool
        q[:num_rows] = step.q[1, :num_rows]
        for target, new in zip((k, v), step.new_kv(1), strict=True):
            target[:num_rows] = new[:num_rows]
        staging.start()
        attention.prepare_recorded(step.queries, 6)
        for tensor in (out, lse, plan.outputs.partial_out, plan.outputs.partial_lse):
            tensor.fill_(math.nan)
        replay()
        expected, expected_lse = step.expected(1)
        torch.testing.assert_close(out[:num_rows].double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[:num_rows].double(), expected_lse, atol=1e-5, rtol=1e-5)
        assert out[num_rows:].isnan().all()


def test_a_step_for_a_graph_may_have_no_rows(device: torch.device) -> None:
    """As when a graph is made before there is any request."""
    step = Step(Case(seq_lens=(20,), counts=(1,), padded_rows=3, **ONE), device)
    none = PagedQueries(np.zeros(1, np.int32), np.empty(0, np.int32), np.empty((0, 2), np.int32))
    attention = step.attention()
    plan = attention.prepare_recorded(none, 3)
    before = step.pool.clone()
    k, v = torch.ones(2, 3, 1, 64, device=device)
    attention.write(plan, 0, k, v)
    out, _ = attention.attend(plan, 0, torch.ones(3, 4, 64, device=device), k, v)
    assert (out == 0).all()
    assert torch.equal(before.view(torch.int32), step.pool.view(torch.int32))
