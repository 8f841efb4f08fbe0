"""Attention of several query tokens of a row, and of rows that share a prefix, by a kernel that reads the pool itself.

Rows that share a prefix first attend to it together, with all their tokens; then each row's tokens attend to the rest.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.engine.attention.base import KernelInputs, PagedQueries
from services.engine.attention.shared_prefix import SharedPrefix, shared_prefixes, tokens_of
from services.engine.kernels.base import PagedTiles, Tiles

_MIN_SAVED_BLOCKS = 16  # for chunks of prompts, where reading a block costs little beside its products


@dataclass(frozen=True, slots=True, eq=False)
class TilePlan:
    """The part of a step's work that all its layers share."""

    tables: Tensor  # int32[R, B], the step's own
    passes: list[Tiles]  # computed one after the other

    def kernel_inputs(self) -> KernelInputs:
        """Returns the inputs of the passes, without the tables: whoever has the plan names these once."""
        numbers: list[int] = []
        tensors: list[Tensor] = []
        for tiles in self.passes:
            numbers += len(tiles.rows), tiles.window, int(tiles.begun)
            tensors += tiles.tokens, tiles.limits, tiles.starts, tiles.rows, tiles.first_keys
        return tuple(numbers), tuple(tensors)


class TileAttention:
    """`Several` by a kernel."""

    def __init__(self, kernel: PagedTiles, block_size: int) -> None:
        self._kernel = kernel
        self._block_size = block_size

    def prepare(
        self, queries: PagedQueries, rows: np.ndarray, shared: list[SharedPrefix], window: int | None
    ) -> TilePlan:
        """See `Several.prepare`."""
        counts = np.diff(queries.query_starts)
        before = (queries.seq_lens - counts)[rows] // self._block_size
        begins = np.zeros(len(counts), dtype=np.int32)
        groups = list(shared)
        alike = shared_prefixes(queries.block_tables[rows], before, _MIN_SAVED_BLOCKS) if window is None else []
        for group in alike:
            groups.append(SharedPrefix(rows[group.rows], group.num_blocks))
            begins[rows[group.rows]] = group.num_blocks * self._block_size
        passes = []
        if groups:
            passes.append(self._together(queries, groups))
        if len(rows):
            passes.append(self._apart(queries, rows, begins, window or 0))
        return TilePlan(torch.from_numpy(np.ascontiguousarray(queries.block_tables)), passes)

    def attend(self, plan: TilePlan, layer: int, q: Tensor, _k: Tensor, _v: Tensor, out: Tensor, lse: Tensor) -> None:
        """See `Several.attend`."""
        for tiles in plan.passes:
            self._kernel.attend(layer, q, out, lse, tiles, plan.tables)

    def _together(self, queries: PagedQueries, groups: list[SharedPrefix]) -> Tiles:
        tokens = [tokens_of(queries, group.rows) for group in groups]
        lengths = np.array([len(some) for some in tokens])
        limits = np.repeat([group.num_blocks * self._block_size for group in groups], lengths)
        first_rows = np.array([group.rows[0] for group in groups])
        return self._cut(np.concatenate(tokens), limits, lengths, first_rows, np.zeros_like(first_rows))

    def _apart(self, queries: PagedQueries, rows: np.ndarray, begins: np.ndarray, window: int) -> Tiles:
        tokens = tokens_of(queries, rows)
        lengths = np.diff(queries.query_starts)[rows]
        shifts = queries.seq_lens[rows] - queries.query_starts[rows + 1]  # position minus index in the step
        return self._cut(tokens, tokens + np.repeat(shifts, lengths) + 1, lengths, rows, begins[rows], window)

    def _cut(
        self,
        tokens: np.ndarray,
        limits: np.ndarray,
        lengths: np.ndarray,
        rows: np.ndarray,
        begins: np.ndarray,
        window: int = 0,
    ) -> Tiles:
        """Cuts stretches of tokens, each with one block table, evenly into tiles that the kernel takes."""
        pieces = -(-lengths // self._kernel.max_tokens)
        of = np.repeat(np.arange(len(lengths)), pieces)
        number = np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = np.append((np.cumsum(lengths) - lengths)[of] + number * lengths[of] // pieces[of], len(tokens))
        first_keys = begins[of]
        if window:
            size = self._block_size
            first_keys = np.maximum(limits[starts[:-1]] - window, 0) // size * size
        parts = tokens, limits, starts, rows[of], first_keys
        of_tokens, limit, start, row, begin = (torch.from_numpy(part.astype(np.int32)) for part in parts)
        return Tiles(of_tokens, limit, start, row, begin, window, begun=bool(begins.any()))
