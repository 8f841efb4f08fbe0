"""Launches of the absorbed form's kernels over one pool of latents, with the tile of each kind of work.

`LatentAttentionKernels` takes the items of `paged_attention.py`'s kernels; its queries are two tensors.
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor

from kvtransfer.layout import KvLayout
from services.engine.kernels.gpu.latents import attend_latents, store_latents_kernel
from services.engine.kernels.gpu.launch import dot_dtype
from services.engine.kernels.gpu.paged_attention import (
    ItemEntries,
    Kind,
    Outputs,
    Tile,
    is_packed,
    launch_merge,
    padded,
)

LatentQueries = tuple[Tensor, Tensor]  # absorbed, [T, heads, kv_rank], and rotated, [T, heads, rope_dim]

_KINDS: tuple[Kind, ...] = ("decode", "prefill", "shared")


def choose_tile(kind: Kind, head_tile: int, dtype: torch.dtype) -> Tile:
    """Returns a tile that spills no registers with the published sizes, latents of 512 and 64 rotated numbers.

    head_tile: heads of a token in one program. Nobody has timed these tiles: they are those that the compiler fits into
    a program's registers, with the most rows.
    """
    tokens = 1 if kind == "decode" else max(1, most_rows(dtype) // head_tile)
    if dtype == torch.float32:  # has no matrix instructions; products need registers
        return Tile(tokens, keys=16, num_warps=8, num_stages=2)
    if tokens * head_tile <= 16:
        return Tile(tokens, keys=32, num_warps=4, resident=2)
    return Tile(tokens, keys=32, num_warps=8)


def most_rows(dtype: torch.dtype) -> int:
    """Returns the most rows of a tile, a row being one head of a token."""
    return 16 if dtype == torch.float32 else 32


class LatentAttentionKernels:
    """Kernels over a contiguous pool [num_blocks, 1, layers, 1, block_size, kv_rank + rope_dim] of `layout`."""

    def __init__(self, pool: Tensor, layout: KvLayout, num_heads: int, rope_dim: int, scale: float) -> None:
        """scale: of attention scores."""
        self.num_heads = num_heads
        self.width = rank = layout.head_dim - rope_dim
        self.parts = -(-num_heads // most_rows(pool.dtype))
        self._pool = pool
        self._rope_dim = rope_dim
        self._plane = layout.block_size * layout.head_dim
        self._qk_scale = scale * math.log2(math.e)
        head_tile = -(-num_heads // self.parts)
        self.tiles = {kind: choose_tile(kind, head_tile, pool.dtype) for kind in _KINDS}
        self._constants: dict[Kind, dict[str, Any]] = {
            kind: {
                "HEADS": num_heads,
                "HEAD_TILE": head_tile,
                "LAYERS": layout.num_layers,
                "BLOCK_SIZE": layout.block_size,
                "RANK": rank,
                "ROPE": rope_dim,
                "RANKS": padded(rank),
                "ROPES": padded(rope_dim),
                "ROWS": padded(tile.tokens * head_tile),
                "KEYS": tile.keys,
                "UNMASKED": kind != "decode" and pool.dtype != torch.float32,
                "DOT": dot_dtype(pool.dtype),
                "num_warps": tile.num_warps,
                "num_stages": tile.num_stages,
            }
            for kind, tile in self.tiles.items()
        }

    def store(
        self, layer: int, offsets: Tensor, kv: Tensor, turn: tuple[Tensor, Tensor], norm: Tensor, eps: float
    ) -> None:
        """Norms, rotates and writes rows, see `LatentPaged.store`. A token with offset -1 is not written."""
        (cos, sin), half = turn, self._rope_dim // 2
        assert kv.stride(1) == 1, "numbers of a row lie next to each other"
        store_latents_kernel[(len(kv),)](
            kv, cos, sin, norm, self._pool, offsets, kv.stride(0), cos.stride(0), sin.stride(0), eps, layer,
            PLANE=self._plane, RANK=self.width, ROPE=self._rope_dim,
            RANKS=padded(self.width, 1), HALF=triton.next_power_of_2(half), num_warps=4,
        )  # fmt: skip

    def attend(
        self,
        kind: Kind,
        layer: int,
        q: LatentQueries,
        to: Outputs,
        items: Tensor,
        entries: ItemEntries,
        grid: int,
        window: int,
    ) -> None:
        """Runs `items` in `grid` programs for each tile of heads. There is no window: 0."""
        assert not window
        latent, rope = q
        assert latent.stride(2) == 1, latent.stride()
        assert is_packed(rope), rope.stride()
        attend_latents[(grid, self.parts)](
            latent, rope, to.out, to.lse, to.partial_out, to.partial_lse, self._pool,
            items, entries.tokens, entries.limits, entries.partials, entries.tables,
            layer, latent.stride(0), latent.stride(1), rope.stride(0), self._qk_scale, **self._constants[kind],
        )  # fmt: skip

    def merge(self, layer: int, to: Outputs, merges: Tensor) -> None:
        """Merges partial outputs into one for each token. merges: int32[J, 3], see `merge_partials`."""
        launch_merge(layer, to, merges, None)
