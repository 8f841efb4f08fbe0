"""Attention kernels at each border of numbers of tokens that their code computes, against float64.

Memory of the threads is NaN before each step, and so are results and what nobody wrote of the KV pool. Borders are read
from the kernels' own sizes, so a new class or another size of a tile is tried at its own.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from kvtransfer.layout import KvLayout
from services.engine.attention.base import PagedQueries
from services.engine.attention.tile_attention import TileAttention
from services.engine.kernels.base import CodedKv, Scoring, Singles
from services.engine.kernels.cpu import decode_attention, decode_rows, operations, tile_attention, tile_products
from services.engine.kernels.cpu.kv_forms import KvForm
from services.engine.kernels.cpu.operations import PagedKernels, PagedTileKernels
from services.engine.kernels.cpu.vectors import LANES
from tests.engine.kernels import codes

T = TypeVar("T")

POISON = 0xFF  # four and two of these bytes are NaN as float32 and as bfloat16
PLAIN = KvForm.PLAIN.value
_FEW = 3  # tokens after many keys
_SIDES = (-1, 0, 1)


@dataclass(frozen=True)
class Step:
    """Attention of a row's last `count` tokens, `length` being all of them."""

    length: int
    count: int
    window: int | None = None
    begun: int = 0  # tokens over which the attention is computed before, in whole blocks


@dataclass(frozen=True)
class Heads:
    """What a kernel for attention is compiled for."""

    dtype: str
    head_dim: int
    group: int
    block_size: int
    softcap: float | None = None
    has_sinks: bool = False
    form: str = PLAIN  # of the pool, a value of `KvForm`


def beside(*borders: int) -> list[int]:
    """Each border and its neighbours, from 1 on."""
    return sorted({border + side for border in borders for side in _SIDES if border + side > 0})


def tile_steps(heads: Heads) -> list[Step]:
    """Whole prompts at borders of queries, some tokens at borders of keys, windows at borders, after a prefix."""
    products = tile_attention._make_products(heads.dtype, heads.head_dim, heads.block_size)
    rows, step, chunk = products.max_rows, products.key_step, tile_attention._CHUNK
    most = rows // heads.group  # tokens of a tile
    of_queries = beside(LANES // heads.group, tile_products.QUERIES // heads.group, most, 2 * most)
    of_keys = beside(step, heads.block_size, chunk, rows, rows + step, rows + chunk, 2 * rows)
    of_windows = beside(step, heads.block_size, chunk)
    long = rows + chunk + 1
    whole = -(-chunk // heads.block_size) * heads.block_size
    return [
        *(Step(length, length) for length in of_queries),
        *(Step(length, min(length, _FEW)) for length in of_keys),
        *(Step(long, min(long, 2 * LANES + 1), window) for window in of_windows),
        *(Step(whole + length, length, begun=whole) for length in beside(LANES // heads.group, chunk)),
    ]


def single_steps(heads: Heads) -> list[Step]:
    """Lengths at borders of keys, windows at borders, after a prefix."""
    keys, ahead = decode_attention._KEYS, decode_rows.AHEAD
    of_keys = beside(1, 2, keys, 2 * keys, ahead, heads.block_size, 2 * heads.block_size)
    whole = -(-ahead // heads.block_size) * heads.block_size
    return [
        *(Step(length, 1) for length in of_keys),
        *(Step(length, 1, window) for length in beside(ahead + keys) for window in beside(2, keys, ahead)),
        *(Step(whole + length, 1, begun=whole) for length in beside(1, keys)),
    ]


class Bench:
    """A pool with keys and values of one row, and a kernel over it."""

    kernel: PagedKernels | PagedTileKernels

    def __init__(self, kernel: str, heads: Heads, length: int) -> None:
        """kernel: `tiles` or `singles`. length: the most tokens of a step."""
        kv_heads = 1 if kernel == "tiles" else 2
        dtype = operations._DTYPES[heads.dtype]
        generator = torch.Generator().manual_seed(heads.head_dim + heads.group)
        self.heads, self.scale = heads, heads.head_dim**-0.5
        shape = 2, kv_heads, heads.head_dim, heads.block_size
        layout = KvLayout(*shape, heads.dtype) if heads.form == PLAIN else codes.coded_layout(heads.form, *shape)
        self.layout, self.static = layout, codes.static_scales(2, kv_heads)
        num_blocks = -(-length // heads.block_size)
        order = torch.randperm(num_blocks, generator=generator)
        self.kv = torch.randn(2, length, kv_heads, heads.head_dim, generator=generator).to(dtype)
        # After the queries of a token lie its keys and values, as they come from one product.
        wide = torch.randn(length, (heads.group + 2) * kv_heads, heads.head_dim, generator=generator).to(dtype)
        self.q = wide[:, : heads.group * kv_heads]
        self.kv_before = self.kv  # as it was before it was rounded to codes
        self.coded = None
        if heads.form == PLAIN:
            self.pool = torch.full(layout.shape(num_blocks), math.nan, dtype=dtype)
        else:
            self.pool = torch.full(layout.shape(num_blocks), POISON, dtype=torch.uint8)
            self.coded = CodedKv(dtype, None if layout.token_scales else self.static)
            self.stored = [codes.encode(kv, layout.dtype, self._static_of(plane)) for plane, kv in enumerate(self.kv)]
            self.kv = torch.stack([codes.decode(some, layout.dtype, scale) for some, scale in self.stored])
        self.table = order.to(torch.int32)[None]
        make = PagedTileKernels if kernel == "tiles" else PagedKernels
        sinks = torch.randn(2, heads.group * kv_heads, generator=generator) if heads.has_sinks else None
        self.scoring = Scoring(self.scale, heads.softcap, sinks)
        self.kernel = make(self.pool, layout, heads.group, self.scoring, self.coded)

    def _static_of(self, plane: int) -> Tensor | None:
        """The scales of layer 1 for all tokens, float32[length, kv_heads], where they are static."""
        return None if self.layout.token_scales else self.static[1, plane].expand(self.kv_before.shape[1:3])

    def write(self, length: int) -> None:
        """The pool has the first tokens, and NaN behind them."""
        size = self.heads.block_size
        if self.coded is not None:
            self.pool.fill_(POISON)
            for token, head, plane in product(range(length), range(self.layout.num_kv_heads), range(2)):
                some, scale = self.stored[plane]
                place = int(self.table[0, token // size]), head, 1, plane
                codes.put(self.pool, self.layout, place, token % size, some[token, head], scale[token, head])
            return
        self.pool.fill_(math.nan)
        for block, start in zip(self.table[0].tolist(), range(0, length, size), strict=False):
            some = self.kv[:, start : min(start + size, length)]
            self.pool[block, :, 1, :, : some.shape[1]] = some.permute(2, 0, 1, 3)

    def expected(self, step: Step, last: int) -> tuple[Tensor, Tensor, Tensor]:
        """In float64, over keys before `last`: the attention, its log-sum-exp, and the attention to absolute values."""
        k, v = self.kv[:, :last].double().repeat_interleave(self.heads.group, dim=2)
        q = self.q[step.length - step.count : step.length].double()
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
        behind = torch.arange(step.length - step.count, step.length)[:, None] - torch.arange(last)
        if self.scoring.softcap is not None:
            scores = self.scoring.softcap * (scores / self.scoring.softcap).tanh()
        scores.masked_fill_((behind < 0) | (behind >= (step.window or step.length)), -math.inf)
        if self.scoring.sinks is not None:  # a key without a value
            sink = self.scoring.sinks[1].double()[:, None, None].expand(-1, step.count, 1)
            scores = torch.cat((scores, sink), dim=-1)
            v = torch.cat((v, torch.zeros_like(v[:1])))
        weights = scores.softmax(-1)
        mean, of_absolute = (torch.einsum("hqk,khd->qhd", weights, some) for some in (v, v.abs()))
        return mean, scores.logsumexp(-1).T, of_absolute

    def run(self, step: Step) -> None:
        """Raises AssertionError where the kernel's result is not the attention."""
        self.write(step.length)
        heads = self.q.shape[1:]
        out = torch.full((step.count, *heads), math.nan, dtype=self.q.dtype)
        lse = torch.full((step.count, heads[0]), math.nan)
        if step.begun:
            before, lse_before, _ = self.expected(step, step.begun)
            out.copy_(before)
            lse.copy_(lse_before)
        kernel = self.kernel._tiles if isinstance(self.kernel, operations.PagedTileKernels) else self.kernel
        scratch, used = kernel._scratch, kernel._attention.scratch_bytes
        scratch.fill(POISON)
        self.attend(step, out, lse)
        begin = operations._on_border(scratch) - scratch.ctypes.data
        assert (scratch[:begin] == POISON).all(), "wrote before its memory"
        assert (scratch[begin + used :] == POISON).all(), "wrote after its memory"
        self.compare(step, out, lse)

    def attend(self, step: Step, out: Tensor, lse: Tensor) -> None:
        """Runs the kernel."""
        queries = self.q[step.length - step.count : step.length]
        begin = max(0, step.length - step.window) if step.window else step.begun
        if isinstance(self.kernel, PagedKernels):
            token, first_key, length = (torch.tensor([n], dtype=torch.int32) for n in (0, begin, step.length))
            singles = Singles(token, self.table, first_key, length, begun=step.begun > 0)
            self.kernel.attend(1, queries, out, lse, singles)
            return
        starts, lengths = np.array([0, step.count], np.int32), np.array([step.length], np.int32)
        several = TileAttention(self.kernel, self.heads.block_size)
        paged = PagedQueries(starts, lengths, self.table.numpy())
        tiles = several._apart(paged, np.array([0]), np.array([step.begun], np.int32), step.window or 0)
        self.kernel.attend(1, queries, out, lse, tiles, self.table)

    def compare(self, step: Step, out: Tensor, lse: Tensor) -> None:
        """A result may be off by roundings: of weights, of itself, and of what was there before."""
        mean, expected_lse, of_absolute = self.expected(step, step.length)
        unit = 2.0**-7 if self.heads.dtype == "bfloat16" else 2.0**-18
        error = (out.double() - mean).abs() / (mean.abs() + of_absolute).clamp_min(1e-30)  # a code may be 0
        assert error.isfinite().all(), f"not a number in {int((~error.isfinite()).sum())} of {error.numel()} results"
        assert error.max() < unit, f"off by {error.max() / unit:.3g} times the bound"
        off = (lse.double() - expected_lse).abs().max()
        assert off < unit, f"log-sum-exp off by {off:.3g}"


def some_of(cases: Sequence[T], most: int | None, seed: int) -> list[T]:
    """At most so many of the cases, chosen at random; None: all."""
    return list(cases) if most is None else random.Random(seed).sample(cases, min(most, len(cases)))


def failures(kernel: str, heads: Heads, most: int | None, seed: int) -> Iterator[str]:
    """Runs at most so many steps of a kernel, `tiles` or `singles`, and says which failed."""
    steps = some_of(tile_steps(heads) if kernel == "tiles" else single_steps(heads), most, seed)
    bench = Bench(kernel, heads, max(step.length for step in steps))
    for step in steps:
        try:
            bench.run(step)
        except AssertionError as error:
            yield f"{kernel} {heads} {step}: {error}"
