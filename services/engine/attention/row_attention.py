"""Attention within rows that are whole in a step, in both directions, without a pool of KV: for encoders, and for
decoders that make embeddings of all tokens.

Rows of the same length are attended together. In a layer with a reach, a token sees those at most so far before and
after it; such a layer's long rows are cut into tiles of queries, each with the keys that one of them sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from services.engine.attention.base import PagedQueries
from services.engine.attention.by_layer import Windows

TILE = 512  # queries of a row that are attended together, at most, in a layer with a reach


@dataclass(frozen=True, slots=True, eq=False)
class RowPlan:
    """The part of a step's work that all its layers share: the tokens of rows of equal length, int64[rows, length]."""

    groups: tuple[Tensor, ...]
    num_tokens: int


class RowAttention:
    """`Attention` without a pool. Its second result, the log-sum-exp, is empty: nothing is merged."""

    def __init__(self, num_kv_heads: int, scale: float, reaches: Sequence[int | None]) -> None:
        """reaches: of each layer, see `EncoderConfig.reaches`."""
        self._num_kv_heads = num_kv_heads
        self._scale = scale
        self._reaches = reaches

    @property
    def writes_by_kernel(self) -> bool:
        """See `Attention.writes_by_kernel`."""
        return False

    @property
    def rotate_and_write(self) -> None:
        """See `Attention.rotate_and_write`."""

    def prepare(self, queries: PagedQueries, windows: Windows = None) -> RowPlan:
        """See `Attention.prepare`. The rows are whole: their tokens are all of their positions."""
        assert windows is None, "a window looks back alone"
        lengths, starts = np.diff(queries.query_starts), queries.query_starts[:-1].astype(np.int64)
        assert np.array_equal(lengths, queries.seq_lens), "a row is not whole in the step"
        groups = [starts[lengths == length, None] + np.arange(length) for length in np.unique(lengths)]
        return RowPlan(tuple(map(torch.from_numpy, groups)), int(queries.query_starts[-1]))

    def narrow(self, plan: RowPlan, tokens: Tensor, layer: int) -> None:
        """Returns None: attention is for all tokens of a step."""

    def kernel_inputs(self, plan: RowPlan) -> None:
        """See `Attention.kernel_inputs`."""

    def write(self, plan: RowPlan, layer: int, k: Tensor, v: Tensor) -> None:
        """Does nothing: K and V are those of `attend`."""

    def attend(self, plan: RowPlan, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the attention of q [T, heads, head_dim] over each token's row, see `Attention.attend`."""
        out = q.new_empty(q.shape)
        for tokens in plan.groups:
            rows, keys, values = (part[tokens].transpose(1, 2) for part in (q, k, v))
            out[tokens] = self._rows(rows, keys, values, self._reaches[layer]).transpose(1, 2)
        return out, q.new_empty(0, dtype=torch.float32)

    def _rows(self, q: Tensor, k: Tensor, v: Tensor, reach: int | None) -> Tensor:
        """Attends rows of equal length, [rows, heads or kv_heads, length, head_dim]."""
        length = q.shape[2]
        if reach is None or length <= reach + 1:
            return self._attend(q, k, v, None)
        parts = []
        for start in range(0, length, TILE):
            end = min(start + TILE, length)
            first, last = max(0, start - reach), min(length, end + reach)
            apart = torch.arange(start, end)[:, None] - torch.arange(first, last)
            keys = slice(first, last)
            parts.append(self._attend(q[:, :, start:end], k[:, :, keys], v[:, :, keys], apart.abs() <= reach))
        return torch.cat(parts, dim=2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None) -> Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=sees, scale=self._scale, enable_gqa=q.shape[1] != self._num_kv_heads
        )
