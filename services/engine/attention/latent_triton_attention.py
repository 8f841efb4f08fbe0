"""Multi-head latent attention on a GPU. Each row of a step takes the form with fewer products (see `latent_base.py`):

absorbed   work items over the latents in the pool, cut and recorded as those of `TritonAttention`
expanded   K and V of some heads are made of a piece's keys, then one kernel attends to them (`expanded_items.py`)

A step that is replayed has absorbed rows alone.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvtransfer.layout import KvLayout
from services.engine.attention.base import PagedQueries, some_rows
from services.engine.attention.by_layer import Windows
from services.engine.attention.expanded_items import cut_pieces
from services.engine.attention.expanded_prompts import least_expanded
from services.engine.attention.latent import LATENT_NORM_EPS, Latent
from services.engine.attention.latent_base import LatentProducts
from services.engine.attention.shared_prefix import tokens_of
from services.engine.attention.staging import Staging
from services.engine.attention.triton_attention import ItemAttention, TritonPlan, WorkCut
from services.engine.kernels.gpu.expanded import ExpandedKeys, Sums, expanded_tile, run_expanded
from services.engine.kernels.gpu.latent_attention import LatentAttentionKernels


@dataclass(frozen=True, slots=True, eq=False)
class StagedPiece:
    """A `Piece` on the device."""

    planes: Tensor  # int32[B]
    items: Tensor  # int32[M, 7]


@dataclass(frozen=True, slots=True, eq=False)
class LatentTritonPlan:
    """The part of a step's work that all its layers share."""

    offsets: Tensor  # int64[T]: the pool's element at which a token's row in layer 0 begins; padding: -1
    absorbed: TritonPlan | None  # None: there are no such rows
    tokens: Tensor | None  # int64[N], those of absorbed rows; None: all of the step's
    pieces: tuple[StagedPiece, ...]  # of expanded rows


class LatentTritonAttention:
    """`LatentAttention` over one pool, [num_blocks, 1, layers, 1, block_size, width].

    Blocks are not cleared: the kernels read only positions that were written.
    """

    def __init__(
        self,
        pool: Tensor,
        layout: KvLayout,
        num_heads: int,
        latent: Latent,
        *,
        staging: Staging,
        cut: WorkCut,
        most_keys: int,
    ) -> None:
        """most_keys: those whose K and V are made at once, for some heads."""
        self._planes = pool.view(-1, layout.block_size * layout.head_dim)
        self._layout = layout
        self._latent = latent
        self._staging = staging
        self._most_keys = most_keys
        self._kernels = LatentAttentionKernels(pool, layout, num_heads, latent.rope_dim, latent.scale)
        self._absorbed = ItemAttention(pool, layout, self._kernels, pool.dtype, staging=staging, cut=cut)
        self._least_expanded = least_expanded(latent)

    @property
    def writes_by_kernel(self) -> bool:
        """See `Attention.writes_by_kernel`."""
        return True

    @property
    def rotate_and_write(self) -> None:
        """See `LatentAttention.rotate_and_write`."""

    def narrow(self, plan: LatentTritonPlan, tokens: Tensor, layer: int) -> None:
        """Returns None: this backend attends to all tokens of a step."""

    def kernel_inputs(self, plan: LatentTritonPlan) -> None:
        """See `Attention.kernel_inputs`."""

    def prepare(self, queries: PagedQueries, windows: Windows = None) -> LatentTritonPlan:
        """See `LatentAttention.prepare`."""
        assert windows is None, windows
        is_expanded = np.diff(queries.query_starts) >= self._least_expanded
        if not is_expanded.any():
            plan = self._absorbed.prepare(queries)
            return LatentTritonPlan(plan.offsets[0], plan, None, ())
        expanded, absorbed = np.flatnonzero(is_expanded), np.flatnonzero(~is_expanded)
        offsets = self._staging.put(self._absorbed.offsets(queries)[0])
        if not len(absorbed):
            return LatentTritonPlan(offsets, None, None, self._pieces(queries, expanded))
        tokens = self._staging.put(tokens_of(queries, absorbed).astype(np.int64))
        plan = self._absorbed.prepare(some_rows(queries, absorbed))
        return LatentTritonPlan(offsets, plan, tokens, self._pieces(queries, expanded))

    def prepare_recorded(self, queries: PagedQueries, padded_rows: int, windows: Windows = None) -> LatentTritonPlan:
        """See `ItemAttention.prepare_recorded`."""
        assert windows is None, windows
        plan = self._absorbed.prepare_recorded(queries, padded_rows)
        return LatentTritonPlan(plan.offsets[0], plan, None, ())

    def staged_bytes(self, padded_rows: int, max_len: int, windows: Windows = None) -> int:
        """See `ItemAttention.staged_bytes`."""
        assert windows is None, windows
        return self._absorbed.staged_bytes(padded_rows, max_len)

    def write(self, plan: LatentTritonPlan, layer: int, kv: Tensor, turn: tuple[Tensor, Tensor], norm: Tensor) -> None:
        """See `LatentAttention.write`."""
        self._kernels.store(layer, plan.offsets, kv, turn, norm, LATENT_NORM_EPS)

    def attend(
        self, plan: LatentTritonPlan, layer: int, q_nope: Tensor, q_rope: Tensor, products: LatentProducts
    ) -> Tensor:
        """See `LatentAttention.attend`. Results for padding mean nothing."""
        if not plan.pieces:
            return self._attend_absorbed(plan, layer, q_nope, q_rope, products)
        out = q_nope.new_empty(*q_nope.shape[:2], self._latent.value_dim)
        self._attend_expanded(plan.pieces, layer, (q_nope, q_rope), products, out)
        if plan.tokens is not None:
            some = q_nope[plan.tokens], q_rope[plan.tokens]
            out.index_copy_(0, plan.tokens, self._attend_absorbed(plan, layer, *some, products))
        return out

    def _attend_absorbed(
        self, plan: LatentTritonPlan, layer: int, q_nope: Tensor, q_rope: Tensor, products: LatentProducts
    ) -> Tensor:
        assert plan.absorbed is not None
        found = self._absorbed.run(plan.absorbed, layer, (products.absorb(q_nope), q_rope))
        return products.values(found.out)

    def _attend_expanded(
        self,
        pieces: tuple[StagedPiece, ...],
        layer: int,
        queries: tuple[Tensor, Tensor],
        products: LatentProducts,
        out: Tensor,
    ) -> None:
        """Writes what the tokens of the pieces' items find to out, [T, heads, value_dim]."""
        kept = self._gather(layer, pieces[0]) if len(pieces) == 1 else None
        for expansion in products.expansions:
            sums = self._sums(out, len(expansion.heads))
            for piece in pieces:
                rows = self._gather(layer, piece) if kept is None else kept
                keys = ExpandedKeys(rows, *expansion.expand(rows[:, : self._latent.kv_rank]), expansion.heads)
                run_expanded(queries, keys, out, sums, piece.items, self._latent.scale)

    def _gather(self, layer: int, piece: StagedPiece) -> Tensor:
        """Copies the rows of a piece's keys, [B * block_size, width]."""
        return self._planes[layer:].index_select(0, piece.planes).view(-1, self._layout.head_dim)

    def _sums(self, out: Tensor, num_heads: int) -> Sums:
        """Allocates sums. Steps that use none allocate them too: their memory is in that of the largest trial step."""
        sums = out.new_empty(len(out), num_heads, self._latent.value_dim, dtype=torch.float32)
        return Sums(sums, out.new_empty(len(out), num_heads, 2, dtype=torch.float32))

    def _pieces(self, queries: PagedQueries, rows: np.ndarray) -> tuple[StagedPiece, ...]:
        tile = expanded_tile(self._planes.dtype)
        pieces = cut_pieces(queries, rows, self._layout, self._most_keys, (tile.tokens, tile.keys))
        return tuple(StagedPiece(self._staging.put(piece.planes), self._staging.put(piece.items)) for piece in pieces)
