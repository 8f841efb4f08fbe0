"""Paged attention in Triton over slices: each layer reads and writes where its own slice of a block lies."""

import math

import numpy as np
import pytest
import torch

from kvtransfer.layer_groups import divide_layers
from kvtransfer.layout import KvLayout
from services.engine.attention.base import PagedQueries
from services.engine.attention.triton_attention import TritonAttention, WorkCut
from services.engine.kernels.base import Scoring
from tests.gpu.checks.direct_staging import DirectStaging

WINDOW, BLOCK_SIZE, HEAD_DIM, HEADS, SCALE = 20, 16, 16, 2, 0.3
WINDOWS = (None, None, WINDOW, None, None, WINDOW)  # two slices without a window, one with it
NOWHERE = 0  # a block of NaN, of which nothing may be read


class Sliced:
    """A step's rows over a pool in which each row's slices lie anywhere. Rows begin with the same `shared` blocks."""

    def __init__(self, device: torch.device, seq_lens: list[int], counts: list[int], shared: tuple[int, ...]) -> None:
        """shared: blocks that are the same in all rows, of each slice."""
        groups = divide_layers(WINDOWS)
        assert groups is not None
        assert groups.sizes == (2, 1)
        self.groups, self.seq_lens, self.counts = groups, seq_lens, counts
        self.layout = KvLayout(groups.num_layers, 1, HEAD_DIM, BLOCK_SIZE, "float32", groups=groups)
        generator = torch.Generator().manual_seed(5)
        longest = max(seq_lens)
        stem = torch.randn(len(WINDOWS), 2, longest, HEAD_DIM, generator=generator)
        self.kv = []
        for length in seq_lens:
            own = torch.randn(len(WINDOWS), 2, length, HEAD_DIM, generator=generator)
            for number, layers in enumerate(groups.in_order):
                own[list(layers), :, : shared[number] * BLOCK_SIZE] = stem[
                    list(layers), :, : shared[number] * BLOCK_SIZE
                ]
            self.kv.append(own)
        num_blocks = -(-longest // BLOCK_SIZE)
        tables = np.random.default_rng(5).permutation(len(seq_lens) * 3 * num_blocks).astype(np.int32) + 1
        self.tables = tables.reshape(len(seq_lens), 3, num_blocks)
        for number, count in enumerate(shared):
            self.tables[:, number, :count] = self.tables[0, number, :count]
        pool = torch.full(self.layout.shape(tables.size + 1), math.nan)
        for row, (length, count) in enumerate(zip(seq_lens, counts, strict=True)):
            self._place(pool, row, length - count)
        first_seen = [
            max(0, length - count - WINDOW + 1) // BLOCK_SIZE for length, count in zip(seq_lens, counts, strict=True)
        ]
        for row, unseen in enumerate(first_seen):
            self.tables[row, 2, :unseen] = NOWHERE
        self.pool = pool.to(device)

    def _place(self, pool: torch.Tensor, row: int, num_tokens: int) -> None:
        for number, layers in enumerate(self.groups.in_order):
            for token in range(num_tokens):
                block = self.tables[row, number, token // BLOCK_SIZE]
                pool[block, 0, : len(layers), :, token % BLOCK_SIZE] = self.kv[row][list(layers), :, token]

    def expected(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention in float64, [T, heads, head_dim]."""
        found, at = [], 0
        for (k, v), length, count in zip(
            (kv[layer].double() for kv in self.kv), self.seq_lens, self.counts, strict=True
        ):
            for position in range(length - count, length):
                begin = 0 if WINDOWS[layer] is None else max(0, position - WINDOW + 1)
                scores = q[at].double() @ k[begin : position + 1].T * SCALE
                found.append(scores.softmax(-1) @ v[begin : position + 1])
                at += 1
        return torch.stack(found)


@pytest.mark.parametrize(
    ("seq_lens", "counts", "shared", "padded_rows"),
    [
        ([5, 90, 45], [5, 1, 24], (0, 0, 0), None),
        ([1030 + row for row in range(6)], [1] * 6, (64, 60, 0), 8),
    ],
    ids=["mixed", "recorded, with shared prefixes"],
)
def test_layers_of_slices_attend_as_in_float64(
    device: torch.device, seq_lens: list[int], counts: list[int], shared: tuple[int, ...], padded_rows: int | None
) -> None:
    """Rows share a prefix as far as all slices without a window are the same. Blocks behind a window are not read."""
    case = Sliced(device, seq_lens, counts, shared)
    attention = TritonAttention(
        case.pool, case.layout, HEADS, Scoring(SCALE), staging=DirectStaging(device), cut=WorkCut(1)
    )
    starts = np.cumsum([0, *counts], dtype=np.int32)
    queries = PagedQueries(starts, np.array(seq_lens, np.int32), case.tables.reshape(len(seq_lens), -1))
    if padded_rows is None:
        plan = attention.prepare(queries, WINDOWS)
    else:
        plan = attention.prepare_recorded(queries, padded_rows, WINDOWS)
        shared_items = next(launch.items for launch in plan.work.at(0).launches if launch.kind == "shared")
        assert int(shared_items[0, 0]) > 0
        assert int(shared_items[1:, 4].max()) == 60 * BLOCK_SIZE
    num_tokens = sum(counts)
    for layer in (1, 4, 5):  # the second of each slice
        q = torch.randn(padded_rows or num_tokens, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(layer))
        new = torch.cat([kv[layer, :, kv.shape[2] - count :] for kv, count in zip(case.kv, counts, strict=True)], dim=1)
        k, v = (torch.full((len(q), 1, HEAD_DIM), math.nan) for _ in "kv")
        k[:num_tokens, 0], v[:num_tokens, 0] = new
        k, v = k.to(device), v.to(device)
        attention.write(plan, layer, k, v)
        out, _ = attention.attend(plan, layer, q.to(device), k, v)
        torch.testing.assert_close(out[:num_tokens].cpu().double(), case.expected(q, layer), atol=1e-5, rtol=1e-5)
