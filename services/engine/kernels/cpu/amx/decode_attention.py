"""Attention of single tokens over paged KV in bfloat16, by AMX: computes what `decode_attention` does, in less time.

All query heads of a KV head are computed together; they fill only some of a tile's 16 rows or columns:

    scores  [keys, heads]     = K [keys, head_dim] x Q^T [head_dim, heads]    float32, K is read in the pool
    weights [heads, keys]     = exp2_for_bfloat16(scores - highest)^T, bfloat16
    sums    [heads, head_dim] += weights x V [keys, head_dim]                 float32
"""

import math
from typing import Any

from numba import float32, int64

from services.engine.kernels.cpu.amx import tiles as amx
from services.engine.kernels.cpu.decode_attention import PLACES, DecodeAttention
from services.engine.kernels.cpu.decode_softmax import hide, make_soften
from services.engine.kernels.cpu.exponential import LOG2_E
from services.engine.kernels.cpu.intrinsics import (
    float64_of,
    float_pointer,
    half_pointer,
    int_pointer,
    load_bfloat16,
    njit,
    prefetch_far,
    word_pointer,
)
from services.engine.kernels.cpu.per_item import per_item
from services.engine.kernels.cpu.tile_softmax import LOWEST
from services.engine.kernels.cpu.vectors import (
    LANES,
    interleave,
    load_floats,
    round_half_even,
    spread,
    store_floats,
    store_in_order,
    sum_of_lanes,
    transpose_quads,
)

MAX_GROUP = LANES
_load_0, _load_1, _load_4, _load_5, _load_6 = amx.load[0], amx.load[1], *amx.load[4:7]
_store_0, _store_1 = amx.store[:2]
_zero_0 = amx.zero[0]
_add_4_6_to_0, _add_4_5_to_0, _add_4_6_to_1 = (amx.add_product(*tiles) for tiles in ((0, 4, 6), (0, 4, 5), (1, 4, 6)))

# Keys at a time. The small chunk is for long rows with a block's keys on one page, such as head_dim 96 or 128 and
# blocks of 16: attention took 25 ms instead of 29. The large one is for the rest: with head_dim 64 the small chunk took
# 26 ms instead of 22. Found by measurement; the reason is not known.
_CHUNK, _SMALL_CHUNK = 128, 32
# Keys and values are read in the order of their addresses, which the processor's own prefetcher follows within a page.
# The kernel prefetches only the beginning of keys this far ahead, so that the processor's prefetcher starts there;
# prefetching whole keys was slower. Values on pages of their own are prefetched with their keys.
_AHEAD, _BEGINNING = 32, 512  # keys, bytes
_LINE, _TILE_BYTES, _PAGE_BYTES = 64, 1024, 4096
_LN_2 = math.log(2)


class AmxDecodeAttention(DecodeAttention):
    """`DecodeAttention` in bfloat16 by AMX.

    head_dim: a multiple of 32. block_size: a multiple of 16. group: up to MAX_GROUP.
    """

    def __init__(self, dtype: str, head_dim: int, group: int, block_size: int) -> None:
        assert dtype == "bfloat16"
        self.config = amx.tile_config()
        self.scratch_bytes = _Memory(head_dim, _chunk(head_dim, block_size)).bytes
        self.kernel = _make_kernel(head_dim, group, block_size)


class _Memory:
    """The layout of a thread's memory: offsets in bytes."""

    def __init__(self, head_dim: int, chunk: int) -> None:
        self.values = 0
        self.q = self.values + chunk * head_dim * 2
        self.raw = self.q + head_dim // 32 * _TILE_BYTES
        self.scores = self.raw + chunk * _LINE
        self.weights = self.scores + chunk * LANES * 4
        self.sums = self.weights + chunk * LANES * 2
        self.totals = self.sums + head_dim // 16 * _TILE_BYTES
        self.tops = self.totals + LANES * _LINE
        self.nothing = self.tops + _LINE  # a row of zeros
        self.saved = self.nothing + head_dim * 2  # the tile configuration of other code on this thread
        self.bytes = self.saved + _LINE


def _chunk(head_dim: int, block_size: int) -> int:
    return _SMALL_CHUNK if head_dim > 64 and block_size * head_dim * 2 <= _PAGE_BYTES else _CHUNK


@per_item
def _make_kernel(head_dim: int, group: int, block_size: int) -> Any:
    """Makes the kernel for one query token in each of R rows. Its arguments are those of
    `decode_attention._make_kernel`.
    """
    arg = PLACES
    num_columns, chunk = head_dim // 16, _chunk(head_dim, block_size)
    memory = _Memory(head_dim, chunk)
    values_at, q_at, raw_at, scores_at, weights_at = memory.values, memory.q, memory.raw, memory.scores, memory.weights
    sums_at, totals_at, tops_at, nothing_at = memory.sums, memory.totals, memory.tops, memory.nothing
    saved_at, thread_bytes = memory.saved, memory.bytes
    soften = make_soften(num_columns, 2 * _TILE_BYTES, _TILE_BYTES, as_pairs=True)
    read = _make_read(head_dim, block_size)
    multiply_values = _make_multiply_values(num_columns, chunk)
    begin_heads = _make_begin_heads(head_dim, group, memory)
    end_heads = _make_end_heads(head_dim, group, memory)

    @njit(error_model="numpy")
    def work(a: Any, item: int, thread: int) -> None:
        kv_heads, scale = a[arg.kv_heads], float32(float64_of(a[arg.scale]))
        row, head = item // kv_heads, item % kv_heads
        first_key, length = int64(int_pointer(a[arg.first_keys])[row]), int64(int_pointer(a[arg.seq_lens])[row])
        token = int64(int_pointer(a[arg.tokens])[row])
        pool = a[arg.pool] + head * a[arg.head_stride] * 2
        table = int_pointer(a[arg.tables] + row * a[arg.table_width] * 4)

        memory = a[arg.scratch] + thread * thread_bytes
        values, raw, scores, weights = memory + values_at, memory + raw_at, memory + scores_at, memory + weights_at
        sums, totals, tops, saved = memory + sums_at, memory + totals_at, memory + tops_at, memory + saved_at
        begin_heads(a, token, head, a[arg.begun] != 0 and first_key > 0, memory)
        amx.save_config(saved)
        amx.load_config(a[arg.config])
        for first in range(first_key // 16 * 16, length, chunk):
            count = min(chunk, length - first)
            rounded = (count + 31) // 32 * 32
            read(
                pool, a[arg.block_stride], table, first, count, length, memory + q_at, memory + nothing_at, raw, values
            )
            for quad in range(0, group, 4):
                for k in range(0, count, LANES):
                    transpose_quads(raw + k * _LINE + quad * 4, _LINE, scores + (quad * chunk + k) * 4, chunk * 4)
            for g in range(group):
                own = scores + g * chunk * 4
                hide(own, rounded, first_key - first, count)
                soften(
                    own,
                    rounded,
                    scale,
                    float_pointer(tops + g * 4),
                    totals + g * _LINE,
                    sums + g * _LINE,
                    weights + g * chunk * 2,
                )
            multiply_values(weights, values, sums, rounded)
        amx.load_config(saved)
        end_heads(a, token, head, memory)

    return work


def _make_read(head_dim: int, block_size: int) -> Any:
    num_steps, num_columns = head_dim // 32, head_dim // 16
    row_bytes, plane_bytes = head_dim * 2, block_size * head_dim * 2

    @njit
    def key_at(pool: int, block_stride: int, table: Any, k: int) -> int:
        return pool + (int64(table[k // block_size]) * block_stride + k % block_size * head_dim) * 2

    @njit
    def tile_at(values: int, k: int) -> int:
        return values + k // 32 * num_columns * _TILE_BYTES + k % 32 * (_LINE // 2)

    @njit
    def pair_values(first: int, count: int, nothing: int, values: int) -> None:
        """Interleaves the values of 16 keys. Those from `count` on become zeros, copied from the row at `nothing`."""
        for k in range(0, 16, 2):
            even = first + k * row_bytes if k < count else nothing
            odd = first + (k + 1) * row_bytes if k + 1 < count else nothing
            for step in range(num_steps):
                at = values + k * (_LINE // 2) + step * 2 * _TILE_BYTES
                interleave(even + step * _LINE, odd + step * _LINE, at, at + _TILE_BYTES)

    @njit
    def read(
        pool: int,
        block_stride: int,
        table: Any,
        first: int,
        count: int,
        length: int,
        q: int,
        nothing: int,
        scores: int,
        values: int,
    ) -> None:
        """Multiplies some keys by q, and writes their values as tiles of [16 pairs of keys, 16 columns]."""
        for k in range(0, count, 16):
            keys = key_at(pool, block_stride, table, first + k)
            later = key_at(pool, block_stride, table, min(first + k + _AHEAD, length - 1) // 16 * 16)
            for line in range(0, _BEGINNING, _LINE):
                prefetch_far(later + line)
                if plane_bytes >= _PAGE_BYTES:
                    prefetch_far(keys + plane_bytes + line)
            _zero_0()
            for step in range(num_steps):
                _load_4(keys + step * _LINE, row_bytes)
                _load_6(q + step * _TILE_BYTES, _LINE)
                _add_4_6_to_0()
            _store_0(scores + k * _LINE, _LINE)
            pair_values(keys + plane_bytes, count - k, nothing, tile_at(values, k))
        end = (count + 15) // 16 * 16
        if end % 32 != 0:
            pair_values(nothing, 0, nothing, tile_at(values, end))

    return read


def _make_multiply_values(num_columns: int, chunk: int) -> Any:
    @njit
    def multiply_values(weights: int, values: int, sums: int, count: int) -> None:
        for column in range(0, num_columns, 2):
            at = sums + column * _TILE_BYTES
            _load_0(at, _LINE)
            _load_1(at + _TILE_BYTES, _LINE)
            for k in range(0, count, 32):
                tile = values + (k // 32 * num_columns + column) * _TILE_BYTES
                _load_4(weights + k * 2, chunk * 2)
                _load_5(tile, _LINE)
                _load_6(tile + _TILE_BYTES, _LINE)
                _add_4_5_to_0()
                _add_4_6_to_1()
            _store_0(at, _LINE)
            _store_1(at + _TILE_BYTES, _LINE)

    return multiply_values


def _make_begin_heads(head_dim: int, group: int, memory: _Memory) -> Any:
    arg, row_bytes, num_steps, num_columns = PLACES, head_dim * 2, head_dim // 32, head_dim // 16
    q_at, sums_at, totals_at, tops_at, nothing_at = memory.q, memory.sums, memory.totals, memory.tops, memory.nothing

    @njit
    def begin_heads(a: Any, token: int, head: int, begun: bool, memory: int) -> None:
        """Writes queries, sums, totals and highest scores.

        The last three are zeros, or continue the attention over the keys before the first.
        """
        q, sums, totals = memory + q_at, memory + sums_at, memory + totals_at
        tops = float_pointer(memory + tops_at)
        first_head = (token * a[arg.kv_heads] + head) * group
        for step in range(num_steps):
            store_floats(memory + nothing_at + step * _LINE, spread(float32(0)))
        for g in range(group):
            words = word_pointer(a[arg.q] + (token * a[arg.q_stride] + (head * group + g) * head_dim) * 2)
            for w in range(head_dim // 2):
                word_pointer(q)[w * LANES + g] = words[w]
            store_floats(totals + g * _LINE, spread(float32(0)))
            tops[g] = LOWEST
            for column in range(num_columns):
                store_floats(sums + column * _TILE_BYTES + g * _LINE, spread(float32(0)))
            if begun:
                float_pointer(totals + g * _LINE)[0] = float32(1)
                tops[g] = float_pointer(a[arg.lse])[first_head + g] * float32(LOG2_E)
                before = half_pointer(a[arg.out] + (first_head + g) * row_bytes)
                for d in range(head_dim):
                    tile = sums + (d // 32 * 2 + d % 8 // 4) * _TILE_BYTES + g * _LINE
                    float_pointer(tile)[d % 32 // 8 * 4 + d % 4] = load_bfloat16(before, d)

    return begin_heads


def _make_end_heads(head_dim: int, group: int, memory: _Memory) -> Any:
    arg, row_bytes, num_steps = PLACES, head_dim * 2, head_dim // 32
    sums_at, totals_at, tops_at = memory.sums, memory.totals, memory.tops

    @njit(error_model="numpy")
    def end_heads(a: Any, token: int, head: int, memory: int) -> None:
        """Writes the results and their log-sum-exps."""
        first_head = (token * a[arg.kv_heads] + head) * group
        for g in range(group):
            total = sum_of_lanes(load_floats(memory + totals_at + g * _LINE))
            factor = spread(float32(1) / total)
            for step in range(num_steps):
                at = memory + sums_at + 2 * step * _TILE_BYTES + g * _LINE
                low, high = load_floats(at) * factor, load_floats(at + _TILE_BYTES) * factor
                target = a[arg.out] + (first_head + g) * row_bytes + step * _LINE
                store_in_order(target, round_half_even(low), round_half_even(high))
            top = float_pointer(memory + tops_at)[g]
            float_pointer(a[arg.lse])[first_head + g] = (top + math.log2(total)) * float32(_LN_2)

    return end_heads
