"""Paged attention with torch operations alone: the reference, and the fallback of other backends.

Long queries are cut into tiles. Tiles of like length over a like number of blocks share a bucket (powers of two), are
padded to the longest one in it, and cost one gather and one batched attention in each layer. The query heads of a group
are further queries of their KV head, so that no K or V is repeated:

    gathered K      [tiles, kv_heads, keys, head_dim]        one row of the gather = one head's K tile of one block
    folded queries  [tiles, kv_heads, queries x group, head_dim]

Python's work in a step grows with the number of buckets, not of rows.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvtransfer.layout import KvLayout
from services.engine.attention.base import PagedQueries
from services.engine.attention.by_layer import ByLayer, Windows, by_layer
from services.engine.attention.paged_pool import Gatherer, begin_tokens, token_places
from services.engine.kernels.base import Scoring

TILE = 256  # query tokens of one row that are attended together, at most
PART_ELEMENTS = 1 << 24  # elements of gathered K and V, and of a mask, in one call: bounds a step's memory


@dataclass(frozen=True, slots=True, eq=False)
class _Tiles:
    """Pieces of rows, up to TILE query tokens each. Arrays are parallel, int64."""

    row: np.ndarray
    start: np.ndarray  # index of the first query token in the step
    count: np.ndarray  # number of query tokens
    position: np.ndarray  # position of the first query token in its row
    first_block: np.ndarray  # the first of the row's blocks of which a query sees anything
    end_block: np.ndarray  # the block after the last of these

    def __getitem__(self, chosen: np.ndarray) -> "_Tiles":
        return _Tiles(*(getattr(self, name)[chosen] for name in _Tiles.__slots__))


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One batched attention: n tiles padded to the same number of queries and blocks."""

    queries: Tensor | None  # int64[n * num_queries]: tokens of the step; None: its first n tokens
    kv_rows: Tensor  # int64[planes * n * kv_heads * num_blocks]: rows of the pool at layer 0, of K, then of V
    mask: Tensor  # [n, 1, 1 or num_queries * group, keys], added to scores
    num_tiles: int
    num_queries: int


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """The work that all layers with one window share."""

    parts: list[_Part]
    order: Tensor | None  # int64[T]: each token's index in the parts' padded outputs; None: they are in order


@dataclass(frozen=True, slots=True, eq=False)
class TorchPlan:
    """The part of a step's work that its layers share."""

    head_rows: Tensor  # int64[T * kv_heads]: head_dim-wide rows of the pool for new K at layer 0
    work: ByLayer[_Parts]


class TorchAttention:
    """Attention over one pool, [num_blocks, kv_heads, layers, planes, block_size, head_dim].

    Where there is one plane, its rows are both K and V.
    """

    def __init__(
        self, pool: Tensor, layout: KvLayout, num_heads: int, scoring: Scoring, *, clears: bool = True
    ) -> None:
        """clears: see `begin_tokens`; False: another backend over this pool has done so before `prepare`."""
        self._pool = pool
        self._clears = clears
        self._layout = layout
        self._group = num_heads // layout.num_kv_heads
        self._scoring = scoring
        self._gatherer = Gatherer(pool, layout)
        self._head_rows_view = pool.view(-1, layout.head_dim)
        self._heads = np.arange(layout.num_kv_heads, dtype=np.int64)

    def prepare(self, queries: PagedQueries, windows: Windows = None) -> TorchPlan:
        """See `Attention.prepare`."""
        return TorchPlan(self._new_head_rows(queries), by_layer(windows, partial(self._parts, queries)))

    @property
    def writes_by_kernel(self) -> bool:
        """See `Attention.writes_by_kernel`."""
        return False

    def narrow(self, plan: TorchPlan, tokens: Tensor, layer: int) -> None:
        """Returns None: this backend attends to all tokens of a step."""

    def kernel_inputs(self, plan: TorchPlan) -> None:
        """See `Attention.kernel_inputs`."""

    @property
    def rotate_and_write(self) -> None:
        """See `Attention.rotate_and_write`."""

    def write(self, plan: TorchPlan, layer: int, k: Tensor, v: Tensor) -> None:
        """See `Attention.write`."""
        plane, head_dim, planes = self._layout.block_size, self._layout.head_dim, self._layout.num_planes
        for number, new in enumerate((k, v)[:planes]):
            rows = self._head_rows_view[(planes * layer + number) * plane :]
            rows.index_copy_(0, plan.head_rows, new.reshape(-1, head_dim))

    def attend(self, plan: TorchPlan, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`. Reads K and V from the pool."""
        work = plan.work.at(layer)
        results = [self._attend_part(part, layer, q) for part in work.parts]
        out, lse = results[0]
        if work.order is not None:
            outs, lses = zip(*results, strict=True)
            out, lse = torch.cat(outs).index_select(0, work.order), torch.cat(lses).index_select(0, work.order)
        return (out, lse) if self._scoring.sinks is None else with_sinks(out, lse, self._scoring.sinks[layer])

    def _attend_part(self, part: _Part, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Returns outputs and log-sum-exps of the part's padded queries: [tiles * queries, heads, head_dim], [..,
        heads].
        """
        n, kv_heads, group, head_dim = part.num_tiles, self._layout.num_kv_heads, self._group, self._layout.head_dim
        keys, values = self._gatherer.gather(part.kv_rows, layer, n)
        picked = q[:n] if part.queries is None else q.index_select(0, part.queries)
        folded = picked.view(n, part.num_queries, kv_heads, group, head_dim).transpose(1, 2)
        attend = _attend if self._scoring.softcap is None else _attend_capped
        out, lse = attend(folded.reshape(n, kv_heads, -1, head_dim), keys, values, part.mask, self._scoring)
        out = out.view(n, kv_heads, part.num_queries, group, head_dim).transpose(1, 2)
        lse = lse.view(n, kv_heads, part.num_queries, group).transpose(1, 2)
        return out.reshape(-1, kv_heads * group, head_dim), lse.reshape(-1, kv_heads * group)

    def _new_head_rows(self, queries: PagedQueries) -> Tensor:
        layout = self._layout
        tables = queries.block_tables[None]
        if self._clears:
            (blocks,), positions = begin_tokens(queries, tables, self._pool, layout.block_size)
        else:
            (blocks,), positions, _ = token_places(queries, tables, layout.block_size)
        heads = blocks[:, None] * layout.num_kv_heads + self._heads
        head_rows = heads * (layout.num_layers * layout.num_planes * layout.block_size) + positions[:, None]
        return torch.from_numpy(head_rows.reshape(-1))

    def _parts(self, queries: PagedQueries, window: int | None) -> _Parts:
        tiles = _cut(queries, self._layout.block_size, window)
        buckets = self._buckets(tiles)
        parts = [self._part(queries, tiles[chosen], window) for chosen in buckets]
        if len(parts) == 1 and parts[0].queries is None:
            return _Parts(parts, None)
        return _Parts(parts, _order([tiles[chosen] for chosen in buckets], int(queries.query_starts[-1])))

    def _buckets(self, tiles: _Tiles) -> list[np.ndarray]:
        """Returns the tiles that are attended together: of like lengths, and no more of them than a part may have."""
        lengths, depths = _log2_ceil(tiles.count), _log2_ceil(tiles.end_block - tiles.first_block)
        kinds = lengths * 64 + depths
        per_key = max(2 * self._layout.num_kv_heads * self._layout.head_dim, self._group * TILE)
        chosen: list[np.ndarray] = []
        for kind in np.unique(kinds):
            members = np.flatnonzero(kinds == kind)
            size = per_key * self._layout.block_size << int(kind % 64)
            limit = max(1, PART_ELEMENTS // size)
            chosen += [members[at : at + limit] for at in range(0, len(members), limit)]
        return chosen

    def _part(self, queries: PagedQueries, tiles: _Tiles, window: int | None) -> _Part:
        n, num_queries = len(tiles.row), int(tiles.count.max())
        num_blocks = int((tiles.end_block - tiles.first_block).max())
        in_order = num_queries == 1 and tiles.start[0] == 0 and tiles.start[-1] == n - 1
        # Padding repeats a tile's last query, and its first block, which the mask hides.
        steps = np.minimum(np.arange(num_queries), tiles.count[:, None] - 1)
        index = tiles.first_block[:, None] + np.arange(num_blocks)
        index = np.where(index < tiles.end_block[:, None], index, tiles.first_block[:, None])
        table = queries.block_tables[tiles.row[:, None], index].astype(np.int64)
        heads = table[:, None, :] * self._layout.num_kv_heads + self._heads[:, None]
        planes = self._layout.num_planes
        rows = torch.from_numpy((heads * (planes * self._layout.num_layers)).reshape(-1))
        num_keys = num_blocks * self._layout.block_size
        positions = (tiles.position - tiles.first_block * self._layout.block_size)[:, None] + steps
        return _Part(
            queries=None if in_order else torch.from_numpy((tiles.start[:, None] + steps).reshape(-1)),
            kv_rows=torch.cat((rows, rows + 1)[:planes]),
            mask=self._mask(torch.from_numpy(positions), num_keys, window),
            num_tiles=n,
            num_queries=num_queries,
        )

    def _mask(self, positions: Tensor, num_keys: int, window: int | None) -> Tensor:
        """Returns a mask with -inf for keys that a query must not see.

        positions: [n, num_queries], each query's position after its tile's first key.
        """
        keys = torch.arange(num_keys)
        hidden = keys > positions[:, :, None]
        if window is not None:
            hidden |= keys <= positions[:, :, None] - window
        mask = torch.zeros(hidden.shape, dtype=self._pool.dtype).masked_fill_(hidden, -torch.inf)
        if positions.shape[1] > 1:
            mask = mask.repeat_interleave(self._group, dim=1)
        return mask[:, None]


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Adds one more score of each query, of a key without a value, to an attention's output, [T, heads, head_dim], and
    log-sum-exp, float32[T, heads]. sinks: float32[heads].
    """
    return (out * torch.sigmoid(lse - sinks)[:, :, None]).to(out.dtype), torch.logaddexp(lse, sinks)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Attends with [n, kv_heads, queries, head_dim]. Returns the output, and float32[n, kv_heads, queries]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, keys, values, attn_mask=mask, scale=scoring.scale
    )
    return out, lse


def _attend_capped(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Does the work of `_attend` with a soft cap, in float32, one head after the other."""
    assert scoring.softcap is not None
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    for head in range(q.shape[1]):
        scores = q[:, head].float() @ keys[:, head].float().transpose(1, 2)
        scores.mul_(scoring.scale / scoring.softcap).tanh_().mul_(scoring.softcap).add_(mask[:, 0])
        lse[:, head] = scores.logsumexp(-1)
        out[:, head] = scores.sub_(lse[:, head, :, None]).exp_() @ values[:, head].float()
    return out, lse


def _cut(queries: PagedQueries, block_size: int, window: int | None) -> _Tiles:
    starts, counts = queries.query_starts[:-1].astype(np.int64), np.diff(queries.query_starts).astype(np.int64)
    pieces = -(-counts // TILE)
    row = np.repeat(np.arange(len(counts)), pieces)
    number = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    count = np.minimum(counts[row] - number * TILE, TILE)
    position = queries.seq_lens[row] - counts[row] + number * TILE
    first_key = np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)
    return _Tiles(
        row=row,
        start=starts[row] + number * TILE,
        count=count,
        position=position,
        first_block=first_key // block_size,
        end_block=-(-(position + count) // block_size),
    )


def _log2_ceil(values: np.ndarray) -> np.ndarray:
    """Returns the smallest e with 2**e >= value, for values from 1 on: exact below 2**53."""
    exponents: np.ndarray = np.frexp((values - 1).astype(np.float64))[1]
    return exponents.astype(np.int64)


def _order(parts: list[_Tiles], num_tokens: int) -> Tensor:
    """Returns each token's row in the parts' padded outputs, laid one after the other."""
    order = np.empty(num_tokens, dtype=np.int64)
    base = 0
    for tiles in parts:
        width = int(tiles.count.max())
        real = np.arange(width) < tiles.count[:, None]
        padded = np.arange(base, base + real.size).reshape(real.shape)
        order[(tiles.start[:, None] + np.arange(width))[real]] = padded[real]
        base += real.size
    return torch.from_numpy(order)
