"""Paged attention on a GPU: the kernels of `kernels.gpu.attention` behind the engine's seam.

A step outside of a CUDA graph launches programs for the items that it has. A step for a graph has only rows with one
query token, and its launches depend on nothing but its bucket, `padded_rows`: the same grids over the same addresses;
programs without an item end at once. Such a step stages:

    offsets int64[S, padded_rows]         of each slice of a block (see `kvtransfer/layer_groups.py`); -1 for padding
    pack    int32, one array of sections  items of each kind, tokens, limits, partials, merges; a section has a room of
                                          the bucket's size, which begins at a multiple of 16 bytes. One pack for each
                                          distinct window of the model's layers
    tables  int32, rows' blocks           last, since its size changes from step to step. The numbers of a block's
                                          slices lie next to each other
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtransfer.layout import KvLayout
from services.engine.attention.base import PagedQueries
from services.engine.attention.by_layer import ByLayer, Windows, by_layer, distinct_windows
from services.engine.attention.staging import Staging
from services.engine.attention.work_items import Tiling, WorkItems, WorkPlanner
from services.engine.kernels.base import Scoring
from services.engine.kernels.gpu.paged_attention import (
    ItemEntries,
    ItemKernels,
    Kind,
    Outputs,
    PagedAttentionKernels,
    SlicedKernels,
)
from services.engine.kernels.gpu.rotary import PagedKv, rotate_and_store, store_kv

_MUCH_LONGER = 3  # if the longest row is so many times the average, tables are copied without unused entries


@dataclass(frozen=True, slots=True)
class WorkCut:
    """Options of cutting a step's attention into work items."""

    num_multiprocessors: int  # of the device; all of them get work
    split_keys: int | None = None  # see `WorkPlanner`; with it a row's results depend on the row alone
    share_prefixes: bool = True  # see `WorkPlanner`


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Kv:
    """Scales of a pool of float8_e4m3fn, and the dtype of the model over it."""

    scales: Tensor  # float32[layers, 2, kv_heads], by which the pool's K and V are multiplied
    dtype: torch.dtype  # of q and of the output


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """Items of one kind, int32[1 + N, 6], and the number of programs that take them for each KV head."""

    kind: Kind
    items: Tensor
    grid: int


@dataclass(frozen=True, slots=True, eq=False)
class LayerWork:
    """The work that all layers with one window share."""

    entries: ItemEntries
    launches: tuple[Launch, ...]
    merges: Tensor | None  # int32[J, 3]; None: no token has partial outputs
    window: int  # 0: none


@dataclass(frozen=True, slots=True, eq=False)
class TritonPlan:
    """The part of a step's work that its layers share. T: its tokens, or its bucket's padded_rows."""

    offsets: Tensor  # int64[S, T]: the pool's element of a token's K in head 0 of each slice's first layer; padding: -1
    work: ByLayer[LayerWork]
    outputs: Outputs


class ItemAttention:
    """Steps over one pool, cut into work items for some kernels and staged for a device.

    Blocks are not cleared: the kernels read only positions that were written.
    """

    def __init__(
        self,
        pool: Tensor,
        layout: KvLayout,
        kernels: ItemKernels,
        dtype: torch.dtype,
        *,
        staging: Staging,
        cut: WorkCut,
    ) -> None:
        """dtype: of the output."""
        self._pool = pool
        self._layout = layout
        self._staging = staging
        self._dtype = dtype
        self._kernels = kernels
        tiles = kernels.tiles
        programs = {kind: -(-cut.num_multiprocessors * tile.resident // kernels.parts) for kind, tile in tiles.items()}
        tiling = Tiling(
            block_size=layout.block_size,
            programs=programs["decode"],
            wide_programs=programs["prefill"],
            prefill_tokens=tiles["prefill"].tokens,
            shared_tokens=tiles["shared"].tokens,
            slices=1 if layout.groups is None else layout.groups.sizes[0],
        )
        self._programs = programs
        self._planner = WorkPlanner(tiling, cut.split_keys, share_prefixes=cut.share_prefixes)
        self._of_bucket: dict[int, Outputs] = {}  # kept, since graphs write to them

    def prepare(self, queries: PagedQueries, windows: Windows = None) -> TritonPlan:
        """See `Attention.prepare`. The launches are this step's own; those of `prepare_recorded` can be replayed."""
        counts = np.diff(queries.query_starts)
        max_partials = self._planner.max_partials(int((counts == 1).sum()), bool((counts > 1).any()))
        tables, table_starts, planned = self._tables(queries)
        items = by_layer(windows, lambda window: self._planner.plan(planned, window, max_partials, table_starts))
        offsets = self._staging.put(self.offsets(queries))
        work = self._staged(items, windows, tables, None)
        num_partials = max(some.num_partials for some in items)
        outputs = self._outputs(offsets.shape[1], num_partials, self._pool.new_empty)
        return TritonPlan(offsets, work, outputs)

    def prepare_recorded(self, queries: PagedQueries, padded_rows: int, windows: Windows = None) -> TritonPlan:
        """Plans a step for replay: its launches are the same for all steps with these padded_rows.

        The step has at most padded_rows rows, of one query token each; q, k and v have padded_rows tokens. Raises
        ValueError.
        """
        num_rows = len(queries.seq_lens)
        if num_rows > padded_rows or queries.query_starts[-1] != num_rows or (np.diff(queries.query_starts) != 1).any():
            raise ValueError(f"a step that is replayed has at most {padded_rows} rows, with one query token each")
        max_partials = self._planner.max_partials(padded_rows)
        tables, table_starts, planned = self._tables(queries)
        items = by_layer(windows, lambda window: self._planner.plan(planned, window, max_partials, table_starts))
        offsets = np.full((self._layout.num_slices, padded_rows), -1, np.int64)
        offsets[:, :num_rows] = self.offsets(queries)
        on_device = self._staging.put(offsets, fixed=True)
        work = self._staged(items, windows, tables, padded_rows)
        return TritonPlan(on_device, work, self._bucket_outputs(padded_rows, max_partials))

    def run(self, plan: TritonPlan, layer: int, q: Any) -> Outputs:
        """Attends to the latest KV of a layer. q: the queries, as the kernels take them. Results for padding mean
        nothing.
        """
        work = plan.work.at(layer)
        for launch in work.launches:
            self._kernels.attend(
                launch.kind, layer, q, plan.outputs, launch.items, work.entries, launch.grid, work.window
            )
        if work.merges is not None:
            self._kernels.merge(layer, plan.outputs, work.merges)
        return plan.outputs

    def _bucket_outputs(self, padded_rows: int, max_partials: int) -> Outputs:
        """Returns a bucket's outputs, allocated once or part of a larger bucket's: the largest bucket should come
        first.
        """
        if padded_rows not in self._of_bucket:
            larger = [size for size in self._of_bucket if size > padded_rows]
            if larger:
                whole = self._of_bucket[min(larger)]
                some = replace(whole, out=whole.out[:padded_rows], lse=whole.lse[:padded_rows])
            else:
                some = self._outputs(padded_rows, max_partials, self._pool.new_zeros)
            self._of_bucket[padded_rows] = some
        return self._of_bucket[padded_rows]

    def _staged(
        self, items: ByLayer[WorkItems], windows: Windows, tables: np.ndarray, padded_rows: int | None
    ) -> ByLayer[LayerWork]:
        """Stages everything but the offsets: at its own length, or for a bucket at the bucket's."""
        packs = [self._staged_pack(some, padded_rows) for some in items]
        on_device = self._staging.put(tables, fixed=padded_rows is not None)
        found = []
        for window, some, (entries, of_kind, merges) in zip(distinct_windows(windows)[0], items, packs, strict=True):
            launches = self._launches(of_kind, window, recorded=padded_rows is not None)
            merged = merges if padded_rows is not None or some.num_partials else None
            found.append(LayerWork(ItemEntries(*entries, on_device), launches, merged, window or 0))
        return ByLayer(tuple(found), items.index)

    def _launches(self, items: dict[Kind, Tensor], window: int | None, *, recorded: bool) -> tuple[Launch, ...]:
        if recorded:
            kinds: tuple[Kind, ...] = ("decode",) if window or not self._planner.shares else ("shared", "decode")
            return tuple(Launch(kind, items[kind], self._programs[kind]) for kind in kinds)
        return tuple(
            Launch(kind, some, len(some) - 1 if kind == "prefill" else min(len(some) - 1, self._programs[kind]))
            for kind, some in items.items()
            if len(some) > 1
        )

    def _staged_pack(
        self, work: WorkItems, padded_rows: int | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], dict[Kind, Tensor], Tensor]:
        """Stages one window's work. Returns tokens, limits and partials of the entries; items; merges."""
        parts = work.tokens, work.limits, work.partials, work.merges, work.decode, work.shared, work.prefill
        rooms = [_aligned(part.size) for part in parts] if padded_rows is None else self._rooms(padded_rows)
        pack = _pack([part.reshape(-1) for part in parts], rooms)
        fixed = padded_rows is not None
        sections = self._staging.put(pack, fixed=fixed).split(rooms)
        tokens, limits, partials, merges, *items = sections
        kinds: tuple[Kind, ...] = ("decode", "shared", "prefill")
        num_merges = padded_rows if padded_rows is not None else len(work.merges)
        sizes = [work.decode.size, work.shared.size, work.prefill.size]
        rows = [some[: size // 6 * 6].view(-1, 6) for some, size in zip(items, sizes, strict=True)]
        of_kind = dict(zip(kinds, rows, strict=True))
        return (tokens, limits, partials), of_kind, merges[: 3 * num_merges].view(-1, 3)

    def _rooms(self, padded_rows: int) -> list[int]:
        """Returns the int32 elements of each section of a bucket's pack."""
        most = self._planner.max_partials(padded_rows)
        of_entries, of_items = 2 * padded_rows, 6 * (1 + padded_rows + most)
        return list(map(_aligned, (of_entries, of_entries, of_entries, 3 * padded_rows, of_items, of_items, 6)))

    def staged_bytes(self, padded_rows: int, max_len: int, windows: Windows = None) -> int:
        """Returns the most bytes that a step for a graph stages, with rows of up to max_len tokens."""
        slices = self._layout.num_slices
        tables = padded_rows * -(-max_len // self._layout.block_size) * slices
        packs = len(distinct_windows(windows)[0])
        return 8 * padded_rows * slices + 4 * (packs * sum(self._rooms(padded_rows)) + tables) + (2 + packs) * 16

    def _tables(self, queries: PagedQueries) -> tuple[np.ndarray, np.ndarray, PagedQueries]:
        """Returns the rows' blocks, int32, the index at which each row's begin, int64[R], and the queries as
        `WorkPlanner.plan` takes them.

        The tables are copied whole, or if one row is much longer than others only their used entries, row after row.
        """
        num_blocks = -(-queries.seq_lens.astype(np.int64) // self._layout.block_size)
        width = int(num_blocks.max(initial=0))
        by_block = self._by_block(queries, width)
        planned = queries
        if self._layout.groups is not None:
            of_prefixes = by_block[:, :, : self._layout.groups.sizes[0]].reshape(len(num_blocks), -1)
            planned = replace(queries, block_tables=of_prefixes)
        slices = by_block.shape[2]
        tables = by_block.reshape(-1, slices)
        starts = np.arange(len(num_blocks)) * width
        if _MUCH_LONGER * int(num_blocks.sum()) > len(tables):
            return tables.reshape(-1), starts * slices, planned
        shifts = starts + num_blocks - np.cumsum(num_blocks)
        used = tables[np.arange(int(num_blocks.sum())) + np.repeat(shifts, num_blocks)]
        return used.reshape(-1), (starts - shifts) * slices, planned

    def _by_block(self, queries: PagedQueries, width: int) -> np.ndarray:
        """Returns the numbers of the slices of each row's first blocks, int32[R, width, S]."""
        num_rows, slices = len(queries.seq_lens), self._layout.num_slices
        by_slice = queries.block_tables.reshape(num_rows, slices, queries.block_tables.shape[1] // slices)
        return np.ascontiguousarray(by_slice[:, :, :width].transpose(0, 2, 1), dtype=np.int32)

    def offsets(self, queries: PagedQueries) -> np.ndarray:
        """Returns the offsets of the step's tokens, int64[S, T]."""
        rows = np.repeat(np.arange(len(queries.seq_lens)), np.diff(queries.query_starts))
        shifts = queries.seq_lens - queries.query_starts[1:]  # a token's position minus its index in the step
        index, positions = np.divmod(np.arange(len(rows), dtype=np.int64) + shifts[rows], self._layout.block_size)
        width = queries.block_tables.shape[1] // self._layout.num_slices
        of_slices = np.arange(self._layout.num_slices)[:, None] * width
        blocks = queries.block_tables[rows, of_slices + index].astype(np.int64)
        offsets: np.ndarray = blocks * self._pool.stride(0) + positions * self._layout.head_dim
        return offsets

    def _outputs(self, num_tokens: int, num_partials: int, make: Callable[..., Tensor]) -> Outputs:
        """Allocates outputs. A graph needs zeros, since later kernels read its padding, which no kernel writes."""
        shape = self._kernels.num_heads, self._kernels.width
        num_partials = max(num_partials, 1)
        return Outputs(
            out=make((num_tokens, *shape), dtype=self._dtype),
            lse=make((num_tokens, shape[0]), dtype=torch.float32),
            partial_out=make((num_partials, *shape), dtype=torch.float32),
            partial_lse=make((num_partials, shape[0]), dtype=torch.float32),
        )


class TritonAttention(ItemAttention):
    """`Attention` over one pool, [num_blocks, kv_heads, layers, 2, block_size, head_dim], of blocks or of slices."""

    def __init__(
        self,
        pool: Tensor,
        layout: KvLayout,
        num_heads: int,
        scoring: Scoring,
        *,
        staging: Staging,
        cut: WorkCut,
        fp8: Fp8Kv | None = None,
    ) -> None:
        """fp8: for a pool of float8_e4m3fn. Any other pool has the dtype of q and of the output."""
        dtype = pool.dtype if fp8 is None else fp8.dtype
        groups = layout.groups
        slices = (None,) if groups is None else groups.in_order  # None: all layers
        scales = [None if fp8 is None else _some(fp8.scales, layers) for layers in slices]
        kernels = [
            PagedAttentionKernels(
                pool, layout, num_heads, replace(scoring, sinks=_some(scoring.sinks, layers)), dtype, own
            )
            for layers, own in zip(slices, scales, strict=True)
        ]
        of_all = kernels[0] if groups is None else SlicedKernels(groups, kernels)
        super().__init__(pool, layout, of_all, dtype, staging=staging, cut=cut)
        self._num_heads = num_heads
        self._kv = [PagedKv(pool, own) for own in scales]
        self._places = None if groups is None else groups.places

    @property
    def writes_by_kernel(self) -> bool:
        """See `Attention.writes_by_kernel`."""
        return True

    def rotate_and_write(
        self,
        plan: TritonPlan,
        layer: int,
        heads: Tensor,
        cos: Tensor,
        signed_sin: Tensor,
        weight: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attention.rotate_and_write`."""
        number, at = self._place(layer)
        kv, offsets = self._kv[number], plan.offsets[number]
        rotate_and_store(heads, (cos, signed_sin), weight, eps, kv=kv, layer=at, offsets=offsets)
        num_kv = self._layout.num_kv_heads
        q, k, v = heads.split((self._num_heads, num_kv, num_kv), dim=1)
        return q, k, v

    def narrow(self, plan: TritonPlan, tokens: Tensor, layer: int) -> None:
        """Returns None: this backend attends to all tokens of a step."""

    def kernel_inputs(self, plan: TritonPlan) -> None:
        """See `Attention.kernel_inputs`."""

    def write(self, plan: TritonPlan, layer: int, k: Tensor, v: Tensor) -> None:
        """See `Attention.write`."""
        number, at = self._place(layer)
        store_kv(k, v, kv=self._kv[number], layer=at, offsets=plan.offsets[number])

    def attend(self, plan: TritonPlan, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`. Reads K and V from the pool. Results for padding mean nothing."""
        outputs = self.run(plan, layer, q)
        return outputs.out, outputs.lse

    def _place(self, layer: int) -> tuple[int, int]:
        """Returns a layer's slice, and its place in that."""
        return (0, layer) if self._places is None else self._places[layer]


def _some(by_layer: Tensor | None, layers: tuple[int, ...] | None) -> Tensor | None:
    """Returns what these layers have; None: all of them."""
    return by_layer if by_layer is None or layers is None else by_layer[list(layers)].contiguous()


def _aligned(size: int) -> int:
    """Rounds a number of int32 elements up to a multiple of 16 bytes."""
    return -(-size // 4) * 4


def _pack(parts: Sequence[np.ndarray], rooms: Sequence[int]) -> np.ndarray:
    """Returns one array of all parts, each at the start of its room and followed by zeros."""
    pack = np.zeros(sum(rooms), np.int32)
    at = 0
    for part, room in zip(parts, rooms, strict=True):
        assert part.size <= room
        pack[at : at + part.size] = part
        at += room
    return pack
