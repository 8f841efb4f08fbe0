"""Attention of many query tokens over paged KV in bfloat16, by AMX: for prompts, and for prefixes that rows share.

An item is a tile of query tokens and a KV head, all of whose query heads are rows of it. Everything is transposed, so
that a query has a lane of its vectors to itself, and its softmax needs nothing of other lanes:

    scores  [keys, 32]     = K [keys, head_dim] x Q^T [head_dim, 32]      float32, of 32 rows
    weights [keys, 32]     = exp2(scores - reference), bfloat16
    sums    [head_dim, 32] += V^T [head_dim, keys] x weights [keys, 32]   float32

with the online softmax of FlashAttention (Dao et al. 2022, arXiv 2205.14135). The reference of a row is its highest
score, or one that was it: a new one is taken where the highest is so far above that the weights grow too large.

K and V^T of a segment of keys are copied once, to where AMX loads them well, for all rows of the tile.
"""

import math
from typing import Any

from numba import float32, int64, njit, uint16

from services.engine.kernels import amx
from services.engine.kernels.intrinsics import (
    LOG2_E,
    float64_of,
    float_pointer,
    half_pointer,
    int_pointer,
)
from services.engine.kernels.per_item import NUM_ITEMS, per_item, places
from services.engine.kernels.vectors import (
    LANES,
    above_whole,
    any_above,
    divide,
    larger_of,
    load_first,
    load_floats,
    load_second,
    multiply_add,
    round_half_even,
    round_half_up,
    spread,
    store_floats,
    store_pairs,
    times_power,
    transpose,
    transpose_pairs,
    where_above,
)

load_0, load_1, load_2, load_3, _, _, load_6, load_7 = amx.load
stream_4, stream_5 = amx.stream[4:6]  # keys and values: scores and sums stay in the first cache
store_0, store_1, store_2, store_3 = amx.store[:4]
zero_0, zero_1, zero_2, zero_3 = amx.zero[:4]
add_4_6_to_0, add_4_7_to_1 = amx.add_product(0, 4, 6), amx.add_product(1, 4, 7)
add_5_6_to_2, add_5_7_to_3 = amx.add_product(2, 5, 6), amx.add_product(3, 5, 7)

_CHUNK = 128  # keys whose scores are kept at a time
_PAIR = 32  # rows at a time: two tiles
_LINE = 64  # bytes: 16 float32 or 32 bfloat16, a row of an AMX tile
_TILE_BYTES = 1024
_LOWEST = float32(-1e30)
_GROWTH = float32(8)  # of weights, as a power of two, before a new reference is taken
_LN_2 = math.log(2)
# 2**f for f in [0, 1), rising powers, to 1e-4: a twentieth of what bfloat16 can tell apart.
_EXP2 = tuple(map(float32, (0.99992522, 0.69583354, 0.22606716, 0.07802452)))


@njit
def exp2(x: Any) -> Any:
    """2**x of a vector, to 1e-4 of it; 0 where that is too small."""
    f = above_whole(x)
    y = multiply_add(spread(_EXP2[3]), f, spread(_EXP2[2]))
    y = multiply_add(y, f, spread(_EXP2[1]))
    y = multiply_add(y, f, spread(_EXP2[0]))
    return times_power(y, x)


def max_rows(head_dim: int) -> int:
    """Query tokens of a tile times their heads: with a segment of as many keys, half of a large L2 cache."""
    return max(256, 65536 // _padded(head_dim))


def scratch_bytes(head_dim: int) -> int:
    """That a thread needs."""
    rows, depth = max_rows(head_dim), _padded(head_dim)
    per_depth = rows * 10 + 2 * _PAIR * 2  # sums, q, keys, values; two times 32 staged
    return per_depth * depth + _PAIR * _CHUNK * 4 + rows // LANES * (3 * _LINE + 8) + _LINE


def _padded(head_dim: int) -> int:
    return -(-head_dim // 32) * 32


def make_tile_attention(head_dim: int, group: int, block_size: int) -> Any:
    """Arguments: kv_heads; q and the elements from token to token there; out [T, heads, head_dim] and lse, float32[T,
    heads]; int32 index in both of the tiles' tokens, and how many keys each sees, one tile after the other; int32[N +
    1] where a tile begins there; int32[N] the row of its block table, and its first key, a multiple of block_size;
    block tables int32[R, ..] and their width; pool at the layer, elements from block to block and from head to head;
    1 when out and lse already hold the attention over the keys before the first, else 0; scale; a tile configuration;
    scratch_bytes for each thread, on a 64-byte border.
    """
    arg = places(
        "kv_heads q q_stride out lse tokens limits starts rows first_keys tables table_width pool block_stride"
        " head_stride begun scale config scratch"
    )
    depth = _padded(head_dim)
    num_steps, num_columns = depth // 32, depth // 16
    row_bytes = depth * 2  # of a key, value or query
    plane = block_size * head_dim
    segment = max_rows(head_dim)
    thread_bytes = scratch_bytes(head_dim)

    @njit
    def copy(source: int, target: int) -> None:
        """One key, value, or query of a head; the rest of its padded row stays as it is."""
        for line in range(head_dim // 32):
            store_floats(target + line * _LINE, load_floats(source + line * _LINE))
        of, to = half_pointer(source), half_pointer(target)
        for d in range(head_dim // 32 * 32, head_dim):
            to[d] = of[d]

    @njit
    def clear(target: int, num_bytes: int) -> None:
        for line in range(0, num_bytes, _LINE):
            store_floats(target + line, spread(float32(0)))

    @njit
    def copy_rows(pool: int, block_stride: int, table: Any, first: int, count: int, target: int) -> None:
        """Keys or values from their blocks, padded with zeros."""
        for k in range(first, first + count):
            at = int64(table[k // block_size]) * block_stride + k % block_size * head_dim
            row = target + (k - first) * row_bytes
            copy(pool + at * 2, row)
            for d in range(head_dim, depth):
                half_pointer(row)[d] = uint16(0)

    @njit
    def pack_values(pool: int, block_stride: int, table: Any, first: int, count: int, staged: int, values: int) -> None:
        """V^T as tiles of [16 columns, 32 keys]."""
        for k in range(0, count, 32):
            some = min(32, count - k)
            copy_rows(pool, block_stride, table, first + k, some, staged)
            clear(staged + some * row_bytes, (32 - some) * row_bytes)
            for column in range(num_columns):
                transpose_pairs(staged + column * 32, row_bytes, values, _LINE)
                values += _TILE_BYTES

    @njit
    def multiply_keys(keys: int, q: int, scores: int, count: int) -> None:
        """Of two tiles of rows."""
        for k in range(0, count, 32):
            at = scores + k * 2 * _LINE
            zero_0()
            zero_1()
            zero_2()
            zero_3()
            for step in range(num_steps):
                stream_4(keys + k * row_bytes + step * _LINE, row_bytes)
                stream_5(keys + (k + 16) * row_bytes + step * _LINE, row_bytes)
                load_6(q + step * _TILE_BYTES, _LINE)
                load_7(q + (num_steps + step) * _TILE_BYTES, _LINE)
                add_4_6_to_0()
                add_4_7_to_1()
                add_5_6_to_2()
                add_5_7_to_3()
            store_0(at, 2 * _LINE)
            store_1(at + _LINE, 2 * _LINE)
            store_2(at + 32 * _LINE, 2 * _LINE)
            store_3(at + 33 * _LINE, 2 * _LINE)

    @njit
    def multiply_values(values: int, weights: int, sums: int, count: int) -> None:
        """Of two tiles of rows."""
        for column in range(0, num_columns, 2):
            at = sums + column * 16 * 2 * _LINE
            load_0(at, 2 * _LINE)
            load_1(at + _LINE, 2 * _LINE)
            load_2(at + 32 * _LINE, 2 * _LINE)
            load_3(at + 33 * _LINE, 2 * _LINE)
            for k in range(0, count, 32):
                tile = values + (k // 32 * num_columns + column) * _TILE_BYTES
                stream_4(tile, _LINE)
                stream_5(tile + _TILE_BYTES, _LINE)
                load_6(weights + k * 2 * _LINE, 4 * _LINE)
                load_7(weights + k * 2 * _LINE + _LINE, 4 * _LINE)
                add_4_6_to_0()
                add_4_7_to_1()
                add_5_6_to_2()
                add_5_7_to_3()
            store_0(at, 2 * _LINE)
            store_1(at + _LINE, 2 * _LINE)
            store_2(at + 32 * _LINE, 2 * _LINE)
            store_3(at + 33 * _LINE, 2 * _LINE)

    @njit
    def highest_of(scores: int, count: int) -> Any:
        a = b = c = d = spread(_LOWEST)
        for k in range(0, count, 4):
            at = scores + k * 2 * _LINE
            a = larger_of(load_floats(at), a)
            b = larger_of(load_floats(at + 2 * _LINE), b)
            c = larger_of(load_floats(at + 4 * _LINE), c)
            d = larger_of(load_floats(at + 6 * _LINE), d)
        return larger_of(larger_of(a, b), larger_of(c, d))

    @njit
    def weigh(scores: int, count: int, scale: Any, reference: Any) -> Any:
        """Scores to weights, which take the place of every second row. Returns their sum."""
        down = spread(float32(0)) - reference
        even_sum = odd_sum = spread(float32(0))
        for k in range(0, count, 2):
            at = scores + k * 2 * _LINE
            even = exp2(multiply_add(load_floats(at), scale, down))
            odd = exp2(multiply_add(load_floats(at + 2 * _LINE), scale, down))
            store_pairs(at, round_half_up(even), round_half_up(odd))
            even_sum, odd_sum = even_sum + even, odd_sum + odd
        return even_sum + odd_sum

    @njit
    def soften(scores: int, count: int, begin: int, lowest: int, limits: Any, scale: Any, top: int, sums: int) -> None:
        """The softmax of a tile of rows over the keys from `begin`, of which each row sees those below its limit."""
        for k in range(max(0, lowest - begin), count):
            at = scores + k * 2 * _LINE
            seen = where_above(limits, spread(float32(begin + k)), load_floats(at), spread(_LOWEST))
            store_floats(at, seen)
        reference, total = load_floats(top), load_floats(top + _LINE)
        highest = highest_of(scores, count) * scale
        if any_above(highest, reference + spread(_GROWTH)):
            higher = larger_of(highest, reference)
            shrink = exp2(reference - higher)
            for d in range(depth):
                at = sums + d * 2 * _LINE
                store_floats(at, load_floats(at) * shrink)
            total = total * shrink
            reference = higher
            store_floats(top, reference)
        store_floats(top + _LINE, total + weigh(scores, count, scale, reference))

    @njit
    def gather(a: Any, first_row: int, last_row: int, head: int, base: int, token_stride: int, staged: int) -> None:
        """16 rows of q or out, padded with zeros."""
        clear(staged, 16 * row_bytes)
        tokens = int_pointer(a[arg.tokens])
        for row in range(first_row, min(first_row + LANES, last_row)):
            source = int64(tokens[row // group]) * token_stride + (head * group + row % group) * head_dim
            copy(base + source * 2, staged + (row - first_row) * row_bytes)

    @njit
    def widen(pairs: int, sums: int) -> None:
        """Pairs of columns of a tile of rows, as bfloat16, to sums."""
        for pair in range(depth // 2):
            at = sums + pair * 4 * _LINE
            store_floats(at, load_first(pairs + pair * _LINE))
            store_floats(at + 2 * _LINE, load_second(pairs + pair * _LINE))

    @njit
    def narrow(sums: int, factor: Any, pairs: int) -> None:
        """The reverse, times a factor."""
        for pair in range(depth // 2):
            at = sums + pair * 4 * _LINE
            even, odd = load_floats(at) * factor, load_floats(at + 2 * _LINE) * factor
            store_pairs(pairs + pair * _LINE, round_half_even(even), round_half_even(odd))

    @njit(error_model="numpy")
    def work(a: Any, item: int, thread: int) -> None:
        kv_heads, begun, scale = a[arg.kv_heads], a[arg.begun] != 0, spread(float32(float64_of(a[arg.scale])))
        num_tiles = a[NUM_ITEMS] // kv_heads
        tile, head = num_tiles - 1 - item // kv_heads, item % kv_heads  # a row's last tokens see most: these first
        starts = int_pointer(a[arg.starts])
        first_row, last_row = int64(starts[tile]) * group, int64(starts[tile + 1]) * group
        num_pairs = (last_row - first_row + _PAIR - 1) // _PAIR
        tokens, limits = int_pointer(a[arg.tokens]), int_pointer(a[arg.limits])
        table = int_pointer(a[arg.tables] + int64(int_pointer(a[arg.rows])[tile]) * a[arg.table_width] * 4)
        begin, end = int64(int_pointer(a[arg.first_keys])[tile]), int64(0)
        keys_at = a[arg.pool] + head * a[arg.head_stride] * 2
        values_at = keys_at + plane * 2
        begun = begun and begin > 0

        sums = a[arg.scratch] + thread * thread_bytes
        q = sums + segment * depth * 4
        keys = q + segment * row_bytes
        values = keys + segment * row_bytes
        staged = values + segment * row_bytes
        scores = staged + 2 * 32 * row_bytes
        tops = scores + _CHUNK * _PAIR * 4  # of each tile of rows: references, totals, limits
        spans = int_pointer(tops + segment // LANES * 3 * _LINE)  # of these: lowest and highest limit
        saved = tops + segment // LANES * (3 * _LINE + 8)

        for i in range(num_pairs * 2):
            row = first_row + i * LANES
            top = tops + i * 3 * _LINE
            of_sums = sums + i // 2 * depth * 2 * _LINE + i % 2 * _LINE
            gather(a, row, last_row, head, a[arg.q], a[arg.q_stride], staged)
            for step in range(num_steps):
                transpose(staged + step * _LINE, row_bytes, q + (i * num_steps + step) * _TILE_BYTES, _LINE)
            lowest, highest = int64(1 << 30), int64(0)
            for lane in range(LANES):
                own = min(row + lane, last_row - 1)
                limit = int64(limits[own // group])
                lowest, highest = min(lowest, limit), max(highest, limit)
                float_pointer(top + 2 * _LINE)[lane] = float32(limit)
                if begun:
                    query = int64(tokens[own // group]) * kv_heads * group + head * group + own % group
                    float_pointer(top)[lane] = float_pointer(a[arg.lse])[query] * float32(LOG2_E)
            spans[2 * i], spans[2 * i + 1] = lowest, highest if row < last_row else int64(0)
            end = max(end, highest)
            if begun:
                gather(a, row, last_row, head, a[arg.out], kv_heads * group * head_dim, staged)
                pairs = staged + 16 * row_bytes
                for step in range(num_steps):
                    transpose(staged + step * _LINE, row_bytes, pairs + step * _TILE_BYTES, _LINE)
                widen(pairs, of_sums)
                store_floats(top + _LINE, spread(float32(1)))
            else:
                store_floats(top, spread(_LOWEST))
                store_floats(top + _LINE, spread(float32(0)))
                for d in range(depth):
                    store_floats(of_sums + d * 2 * _LINE, spread(float32(0)))

        amx.save_config(saved)
        amx.load_config(a[arg.config])
        for first in range(begin, end, segment):
            count = min(segment, end - first)
            copy_rows(keys_at, a[arg.block_stride], table, first, count, keys)
            pack_values(values_at, a[arg.block_stride], table, first, count, staged, values)
            for pair in range(num_pairs):
                most = min(count, int64(max(spans[4 * pair + 1], spans[4 * pair + 3])) - first)
                of_sums = sums + pair * depth * 2 * _LINE
                for k in range(0, most, _CHUNK):
                    some = min(_CHUNK, most - k)
                    rounded = (some + 31) // 32 * 32
                    multiply_keys(keys + k * row_bytes, q + pair * 2 * num_steps * _TILE_BYTES, scores, rounded)
                    for half in range(2):
                        i = 2 * pair + half
                        if spans[2 * i + 1] == 0:
                            continue
                        top = tops + i * 3 * _LINE
                        soften(
                            scores + half * _LINE,
                            rounded,
                            first + k,
                            int64(spans[2 * i]),
                            load_floats(top + 2 * _LINE),
                            scale,
                            top,
                            of_sums + half * _LINE,
                        )
                    multiply_values(values + k * row_bytes, scores, of_sums, rounded)
        amx.load_config(saved)

        for i in range((last_row - first_row + LANES - 1) // LANES):
            row = first_row + i * LANES
            top = tops + i * 3 * _LINE
            of_sums = sums + i // 2 * depth * 2 * _LINE + i % 2 * _LINE
            total = float_pointer(top + _LINE)
            narrow(of_sums, divide(spread(float32(1)), load_floats(top + _LINE)), staged)
            rows = staged + 16 * row_bytes
            for step in range(num_steps):
                transpose(staged + step * _TILE_BYTES, _LINE, rows + step * _LINE, row_bytes)
            for lane in range(min(LANES, last_row - row)):
                own = row + lane
                query = int64(tokens[own // group]) * kv_heads * group + head * group + own % group
                copy(rows + lane * row_bytes, a[arg.out] + query * head_dim * 2)
                float_pointer(a[arg.lse])[query] = (float_pointer(top)[lane] + math.log2(total[lane])) * float32(_LN_2)

    return per_item(work)
