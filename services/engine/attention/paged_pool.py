"""Operations of torch on a pool of KV blocks: the places of new tokens, and blocks gathered side by side."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvtransfer.layout import KvLayout
from services.engine.attention.base import PagedQueries


def begin_tokens(
    queries: PagedQueries,
    tables: np.ndarray,
    pool: Tensor,
    block_size: int,
    own_layers: Sequence[range] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the places of the step's T tokens: int64[S, T] blocks, and int[T] positions in them.

    Clears every block whose first position is among them, except those that the step fills. tables: int32[S, R, B], S
    block tables of each row. own_layers: of each slice, the places of the layers that are cleared; None: all.
    """
    blocks, positions, begun = token_places(queries, tables, block_size)
    if begun.size and own_layers is None:
        pool.index_fill_(0, torch.from_numpy(begun.reshape(-1)), 0)
    elif begun.size and own_layers is not None:
        for own, layers in zip(begun, own_layers, strict=True):
            pool[:, :, layers.start : layers.stop].index_fill_(0, torch.from_numpy(own), 0)
    return blocks, positions


def token_places(
    queries: PagedQueries, tables: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the places of the step's tokens, as `begin_tokens` does, and the blocks that it clears, int64[S, B]."""
    rows = np.repeat(np.arange(len(queries.seq_lens)), queries.query_starts[1:] - queries.query_starts[:-1])
    shifts = queries.seq_lens - queries.query_starts[1:]  # a token's position minus its index in the step
    index, positions = np.divmod(np.arange(len(rows), dtype=np.int64) + shifts[rows], block_size)
    num_slices, num_rows, width = tables.shape
    blocks = tables.reshape(num_slices, num_rows * width).take(rows * width + index, axis=1).astype(np.int64)
    begun = np.flatnonzero((positions == 0) & ((index + 1) * block_size > queries.seq_lens[rows]))
    return blocks, positions, np.ascontiguousarray(blocks[:, begun])


class Gatherer:
    """Copies blocks' K and V into memory that is used again and again."""

    def __init__(self, pool: Tensor, layout: KvLayout) -> None:
        self._layout = layout
        self._planes = pool.view(-1, layout.block_size * layout.head_dim)
        self._gathered = pool.new_empty(0)

    def gather(self, rows: Tensor, layer: int, num_tiles: int) -> tuple[Tensor, Tensor]:
        """Copies K and V, [tiles, kv_heads, keys, head_dim] each; one tensor, if a layer has one plane. They are valid
        until the next call.

        rows: int64[planes * tiles * kv_heads * blocks], a head's planes of the pool at layer 0, those of K, then those
        of V.
        """
        layout, width = self._layout, self._planes.shape[1]
        size = rows.shape[0] * width
        if self._gathered.shape[0] < size:
            self._gathered = self._planes.new_empty(size)
        target = self._gathered[:size].view(-1, width)
        torch.index_select(self._planes[layout.num_planes * layer :], 0, rows, out=target)
        planes = target.view(layout.num_planes, num_tiles, layout.num_kv_heads, -1, layout.head_dim)
        return planes[0], planes[-1]
