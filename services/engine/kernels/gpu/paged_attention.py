"""Launches of the attention kernels over one pool, with the tile of each kind of work.

`ItemKernels` is what `ItemAttention` needs of them. All that changes from one launch to the next are tensors' addresses
and the grid.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
import triton
from torch import Tensor

from kvtransfer.layer_groups import LayerGroups
from kvtransfer.layout import KvLayout
from services.engine.kernels.base import Scoring
from services.engine.kernels.gpu.attention import attend_items, merge_partials
from services.engine.kernels.gpu.launch import UnsupportedShape, dot_dtype

Kind = Literal["decode", "prefill", "shared"]


@dataclass(frozen=True, slots=True)
class Tile:
    """The work that one program has at a time, and its warps and pipeline stages."""

    tokens: int
    keys: int
    num_warps: int
    num_stages: int = 3
    resident: int = 1  # programs for each multiprocessor
    in_pairs: bool = False  # float8 is read two numbers at a time


@dataclass(frozen=True, slots=True, eq=False)
class ItemEntries:
    """The entries of a step's items and the block tables, as `kernels.gpu.attention` explains them; int32, on the
    device.
    """

    tokens: Tensor
    limits: Tensor
    partials: Tensor
    tables: Tensor

    def of_slice(self, number: int) -> "ItemEntries":
        """Returns the entries with the tables from a slice's first block number on."""
        return replace(self, tables=self.tables[number:])


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """The tensors for results, contiguous."""

    out: Tensor  # [T, heads, head_dim]
    lse: Tensor  # float32[T, heads]
    partial_out: Tensor  # float32[P, heads, head_dim]
    partial_lse: Tensor  # float32[P, heads]


class ItemKernels(Protocol):
    """Kernels that run work items over one pool of blocks."""

    num_heads: int  # of a token's queries
    width: int  # numbers of a head's output
    parts: int  # of a token's heads; each has programs of its own
    tiles: dict[Kind, Tile]

    def attend(
        self,
        kind: Kind,
        layer: int,
        q: Any,
        to: Outputs,
        items: Tensor,
        entries: ItemEntries,
        grid: int,
        window: int,
    ) -> None:
        """Runs `items` in `grid` programs for each part of the heads. q: the queries, as these kernels take them."""

    def merge(self, layer: int, to: Outputs, merges: Tensor) -> None:
        """Merges partial outputs into one for each token. merges: int32[J, 3], see `merge_partials`."""


def padded(size: int, least: int = 16) -> int:
    """Returns the next power of two, for a dimension of a matrix product."""
    return max(least, int(triton.next_power_of_2(size)))


def choose_tile(kind: Kind, group: int, head_dim: int, dtype: torch.dtype, *, fp8: bool) -> Tile:
    """Returns the fastest tile of those that were tried on an H200, and spill no registers for common shapes.

    dtype: of q. fp8: the pool is float8_e4m3fn. When decoding, fewer warps wait less for each other, and more programs
    have more reads under way. With 5 stages, K and V of two tiles are under way, since the block table must be read
    first; with 3, those of one. Measured: loadtest/results/gpu.md.
    """
    dims = padded(head_dim)
    if dtype == torch.float32:  # has no matrix instructions; products need registers
        tokens = 1 if kind == "decode" else max(1, 32 // group)
        return Tile(tokens, keys=32 if dims < 256 else 16, num_warps=4, resident=2)
    if kind == "decode":
        if fp8 and head_dim % 2 == 0:
            if dims < 256:
                return Tile(1, keys=32, num_warps=1, num_stages=5, resident=8, in_pairs=True)
            return Tile(1, keys=32, num_warps=2, num_stages=5, resident=4, in_pairs=True)
        if dims < 256:
            return Tile(1, keys=64, num_warps=2, num_stages=3 if dims == 128 else 5, resident=4)
        return Tile(1, keys=32, num_warps=4, num_stages=5, resident=4)
    if dims >= 256:
        return Tile(64 // group, keys=16 if fp8 else 32, num_warps=8)
    if kind == "prefill":
        return Tile(64 // group, keys=64, num_warps=4, resident=2)
    return Tile(128 // group, keys=64, num_warps=8)


def is_packed(heads: Tensor) -> bool:
    """Returns True if a token's heads are contiguous."""
    return bool(heads.stride(2) == 1 and (heads.shape[1] == 1 or heads.stride(1) == heads.shape[2]))


class PagedAttentionKernels:
    """Kernels over a contiguous pool [num_blocks, kv_heads, layers, 2, block_size, head_dim] of `layout`."""

    def __init__(
        self,
        pool: Tensor,
        layout: KvLayout,
        num_heads: int,
        scoring: Scoring,
        dtype: torch.dtype,
        scales: Tensor | None,
    ) -> None:
        """dtype: of q and of the output.
        scales: float32[layers, 2, kv_heads], contiguous, by which K and V in a pool of float8_e4m3fn are multiplied.
        """
        if (pool.dtype == torch.float8_e4m3fn) != (scales is not None):
            raise ValueError(f"scales belong to a pool of float8_e4m3fn; this one holds {pool.dtype}")
        if scales is not None and dtype == torch.float32:
            raise ValueError("a pool of float8_e4m3fn is for models in bfloat16 or float16")
        group, rest = divmod(num_heads, layout.num_kv_heads)
        if rest or group > 16:
            raise UnsupportedShape(f"{num_heads} query heads over {layout.num_kv_heads} KV heads are not supported")
        self.num_heads = num_heads
        self.parts = layout.num_kv_heads
        self.width = layout.head_dim
        self._qk_scale = scoring.scale * math.log2(math.e)
        self._cap = None if scoring.softcap is None else scoring.softcap * math.log2(math.e)
        self._sinks = scoring.sinks
        self._scales = scales
        kinds: tuple[Kind, ...] = ("decode", "prefill", "shared")
        fp8 = scales is not None
        self.tiles = {kind: choose_tile(kind, group, layout.head_dim, dtype, fp8=fp8) for kind in kinds}
        # One instruction converts two FP8 values to float16, exactly; bfloat16 takes several.
        dot = dot_dtype(torch.float16 if fp8 else dtype)
        self._pools = {kind: pool.view(torch.int16) if tile.in_pairs else pool for kind, tile in self.tiles.items()}
        self._constants: dict[Kind, dict[str, Any]] = {
            kind: {
                "HEADS": num_heads,
                "KV_HEADS": layout.num_kv_heads,
                "LAYERS": layout.num_layers,
                "BLOCK_SIZE": layout.block_size,
                "SLICES": layout.num_slices,
                "HEAD_DIM": layout.head_dim,
                "DIMS": padded(layout.head_dim, 32 if fp8 else 16),
                "ROWS": padded(tile.tokens * group),
                "KEYS": tile.keys,
                "UNMASKED": kind != "decode",
                "IN_PAIRS": tile.in_pairs,
                "DOT": dot,
                "num_warps": tile.num_warps,
                "num_stages": tile.num_stages,
            }
            for kind, tile in self.tiles.items()
        }

    def attend(
        self,
        kind: Kind,
        layer: int,
        q: Tensor,
        to: Outputs,
        items: Tensor,
        entries: ItemEntries,
        grid: int,
        window: int,
    ) -> None:
        """Runs `items` in `grid` programs for each KV head.

        q: [T, heads, head_dim]; a token's heads are contiguous. window: 0 for none.
        """
        assert is_packed(q)
        attend_items[(grid, self.parts)](
            q, to.out, to.lse, to.partial_out, to.partial_lse, self._pools[kind],
            items, entries.tokens, entries.limits, entries.partials, entries.tables,
            self._scales, self._sinks, layer, q.stride(0), self._qk_scale, self._cap,
            WINDOW=window, **self._constants[kind],
        )  # fmt: skip

    def merge(self, layer: int, to: Outputs, merges: Tensor) -> None:
        """Merges partial outputs into one for each token. merges: int32[J, 3], see `merge_partials`."""
        launch_merge(layer, to, merges, self._sinks)


class SlicedKernels:
    """`ItemKernels` of a model whose layers are in slices: kernels for each slice, over the same pool.

    The block numbers of all slices of a block lie next to each other in the tables.
    """

    def __init__(self, groups: LayerGroups, slices: Sequence[PagedAttentionKernels]) -> None:
        """slices: the kernels of each, whose layers have the places 0 to n - 1 in it."""
        self._slices = slices
        self._places = groups.places
        first = self._slices[0]
        self.num_heads, self.width, self.parts, self.tiles = first.num_heads, first.width, first.parts, first.tiles

    def attend(
        self,
        kind: Kind,
        layer: int,
        q: Tensor,
        to: Outputs,
        items: Tensor,
        entries: ItemEntries,
        grid: int,
        window: int,
    ) -> None:
        """See `PagedAttentionKernels.attend`."""
        number, at = self._places[layer]
        self._slices[number].attend(kind, at, q, to, items, entries.of_slice(number), grid, window)

    def merge(self, layer: int, to: Outputs, merges: Tensor) -> None:
        """See `PagedAttentionKernels.merge`."""
        number, at = self._places[layer]
        self._slices[number].merge(at, to, merges)


def launch_merge(layer: int, to: Outputs, merges: Tensor, sinks: Tensor | None) -> None:
    """Merges partial outputs into one for each token. sinks: see `Scoring`."""
    _, num_heads, width = to.out.shape
    merge_partials[(len(merges), num_heads)](
        to.out, to.lse, to.partial_out, to.partial_lse, merges, sinks, layer,
        HEADS=num_heads, HEAD_DIM=width, DIMS=padded(width), PARTIALS=16, num_warps=2 if width <= 256 else 4,
    )  # fmt: skip
