"""Multi-head latent attention on a CPU. Each row of a step takes the form with fewer products (see `latent_base.py`):

absorbed   a kernel that reads each latent once for all heads; without kernels, `TorchAttention`
expanded   `ExpandedPrompts`
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from kvtransfer.layout import KvLayout
from services.engine.attention.base import KernelInputs, PagedQueries, some_rows
from services.engine.attention.by_layer import Windows
from services.engine.attention.expanded_prompts import ExpandedPlan, ExpandedPrompts, least_expanded
from services.engine.attention.latent import LATENT_NORM_EPS, Latent
from services.engine.attention.latent_base import LatentProducts
from services.engine.attention.paged_pool import begin_tokens
from services.engine.attention.shared_prefix import tokens_of
from services.engine.attention.tile_attention import TileAttention, TilePlan
from services.engine.attention.torch_attention import TorchAttention
from services.engine.kernels.base import PagedTiles, Scoring
from services.engine.kernels.load import make_latent
from services.engine.kernels.torch_operations import TorchOperations


@dataclass(frozen=True, slots=True, eq=False)
class LatentPlan:
    """The part of a step's work that all its layers share."""

    offsets: Tensor  # int64[T]: the pool's element at which each token's row in layer 0 begins
    tokens: Tensor | None  # int64[N], those of absorbed rows; None: all of the step's
    absorbed: Any  # a TilePlan, or TorchAttention's plan; None: there are no such rows
    expanded: ExpandedPlan | None
    outputs: tuple[Tensor, Tensor]  # of the kernel for absorbed rows, layer after layer


class LatentCpuAttention:
    """`LatentAttention` over one pool, [num_blocks, 1, layers, 1, block_size, width]."""

    def __init__(
        self,
        pool: Tensor,
        layout: KvLayout,
        num_heads: int,
        latent: Latent,
        *,
        fused: bool,
        before_layer: Callable[[], None] = lambda: None,
    ) -> None:
        """before_layer: called once for each layer of a step."""
        self._pool = pool
        self._rows = pool.view(-1, layout.head_dim)
        self._layout = layout
        self._num_heads = num_heads
        self._latent = latent
        self._before_layer = before_layer
        self._kernels = make_latent(pool, layout, num_heads, latent.rope_dim, latent.scale, fused=fused)
        self._absorbed = TorchAttention(pool, layout, num_heads, Scoring(latent.scale), clears=False)
        self._expanded = ExpandedPrompts(pool, layout, latent, fused=fused)
        self._least_expanded = least_expanded(latent)
        self._operations = TorchOperations()

    @property
    def writes_by_kernel(self) -> bool:
        """See `Attention.writes_by_kernel`."""
        return self._kernels is not None

    @property
    def rotate_and_write(self) -> None:
        """See `LatentAttention.rotate_and_write`."""

    def prepare(self, queries: PagedQueries, windows: Windows = None) -> LatentPlan:
        """See `LatentAttention.prepare`."""
        assert windows is None, windows
        (blocks,), positions = begin_tokens(queries, queries.block_tables[None], self._pool, self._layout.block_size)
        offsets = torch.from_numpy(blocks * self._pool.stride(0) + positions * self._layout.head_dim)
        is_expanded = np.diff(queries.query_starts) >= self._least_expanded
        expanded, absorbed = np.flatnonzero(is_expanded), np.flatnonzero(~is_expanded)
        return LatentPlan(
            offsets=offsets,
            tokens=torch.from_numpy(tokens_of(queries, absorbed)) if len(expanded) and len(absorbed) else None,
            absorbed=self._prepare_absorbed(some_rows(queries, absorbed)) if len(absorbed) else None,
            expanded=self._expanded.prepare(queries, expanded) if len(expanded) else None,
            outputs=self._outputs(int(np.diff(queries.query_starts)[absorbed].sum())),
        )

    def narrow(self, plan: LatentPlan, tokens: Tensor, layer: int) -> None:
        """Returns None: all tokens of a step attend."""

    def kernel_inputs(self, plan: LatentPlan) -> KernelInputs | None:
        """See `Attention.kernel_inputs`."""
        if self._kernels is None or plan.expanded is not None:
            return None
        tiles: TilePlan = plan.absorbed
        numbers, tensors = tiles.kernel_inputs()
        return (tiles.tables.stride(0), *numbers), (plan.offsets, *plan.outputs, tiles.tables, *tensors)

    def write(self, plan: LatentPlan, layer: int, kv: Tensor, turn: tuple[Tensor, Tensor], norm: Tensor) -> None:
        """See `LatentAttention.write`."""
        self._before_layer()
        if self._kernels is not None:
            self._kernels.store(layer, plan.offsets, kv, turn, norm, LATENT_NORM_EPS)
            return
        rope_dim, operations = self._latent.rope_dim, self._operations
        rope = kv[:, None, :rope_dim]
        operations.rotate(rope, *turn, None, LATENT_NORM_EPS)
        new = torch.cat((operations.norm(kv[:, rope_dim:], norm, LATENT_NORM_EPS), rope[:, 0]), dim=1)
        rows = plan.offsets // self._layout.head_dim
        self._rows[layer * self._layout.block_size :].index_copy_(0, rows, new)

    def attend(self, plan: LatentPlan, layer: int, q_nope: Tensor, q_rope: Tensor, products: LatentProducts) -> Tensor:
        """See `LatentAttention.attend`."""
        if plan.expanded is None:
            return self._attend_absorbed(plan, layer, q_nope, q_rope, products)
        out = q_nope.new_empty(len(q_nope), q_nope.shape[1], self._latent.value_dim)
        self._expanded.attend(plan.expanded, layer, q_nope, q_rope, products, out)
        if plan.tokens is not None:
            some = q_nope[plan.tokens], q_rope[plan.tokens]
            out[plan.tokens] = self._attend_absorbed(plan, layer, *some, products)
        return out

    def _attend_absorbed(
        self, plan: LatentPlan, layer: int, q_nope: Tensor, q_rope: Tensor, products: LatentProducts
    ) -> Tensor:
        if self._kernels is not None:
            tiles: TilePlan = plan.absorbed
            queries = products.absorb(q_nope), q_rope
            self._kernels.attend(layer, queries, plan.outputs, tiles.passes, tiles.tables)
            return products.values(plan.outputs[0])
        q = torch.cat((products.absorb(q_nope), q_rope), dim=2)
        found, _ = self._absorbed.attend(plan.absorbed, layer, q, q, q)
        return products.values(found[..., : self._latent.kv_rank])

    def _outputs(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        out = self._pool.new_empty(num_tokens, self._num_heads, self._latent.kv_rank)
        return out, self._pool.new_empty(out.shape[:2], dtype=torch.float32)

    def _prepare_absorbed(self, queries: PagedQueries) -> Any:
        if self._kernels is None:
            return self._absorbed.prepare(queries)
        tiles = TileAttention(cast(PagedTiles, self._kernels), self._layout.block_size)  # it looks at max_tokens alone
        return tiles.prepare(queries, np.arange(len(queries.seq_lens)), [], None)
