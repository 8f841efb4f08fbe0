"""Attention of single tokens over paged KV in bfloat16, by AMX: what `decode_attention` does, in less time.

All query heads of a KV head are taken together; of a tile's 16 rows or columns for them, most stay unused:

    scores  [keys, heads]     = K [keys, head_dim] x Q^T [head_dim, heads]    float32, K where it lies
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

# Keys at a time. A few where rows are long and a block's keys on one page, as with head_dim 96 or 128 and blocks of
# 16: 25 instead of 29 ms of attention. Elsewhere more: with head_dim 64 a few take 26 instead of 22. Found by
# measurement; why is not known.
_CHUNK, _SMALL_CHUNK = 128, 32
# Keys and values are read in the order in which they lie, which the processor's own prefetcher follows within a page.
# Of keys this far ahead the beginning is asked for, so that it has begun there; asking for all was slower. Values that
# are on pages of their own are asked for with their keys.
_AHEAD, _BEGINNING = 32, 512  # keys, bytes
_LINE, _TILE_BYTES, _PAGE_BYTES = 64, 1024, 4096
_LN_2 = math.log(2)


class AmxDecodeAttention(DecodeAttention):
    """See `DecodeAttention`. bfloat16; head_dim: a multiple of 32; block_size: of 16; group: up to MAX_GROUP."""

    def __init__(self, dtype: str, head_dim: int, group: int, block_size: int) -> None:
        assert dtype == "bfloat16"
        self.config = amx.tile_config()
        self.scratch_bytes = _scratch_bytes(head_dim)
        self.kernel = _make_kernel(head_dim, group, block_size)


def _scratch_bytes(head_dim: int) -> int:
    return _CHUNK * (head_dim * 2 + LANES * 10) + head_dim * (32 + 64 + 2) + 18 * _LINE


@per_item
def _make_kernel(head_dim: int, group: int, block_size: int) -> Any:
    """Arguments: those of the other kernel."""
    arg = PLACES
    num_steps, num_columns = head_dim // 32, head_dim // 16
    row_bytes, plane_bytes = head_dim * 2, block_size * head_dim * 2
    thread_bytes = _scratch_bytes(head_dim)
    soften = make_soften(num_columns, 2 * _TILE_BYTES, _TILE_BYTES, as_pairs=True)
    chunk = _SMALL_CHUNK if head_dim > 64 and plane_bytes <= _PAGE_BYTES else _CHUNK

    @njit
    def key_at(pool: int, block_stride: int, table: Any, k: int) -> int:
        return pool + (int64(table[k // block_size]) * block_stride + k % block_size * head_dim) * 2

    @njit
    def tile_at(values: int, k: int) -> int:
        return values + k // 32 * num_columns * _TILE_BYTES + k % 32 * (_LINE // 2)

    @njit
    def pair_values(first: int, count: int, nothing: int, values: int) -> None:
        """Of 16 keys, those from `count` on as zeros: a row of them is at `nothing`."""
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
        """Of some keys, the products with q, and the values as tiles of [16 pairs of keys, 16 columns]."""
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

    @njit(error_model="numpy")
    def work(a: Any, item: int, thread: int) -> None:
        kv_heads, scale = a[arg.kv_heads], float32(float64_of(a[arg.scale]))
        row, head = item // kv_heads, item % kv_heads
        first_key, length = int64(int_pointer(a[arg.first_keys])[row]), int64(int_pointer(a[arg.seq_lens])[row])
        token = int64(int_pointer(a[arg.tokens])[row])
        first_head = token * kv_heads * group + head * group
        pool = a[arg.pool] + head * a[arg.head_stride] * 2
        table = int_pointer(a[arg.tables] + row * a[arg.table_width] * 4)

        values = a[arg.scratch] + thread * thread_bytes
        q = values + chunk * row_bytes
        raw = q + num_steps * _TILE_BYTES
        scores = raw + chunk * _LINE
        weights = scores + chunk * LANES * 4
        sums = weights + chunk * LANES * 2
        totals = sums + num_columns * _TILE_BYTES
        tops = totals + LANES * _LINE
        nothing = tops + _LINE
        saved = nothing + row_bytes

        begun = a[arg.begun] != 0 and first_key > 0
        for step in range(num_steps):
            store_floats(nothing + step * _LINE, spread(float32(0)))
        for g in range(group):
            words = word_pointer(a[arg.q] + (token * a[arg.q_stride] + (head * group + g) * head_dim) * 2)
            for w in range(head_dim // 2):
                word_pointer(q)[w * LANES + g] = words[w]
            store_floats(totals + g * _LINE, spread(float32(0)))
            float_pointer(tops)[g] = LOWEST
            for column in range(num_columns):
                store_floats(sums + column * _TILE_BYTES + g * _LINE, spread(float32(0)))
            if begun:
                float_pointer(totals + g * _LINE)[0] = float32(1)
                float_pointer(tops)[g] = float_pointer(a[arg.lse])[first_head + g] * float32(LOG2_E)
                before = half_pointer(a[arg.out] + (first_head + g) * row_bytes)
                for d in range(head_dim):
                    tile = sums + (d // 32 * 2 + d % 8 // 4) * _TILE_BYTES + g * _LINE
                    float_pointer(tile)[d % 32 // 8 * 4 + d % 4] = load_bfloat16(before, d)

        amx.save_config(saved)
        amx.load_config(a[arg.config])
        for first in range(first_key // 16 * 16, length, chunk):
            count = min(chunk, length - first)
            rounded = (count + 31) // 32 * 32
            read(pool, a[arg.block_stride], table, first, count, length, q, nothing, raw, values)
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

        for g in range(group):
            total = sum_of_lanes(load_floats(totals + g * _LINE))
            factor = spread(float32(1) / total)
            for step in range(num_steps):
                at = sums + 2 * step * _TILE_BYTES + g * _LINE
                low, high = load_floats(at) * factor, load_floats(at + _TILE_BYTES) * factor
                target = a[arg.out] + (first_head + g) * row_bytes + step * _LINE
                store_in_order(target, round_half_even(low), round_half_even(high))
            float_pointer(a[arg.lse])[first_head + g] = (float_pointer(tops)[g] + math.log2(total)) * float32(_LN_2)

    return work
