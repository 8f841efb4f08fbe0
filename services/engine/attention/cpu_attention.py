"""Paged attention on a CPU. Each part of a step takes the fastest way:

    rows with one query token       a kernel that reads their keys in the pool
    rows with several               `TileAttention`, also a kernel
    without kernels                 `FlashAttention`; `TorchAttention` for single tokens, with a window or a soft cap

Rows that begin with the same blocks attend to these together (cascade attention, as in FlashInfer, Ye et al. 2025,
arXiv 2501.01005) if that saves enough, and then each to the rest of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvtransfer.layout import KvLayout
from services.engine.attention.base import KernelInputs, PagedQueries
from services.engine.attention.by_layer import ByLayer, Windows, by_layer
from services.engine.attention.flash_attention import FlashAttention
from services.engine.attention.paged_pool import begin_tokens
from services.engine.attention.shared_prefix import SharedPrefix, shared_prefixes, tokens_of
from services.engine.attention.tile_attention import TileAttention, TilePlan
from services.engine.attention.torch_attention import TorchAttention, TorchPlan, with_sinks
from services.engine.kernels.base import CodedKv, Scoring, Singles
from services.engine.kernels.load import make_paged, make_tiles

# Tokens of a step for each token to which its plan is narrowed. On an EPYC of Zen 4, a layer's attention for 4 prompts
# of 512 tokens took 5.6 ms; for 4, 128 and 512 of these tokens, the plan included, 0.1, 3.1 and 5.1. For a prompt of
# 2,048 tokens it took 19.0 ms; for 1, 128 and 512 of them 0.1, 5.2 and 11.3.
_LEAST_NARROWED = 16
_NO_ROWS = np.empty(0, dtype=np.int64)
_MIN_SAVED_BLOCKS = 64  # with fewer, decoding a group together costs more than it saves


class SeveralPlan(Protocol):
    """The plan that `Several.prepare` makes."""

    def kernel_inputs(self) -> KernelInputs | None:
        """Returns what `Attention.kernel_inputs` does, of this part of a step, but for the block tables."""


class Several(Protocol):
    """Attention of rows with several query tokens, and of single tokens over prefixes that their rows share."""

    def prepare(self, queries: PagedQueries, rows: np.ndarray, shared: list[SharedPrefix], window: int | None) -> Any:
        """Does the step's index work. rows: int64[R], those with several tokens; shared: groups of rows with one."""

    def attend(self, plan: Any, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """Writes out, [T, heads, head_dim], and lse, float32[T, heads], for the tokens of these rows."""


@dataclass(frozen=True, slots=True, eq=False)
class _Masked:
    """Rows that TorchAttention computes."""

    tokens: Tensor  # int64[N], indices in the step
    plan: TorchPlan


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """The work that all layers with one window share."""

    window: int | None
    several: SeveralPlan | None  # None: `Several` has nothing to do
    singles: Singles | None
    masked: _Masked | None

    def kernel_inputs(self, others: "_Work") -> KernelInputs | None:
        """Returns what `Attention.kernel_inputs` does, without what is the same for all windows. others: the work of
        the first window.
        """
        several: KernelInputs | None = ((), ()) if self.several is None else self.several.kernel_inputs()
        if several is None:
            return None
        numbers, tensors = several
        if (singles := self.singles) is None:
            return (0, *numbers), tensors
        own = [singles.first_keys]
        if self is others:
            own += singles.tokens, singles.tables, singles.seq_lens
        return (len(singles.tokens), singles.tables.stride(0), int(singles.begun), *numbers), (*own, *tensors)

    def over(self, tables: np.ndarray, singles: Singles | None) -> "_Work":
        """Returns the same work over other block tables, int32[R, B]: for a layer with a window, whose rows share no
        prefixes, so that nothing else depends on the tables. singles: the rows with one token, with these tables.
        """
        several = self.several
        if several is not None:
            assert isinstance(several, TilePlan)
            several = TilePlan(torch.from_numpy(tables), several.passes)
        if singles is not None and self.singles is not None:
            singles = Singles(singles.tokens, singles.tables, self.singles.first_keys, singles.seq_lens, begun=False)
        return _Work(self.window, several, singles, masked=None)


@dataclass(frozen=True, slots=True, eq=False)
class CpuPlan:
    """The part of a step's work that its layers share."""

    queries: PagedQueries
    offsets: Tensor  # int64[T]: the pool's element at which each token's K in head 0 of layer 0 begins
    work: ByLayer[_Work]
    outputs: tuple[Tensor, Tensor]  # results of `attend`, layer after layer


class CpuAttention:
    """Attention over one pool, [num_blocks, kv_heads, layers, 2, block_size, head_dim]; of codes of one byte, it is
    uint8 in the layout's shape, and only kernels read it.
    """

    def __init__(
        self,
        pool: Tensor,
        layout: KvLayout,
        num_heads: int,
        scoring: Scoring,
        coded: CodedKv | None = None,
        *,
        fused: bool,
        before_layer: Callable[[], None] = lambda: None,
    ) -> None:
        """before_layer: called once for each layer of a step. coded: of a pool of codes, which needs `fused`."""
        assert fused or coded is None, "torch reads no codes"
        self._pool = pool
        self._layout = layout
        self._before_layer = before_layer
        self._num_heads = num_heads
        self._scoring = scoring
        self._dtype = pool.dtype if coded is None else coded.dtype
        group = num_heads // layout.num_kv_heads
        self._kernels = make_paged(pool, layout, group, scoring, coded, fused=fused)
        tiles = make_tiles(pool, layout, group, scoring, coded, fused=fused)
        self._masked = None
        if not fused:
            own_scoring = replace(scoring, sinks=None)
            self._masked = TorchAttention(pool, layout, num_heads, own_scoring, clears=False)
        self._several: Several = (
            FlashAttention(pool, layout, num_heads, scoring.scale)
            if tiles is None
            else TileAttention(tiles, layout.block_size)
        )

    @property
    def writes_by_kernel(self) -> bool:
        """See `Attention.writes_by_kernel`."""
        return self._kernels is not None

    def prepare(self, queries: PagedQueries, windows: Windows = None) -> CpuPlan:
        """See `Attention.prepare`."""
        return self.prepare_slices(queries, (windows,))[0]

    def prepare_slices(
        self, queries: PagedQueries, windows: Sequence[Windows], own_layers: Sequence[range] | None = None
    ) -> list[CpuPlan]:
        """Does the work of `prepare` for several slices at once, whose layers have these windows. own_layers: see
        `begin_tokens`.

        The table of each slice follows that of the one before: int32[R, S * B]. What does not depend on it is planned
        once, and all slices' results are in the same memory.
        """
        tables = _of_slices(queries.block_tables, len(windows))
        return self._plans(queries, tables, windows, self._offsets(queries, tables, own_layers))

    def narrow(self, plan: CpuPlan, tokens: Tensor, layer: int) -> CpuPlan | None:
        """Plans each token as a row of its own; None without kernels, and for more tokens than that pays for."""
        queries = plan.queries
        if self._kernels is None or len(tokens) * _LEAST_NARROWED > queries.query_starts[-1]:
            return None
        at = tokens.numpy()
        rows = np.searchsorted(queries.query_starts, at, side="right") - 1
        unseen = queries.query_starts[rows + 1] - 1 - at  # tokens of the row after it
        seq_lens = (queries.seq_lens[rows] - unseen).astype(np.int32)
        few = PagedQueries(np.arange(len(at) + 1, dtype=np.int32), seq_lens, queries.block_tables[rows])
        return self._plans(few, few.block_tables[None], (plan.work.at(layer).window,), (plan.offsets[:0],))[0]

    def _plans(
        self, queries: PagedQueries, tables: np.ndarray, windows: Sequence[Windows], offsets: Sequence[Tensor]
    ) -> list[CpuPlan]:
        """Plans each slice. tables: int32[S, R, B]; offsets: see `CpuPlan`."""
        is_single = queries.query_starts[1:] - queries.query_starts[:-1] == 1
        alone, several = np.flatnonzero(is_single), np.flatnonzero(~is_single)
        outputs = self._outputs(int(queries.query_starts[-1]))
        found: list[CpuPlan] = []
        of_windows: dict[Windows, _Work] = {}
        slices = zip(windows, tables, offsets, self._singles(queries, tables, alone), strict=True)
        for window, own_tables, own_offsets, singles in slices:
            own = PagedQueries(queries.query_starts, queries.seq_lens, own_tables)
            if window in of_windows:
                work = ByLayer((of_windows[window].over(own_tables, singles),), ())
            else:
                work = by_layer(window, partial(self._work, own, alone, several, singles))
                if isinstance(window, int) and self._kernels is not None:
                    of_windows[window] = work.values[0]
            found.append(CpuPlan(own, own_offsets, work, outputs))
        return found

    def _work(
        self,
        queries: PagedQueries,
        alone: np.ndarray,
        several: np.ndarray,
        singles: Singles | None,
        window: int | None,
    ) -> _Work:
        """Plans the layers with one window. alone, several: rows with one token and with more; singles: those with one,
        None: there are none, or no kernels.
        """
        masked, shared = _NO_ROWS, list[SharedPrefix]()
        if self._kernels is None:
            masked = alone
            if window is not None or self._scoring.softcap is not None:
                masked, several = np.arange(len(queries.seq_lens)), _NO_ROWS
        elif singles is not None:
            singles, shared = self._begun(singles, alone, window)
        return _Work(
            window,
            several=self._several.prepare(queries, several, shared, window) if len(several) or shared else None,
            singles=singles,
            masked=self._masked_part(queries, masked, window),
        )

    def kernel_inputs(self, plan: CpuPlan) -> KernelInputs | None:
        """See `Attention.kernel_inputs`."""
        if self._kernels is None:
            return None
        first = plan.work.values[0]
        numbers: list[int] = []
        tensors = [plan.offsets, *plan.outputs]
        if any(work.several is not None for work in plan.work):
            tensors.append(torch.from_numpy(plan.queries.block_tables))
        numbers.append(plan.queries.block_tables.shape[1] if len(tensors) > 3 else 0)
        for work in plan.work:
            if (inputs := work.kernel_inputs(first)) is None:
                return None
            numbers += len(inputs[0]), *inputs[0]
            tensors += inputs[1]
        return tuple(numbers), tuple(tensors)

    @property
    def rotate_and_write(self) -> None:
        """See `Attention.rotate_and_write`."""

    def write(self, plan: CpuPlan, layer: int, k: Tensor, v: Tensor) -> None:
        """See `Attention.write`."""
        self._before_layer()
        if self._kernels is not None:
            self._kernels.store(layer, plan.offsets, k, v)
            return
        layout = self._layout
        plane = layout.block_size * layout.head_dim
        heads = torch.arange(layout.num_kv_heads) * (self._pool.stride(1) // layout.head_dim)
        head_rows = (plan.offsets[:, None] // layout.head_dim + heads).view(-1)
        view = self._pool.view(-1, layout.head_dim)
        for at, new in ((2 * layer * plane, k), ((2 * layer + 1) * plane, v)):
            view[at // layout.head_dim :].index_copy_(0, head_rows, new.reshape(-1, layout.head_dim))

    def attend(self, plan: CpuPlan, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`."""
        (out, lse), work = plan.outputs, plan.work.at(layer)
        if work.several is not None:
            self._several.attend(work.several, layer, q, k, v, out, lse)
        if work.singles is not None and self._kernels is not None:
            self._kernels.attend(layer, q, out, lse, work.singles)
        if work.masked is not None:
            assert self._masked is not None
            tokens = work.masked.tokens
            out[tokens], lse[tokens] = self._masked.attend(work.masked.plan, layer, q[tokens], k, v)
        if self._kernels is None and self._scoring.sinks is not None:
            return with_sinks(out, lse, self._scoring.sinks[layer])
        return out, lse

    def _outputs(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        shape = num_tokens, self._num_heads, self._layout.head_dim
        out = self._pool.new_empty(shape, dtype=self._dtype)
        return out, self._pool.new_empty(out.shape[:2], dtype=torch.float32)

    def _offsets(self, queries: PagedQueries, tables: np.ndarray, own_layers: Sequence[range] | None) -> list[Tensor]:
        """Returns the offsets of the step's tokens in each slice, int64[T]."""
        blocks, positions = begin_tokens(queries, tables, self._pool, self._layout.block_size, own_layers)
        return list(map(torch.from_numpy, blocks * self._pool.stride(0) + positions * self._layout.head_dim))

    def _singles(self, queries: PagedQueries, tables: np.ndarray, rows: np.ndarray) -> Sequence[Singles | None]:
        """Returns the rows with one token in each slice, which attend from their first key on; None: there are none, or
        no kernels.
        """
        if self._kernels is None or not len(rows):
            return (None,) * len(tables)
        seq_lens = queries.seq_lens[rows]
        parts = queries.query_starts[rows], np.zeros_like(seq_lens), seq_lens
        tokens, first_keys, lens = map(torch.from_numpy, parts)
        of_slices = map(torch.from_numpy, tables.take(rows, axis=1))
        return [Singles(tokens, own, first_keys, lens, begun=False) for own in of_slices]

    def _begun(self, singles: Singles, rows: np.ndarray, window: int | None) -> tuple[Singles, list[SharedPrefix]]:
        """Returns single tokens with the first key that each sees on its own, and the prefixes that some rows share."""
        seq_lens, tables = singles.seq_lens.numpy(), singles.tables.numpy()
        first_keys = np.zeros_like(seq_lens)
        shared: list[SharedPrefix] = []
        if window is not None:
            first_keys = np.maximum(seq_lens - window, 0)
        else:
            size = self._layout.block_size
            for group in shared_prefixes(tables, (seq_lens - 1) // size, _MIN_SAVED_BLOCKS):
                first_keys[group.rows] = group.num_blocks * size
                shared.append(replace(group, rows=rows[group.rows]))
        return replace(singles, first_keys=torch.from_numpy(first_keys), begun=bool(shared)), shared

    def _masked_part(self, queries: PagedQueries, rows: np.ndarray, window: int | None) -> _Masked | None:
        if not len(rows):
            return None
        assert self._masked is not None, "kernels attend to all rows"
        starts = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(np.diff(queries.query_starts)[rows], out=starts[1:])
        some = PagedQueries(starts, queries.seq_lens[rows], queries.block_tables[rows])
        return _Masked(torch.from_numpy(tokens_of(queries, rows)), self._masked.prepare(some, window))


def _of_slices(tables: np.ndarray, num_slices: int) -> np.ndarray:
    """Returns the tables of each slice, int32[S, R, B], of rows that have them one after the other, int32[R, S * B]."""
    rows, width = tables.shape
    if num_slices == 1:
        return np.ascontiguousarray(tables)[None]
    return np.ascontiguousarray(tables.reshape(rows, num_slices, width // num_slices).transpose(1, 0, 2))
