"""Prompts with multi-head latent attention in the expanded form: K and V of all heads are made from a row's latents.

Some heads at a time, K and V of all the rows' blocks are laid out like a pool of grouped attention's, in memory that is
used again and again; then those who attend to such a pool do the rest.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvtransfer.layout import KvLayout
from services.engine.attention.base import PagedQueries
from services.engine.attention.latent import Latent
from services.engine.attention.latent_base import HeadsExpansion, LatentProducts
from services.engine.attention.shared_prefix import tokens_of
from services.engine.attention.tile_attention import TileAttention
from services.engine.attention.torch_attention import TorchAttention
from services.engine.kernels.base import Scoring
from services.engine.kernels.load import make_tiles


class _OverHeads(Protocol):
    """Attention of some heads over the pool that was laid out."""

    def prepare(self, queries: PagedQueries) -> Any:
        """Does a step's index work."""

    def attend(self, plan: Any, q: Tensor) -> Tensor:
        """Returns what q, [N, heads, head_dim], finds, shaped alike."""


class _ByTorch:
    """`_OverHeads` by torch."""

    def __init__(self, pool: Tensor, layout: KvLayout, scale: float) -> None:
        self._attention = TorchAttention(pool, layout, layout.num_kv_heads, Scoring(scale))

    def prepare(self, queries: PagedQueries) -> Any:
        """See `_OverHeads.prepare`."""
        return self._attention.prepare(queries)

    def attend(self, plan: Any, q: Tensor) -> Tensor:
        """See `_OverHeads.attend`."""
        return self._attention.attend(plan, 0, q, q, q)[0]


class _ByTiles:
    """`_OverHeads` by a kernel."""

    def __init__(self, tiles: TileAttention) -> None:
        self._tiles = tiles

    def prepare(self, queries: PagedQueries) -> Any:
        """See `_OverHeads.prepare`."""
        return self._tiles.prepare(queries, np.arange(len(queries.seq_lens)), [], None)

    def attend(self, plan: Any, q: Tensor) -> Tensor:
        """See `_OverHeads.attend`."""
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        self._tiles.attend(plan, 0, q, q, q, out, lse)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class ExpandedPlan:
    """The rows of a step that are expanded."""

    tokens: Tensor  # int64[N], indices in the step
    queries: PagedQueries  # of these rows alone, over blocks from 0 on
    blocks: Tensor  # int64[B], the pool's, of all rows one after the other
    by_heads: dict[int, Any] = field(default_factory=dict)  # plans of `_OverHeads` for so many heads


class ExpandedPrompts:
    """Attention of prompts over one pool of latents, [num_blocks, 1, layers, 1, block_size, width]."""

    def __init__(self, pool: Tensor, layout: KvLayout, latent: Latent, *, fused: bool) -> None:
        self._latent = latent
        self._block_size = layout.block_size
        self._num_layers = layout.num_layers
        self._planes = pool.view(-1, layout.block_size * layout.head_dim)
        self._head_dim = max(latent.query_dim, latent.value_dim)  # of K and V alike, with zeros behind
        self._dtype_name = layout.dtype
        self._fused = fused
        self._memory = pool.new_empty(0)
        self._over: dict[int, _OverHeads] = {}  # by the number of heads, over `_memory`

    def prepare(self, queries: PagedQueries, rows: np.ndarray) -> ExpandedPlan:
        """Does the step's index work for some of its rows, int64[R]."""
        counts, lens = np.diff(queries.query_starts)[rows], queries.seq_lens[rows]
        num_blocks = -(-lens // self._block_size)
        ends = np.cumsum(num_blocks)
        tables = (ends - num_blocks)[:, None] + np.arange(num_blocks.max())
        starts = np.append(0, np.cumsum(counts)).astype(np.int32)
        own = [queries.block_tables[row, :count] for row, count in zip(rows, num_blocks, strict=True)]
        return ExpandedPlan(
            tokens=torch.from_numpy(tokens_of(queries, rows)),
            queries=PagedQueries(starts, lens, np.minimum(tables, ends[-1] - 1).astype(np.int32)),
            blocks=torch.from_numpy(np.concatenate(own).astype(np.int64)),
        )

    def attend(
        self, plan: ExpandedPlan, layer: int, q_nope: Tensor, q_rope: Tensor, products: LatentProducts, out: Tensor
    ) -> None:
        """Writes what these rows' tokens find to out, [T, heads, value_dim]. q_nope and q_rope: of all tokens."""
        latent, tokens = self._latent, plan.tokens
        rows = self._planes[layer:].index_select(0, plan.blocks * self._num_layers).view(-1, latent.width)
        for expansion in products.expansions:
            heads = slice(expansion.heads.start, expansion.heads.stop)
            over = self._pool_of(len(expansion.heads), len(plan.blocks))
            if len(expansion.heads) not in plan.by_heads:
                plan.by_heads[len(expansion.heads)] = over.prepare(plan.queries)
            self._lay_out(expansion, rows, len(plan.blocks))
            q = q_nope.new_zeros(len(tokens), len(expansion.heads), self._head_dim)
            q[..., : latent.nope_dim] = q_nope[tokens, heads]
            q[..., latent.nope_dim : latent.query_dim] = q_rope[tokens, heads]
            found = over.attend(plan.by_heads[len(expansion.heads)], q)
            out[tokens, heads] = found[..., : latent.value_dim]

    def _lay_out(self, expansion: HeadsExpansion, rows: Tensor, num_blocks: int) -> None:
        """Writes K and V of some heads and all tokens of the blocks, rows [B * block_size, width]."""
        latent, shape = self._latent, (num_blocks, self._block_size, -1)
        k_nope, v = expansion.expand(rows[:, : latent.kv_rank])
        pool = self._view(len(expansion.heads), num_blocks)
        keys, values = (pool[:, :, 0, plane].transpose(1, 2) for plane in range(2))  # [B, block_size, heads, head_dim]
        keys[..., : latent.nope_dim] = k_nope.unflatten(0, shape[:2])
        keys[..., latent.nope_dim : latent.query_dim] = rows[:, latent.kv_rank :].view(shape)[:, :, None]
        values[..., : latent.value_dim] = v.unflatten(0, shape[:2])
        keys[..., latent.query_dim :] = 0
        values[..., latent.value_dim :] = 0

    def _pool_of(self, num_heads: int, num_blocks: int) -> _OverHeads:
        """Returns the attention over a pool of at least so many blocks."""
        size = num_blocks * num_heads * 2 * self._block_size * self._head_dim
        if len(self._memory) < size:
            self._memory = self._planes.new_empty(size)
            self._over.clear()
        if num_heads not in self._over:
            self._over[num_heads] = self._make_over(num_heads)
        return self._over[num_heads]

    def _make_over(self, num_heads: int) -> _OverHeads:
        layout = self._layout_of(num_heads)
        pool = self._view(num_heads, len(self._memory) // (layout.token_elements * self._block_size))
        kernel = make_tiles(pool, layout, 1, Scoring(self._latent.scale), fused=self._fused)
        if kernel is None:
            return _ByTorch(pool, layout, self._latent.scale)
        return _ByTiles(TileAttention(kernel, self._block_size))

    def _view(self, num_heads: int, num_blocks: int) -> Tensor:
        layout = self._layout_of(num_heads)
        size = num_blocks * layout.token_elements * self._block_size
        return self._memory[:size].view(layout.shape(num_blocks))

    def _layout_of(self, num_heads: int) -> KvLayout:
        return KvLayout(1, num_heads, self._head_dim, self._block_size, self._dtype_name)


def least_expanded(latent: Latent) -> float:
    """Returns the number of a row's new tokens from which on the expanded form takes fewer products.

    For each key and head, a token costs kv_rank + rope_dim for its score and kv_rank for its value in the absorbed
    form; nope_dim + rope_dim and value_dim in the expanded one, which first takes kv_rank * (nope_dim + value_dim) to
    make the key and the value.
    """
    made = latent.nope_dim + latent.value_dim
    saved = 2 * latent.kv_rank - made  # by each token
    return latent.kv_rank * made / saved if saved > 0 else float("inf")
