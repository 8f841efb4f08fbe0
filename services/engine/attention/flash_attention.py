"""Attention of several query tokens of a row, by torch's flash attention, which knows no block tables.

    new keys                  causally over themselves, straight from the projections
    earlier keys              gathered once for all rows that share them, then without a mask

The parts are merged by their log-sum-exps.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvtransfer.layout import KvLayout
from services.engine.attention.base import PagedQueries
from services.engine.attention.paged_pool import Gatherer
from services.engine.attention.shared_prefix import SharedPrefix, shared_prefixes, tokens_of

_MAX_GATHERED = 1 << 24  # elements of K and V at a time


@dataclass(frozen=True, slots=True, eq=False)
class _Fresh:
    """New keys of n rows with several tokens, padded to one length."""

    tokens: Tensor | slice  # int64[n * length], indices in the step; a slice for n = 1
    kept: tuple[Tensor, Tensor] | None  # indices of real ones among the padded tokens, and in the step
    num_rows: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class _Context:
    """Keys from before the step, and the tokens that see all of them."""

    tokens: Tensor | slice  # int64[N]
    kv_rows: Tensor  # int64[2 * kv_heads * blocks]: rows of the pool at layer 0, of K, then of V
    num_keys: int
    first: bool  # True: these tokens have no output yet


@dataclass(frozen=True, slots=True, eq=False)
class FlashPlan:
    """The part of a step's work that all its layers share."""

    fresh: list[_Fresh]
    contexts: list[_Context]

    def kernel_inputs(self) -> None:
        """See `SeveralPlan.kernel_inputs`."""


class FlashAttention:
    """`Several` by torch, for every dtype."""

    def __init__(self, pool: Tensor, layout: KvLayout, num_heads: int, scale: float) -> None:
        self._layout = layout
        self._group = num_heads // layout.num_kv_heads
        self._scale = scale
        self._gatherer = Gatherer(pool, layout)
        self._heads = np.arange(layout.num_kv_heads, dtype=np.int64)

    def prepare(
        self, queries: PagedQueries, rows: np.ndarray, shared: list[SharedPrefix], window: int | None
    ) -> FlashPlan:
        """See `Several.prepare`. Supports no window."""
        assert window is None
        contexts = [*self._contexts(queries, rows)]
        for group in shared:
            contexts += self._shared(queries, group, first=True)
        return FlashPlan(list(self._fresh(queries, rows)), contexts)

    def attend(self, plan: FlashPlan, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """See `Several.attend`."""
        for fresh in plan.fresh:
            self._attend_fresh(fresh, q, k, v, out, lse)
        for context in plan.contexts:
            self._attend_context(context, layer, q, out, lse)

    def _attend_fresh(self, fresh: _Fresh, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        n, length, kv_heads, group = fresh.num_rows, fresh.length, self._layout.num_kv_heads, self._group
        shape = (n, length, kv_heads, group, self._layout.head_dim)
        folded = q[fresh.tokens].view(shape).permute(0, 2, 3, 1, 4).flatten(0, 1)
        keys, values = (
            x[fresh.tokens].unflatten(0, (n, length)).transpose(1, 2).flatten(0, 1)[:, None].expand(-1, group, -1, -1)
            for x in (k, v)
        )
        # [rows * kv_heads, group, length, head_dim]
        part, part_lse = _flash(folded, keys, values, self._scale, causal=True)
        part = part.unflatten(0, (n, kv_heads)).permute(0, 3, 1, 2, 4).reshape(n * length, -1, self._layout.head_dim)
        part_lse = part_lse.unflatten(0, (n, kv_heads)).permute(0, 3, 1, 2).reshape(n * length, -1)
        if fresh.kept is None:
            out[fresh.tokens], lse[fresh.tokens] = part, part_lse
        else:
            chosen, tokens = fresh.kept
            out[tokens], lse[tokens] = part[chosen], part_lse[chosen]

    def _attend_context(self, context: _Context, layer: int, q: Tensor, out: Tensor, lse: Tensor) -> None:
        kv_heads, group, head_dim = self._layout.num_kv_heads, self._group, self._layout.head_dim
        keys, values = self._gatherer.gather(context.kv_rows, layer, 1)
        picked = q[context.tokens].unflatten(1, (kv_heads, group))
        folded = picked.transpose(0, 1).reshape(1, kv_heads, -1, head_dim)
        n = context.num_keys
        part, part_lse = _flash(folded, keys[:, :, :n], values[:, :, :n], self._scale, causal=False)
        part = part.view(kv_heads, -1, group, head_dim).transpose(0, 1).reshape(-1, kv_heads * group, head_dim)
        part_lse = part_lse.view(kv_heads, -1, group).transpose(0, 1).reshape(-1, kv_heads * group)
        if context.first:
            out[context.tokens], lse[context.tokens] = part, part_lse
            return
        before, before_lse = out[context.tokens], lse[context.tokens]
        weight = torch.sigmoid(part_lse - before_lse)[:, :, None]
        out[context.tokens] = torch.lerp(before.float(), part.float(), weight).to(out.dtype)
        lse[context.tokens] = torch.logaddexp(before_lse, part_lse)

    def _fresh(self, queries: PagedQueries, rows: np.ndarray) -> Iterator[_Fresh]:
        """Pads rows of like length, by powers of two, to the longest. Padding comes after the tokens that it could
        affect.
        """
        starts, counts = queries.query_starts[:-1].astype(np.int64), np.diff(queries.query_starts)
        kinds = np.ceil(np.log2(counts[rows]))
        for kind in np.unique(kinds):
            members = rows[kinds == kind]
            length = int(counts[members].max())
            if len(members) == 1:
                start = int(starts[members[0]])
                yield _Fresh(slice(start, start + length), None, 1, length)
                continue
            steps = np.arange(length)
            tokens = (starts[members, None] + np.minimum(steps, counts[members, None] - 1)).reshape(-1)
            chosen = np.flatnonzero((steps < counts[members, None]).reshape(-1))
            kept = None
            if len(chosen) < len(tokens):
                kept = torch.from_numpy(chosen), torch.from_numpy(tokens[chosen])
            yield _Fresh(torch.from_numpy(tokens), kept, len(members), length)

    def _contexts(self, queries: PagedQueries, rows: np.ndarray) -> Iterator[_Context]:
        """Yields the earlier keys of rows with several new tokens: first those that rows share, then each row's own."""
        before = (queries.seq_lens - np.diff(queries.query_starts))[rows]
        if not before.any():
            return
        begins = np.zeros(len(rows), dtype=np.int64)
        for group in shared_prefixes(queries.block_tables[rows], before // self._layout.block_size, 1):
            begins[group.rows] = group.num_blocks
            yield from self._shared(queries, SharedPrefix(rows[group.rows], group.num_blocks), first=False)
        for row in np.flatnonzero(before > begins * self._layout.block_size).tolist():
            start, end = queries.query_starts[rows[row]], queries.query_starts[rows[row] + 1]
            num_keys = int(before[row]) - int(begins[row]) * self._layout.block_size
            table = queries.block_tables[rows[row], begins[row] :]
            yield from self._pieces(slice(int(start), int(end)), table, num_keys, first=False)

    def _shared(self, queries: PagedQueries, group: SharedPrefix, *, first: bool) -> Iterator[_Context]:
        tokens = torch.from_numpy(tokens_of(queries, group.rows))
        table = queries.block_tables[group.rows[0], : group.num_blocks]
        yield from self._pieces(tokens, table, group.num_blocks * self._layout.block_size, first=first)

    def _pieces(self, tokens: Tensor | slice, table: np.ndarray, num_keys: int, *, first: bool) -> Iterator[_Context]:
        """Cuts the first num_keys keys of a table into contexts of bounded size."""
        layout = self._layout
        size = layout.block_size
        limit = max(1, _MAX_GATHERED // (2 * layout.num_kv_heads * layout.head_dim * size))
        num_blocks = -(-num_keys // size)
        for at in range(0, num_blocks, limit):
            blocks = table[at : min(at + limit, num_blocks)].astype(np.int64)
            heads = (blocks * layout.num_kv_heads)[None] + self._heads[:, None]
            kv_rows = torch.from_numpy((heads * (2 * layout.num_layers)).reshape(-1))
            keys = min(len(blocks) * size, num_keys - at * size)
            yield _Context(tokens, torch.cat((kv_rows, kv_rows + 1)), keys, first and at == 0)


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attends with [B, H, queries, head_dim] to [B, H, keys, head_dim].

    Returns the output, and its log-sum-exp, float32[B, H, queries].
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal, scale=scale)
    return out, lse
