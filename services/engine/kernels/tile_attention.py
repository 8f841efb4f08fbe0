"""Attention of many query tokens over paged KV in bfloat16, by AMX: for prompts, and for prefixes that rows share.

An item is a tile of query tokens and a KV head. The keys and values of a chunk are put in the order that AMX wants
once, and then all query heads of all tokens of the tile attend to them, 32 rows at a time:

    scores  [32, chunk]     = Q [32, head_dim] x K^T [head_dim, chunk]     float32
    weights [32, chunk]     = exp2(scores - highest), bfloat16
    sums    [32, head_dim] += weights x V [chunk, head_dim]                float32

with the online softmax of FlashAttention (Dao et al. 2022, arXiv 2205.14135).
"""

import math
from typing import Any

from numba import float32, int64, njit, uint16, uint32

from services.engine.kernels import amx
from services.engine.kernels.intrinsics import (
    LOG2_E,
    coarse_exp2,
    exp2,
    float64_of,
    float_bits,
    float_pointer,
    half_pointer,
    int_pointer,
    larger,
    load_bfloat16,
    store_bfloat16,
    word_pointer,
)
from services.engine.kernels.per_item import per_item

load_0, load_1, load_2, load_3, load_4, load_5, load_6, load_7 = amx.load
store_0, store_1, store_2, store_3 = amx.store[:4]
zero_0, zero_1 = amx.zero[:2]
add_2_6_to_0, add_3_6_to_1 = amx.add_product(0, 2, 6), amx.add_product(1, 3, 6)
add_4_7_to_0, add_5_7_to_1 = amx.add_product(0, 4, 7), amx.add_product(1, 5, 7)
add_4_6_to_0, add_4_7_to_1 = amx.add_product(0, 4, 6), amx.add_product(1, 4, 7)
add_5_6_to_2, add_5_7_to_3 = amx.add_product(2, 5, 6), amx.add_product(3, 5, 7)

MAX_ROWS = 256  # query tokens of a tile times their heads
_CHUNK = 128  # keys
_LANES = 16  # float32 in a register
_PAIR = 32  # rows at a time: two tiles
_TILE_WORDS, _TILE_BYTES = 256, 1024  # 16 rows of 16 words of 32 bits
_LOWEST = float32(-1e30)
_LN_2 = math.log(2)


@njit
def scratch_bytes(depth: int) -> int:
    """That a thread needs, with rows of `depth` elements."""
    per_depth = MAX_ROWS * 6 + _CHUNK * 4  # sums and q, keys and values
    return per_depth * depth + _PAIR * _CHUNK * 6 + MAX_ROWS * (4 + 4 * _LANES) + 64


def make_tile_attention(head_dim: int, group: int, block_size: int) -> Any:
    """Arguments: kv_heads; q and the elements from token to token there; out [T, heads, head_dim] and lse, float32[T,
    heads]; int32 index in both of the tiles' tokens, and how many keys each sees, one tile after the other; int32[N +
    1] where a tile begins there; int32[N] the row of its block table, and its first key, a multiple of block_size;
    block tables int32[R, ..] and their width; pool at the layer, elements from block to block and from head to head;
    1 when out and lse already hold the attention over the keys before the first, else 0; scale; a tile configuration;
    scratch_bytes for each thread, on a 64-byte border.
    """
    depth = -(-head_dim // 32) * 32  # padded with zeros
    num_steps, num_columns = depth // 32, depth // 16
    plane = block_size * head_dim
    words = head_dim // 2

    @njit
    def pack_keys(pool: int, block_stride: int, table: Any, first: int, count: int, keys: Any) -> None:
        """[chunk, head_dim] to tiles of [16 words of a key, 16 keys]."""
        for k in range(count):
            at = int64(table[(first + k) // block_size]) * block_stride + (first + k) % block_size * head_dim
            source = word_pointer(pool + at * 2)
            target = k // 16 * num_steps * _TILE_WORDS + k % 16
            for w in range(words):
                keys[target + w // 16 * _TILE_WORDS + w % 16 * 16] = source[w]

    @njit
    def pack_values(pool: int, block_stride: int, table: Any, first: int, count: int, values: Any) -> None:
        """[chunk, head_dim] to tiles of [16 pairs of keys, 16 columns]."""
        for pair in range((count + 1) // 2):
            k = first + 2 * pair
            at = int64(table[k // block_size]) * block_stride + plane + k % block_size * head_dim
            even = half_pointer(pool + at * 2)
            odd = even
            if 2 * pair + 1 < count:
                at = int64(table[(k + 1) // block_size]) * block_stride + plane + (k + 1) % block_size * head_dim
                odd = half_pointer(pool + at * 2)
            target = pair // 16 * num_columns * _TILE_WORDS + pair % 16 * 16
            for column in range(num_columns):
                for d in range(column * 16, min(column * 16 + 16, head_dim)):
                    word = uint32(even[d]) | (uint32(odd[d]) << uint32(16))
                    values[target + column * (_TILE_WORDS - 16) + d] = word

    @njit
    def multiply_keys(q: int, keys: int, scores: int, count: int) -> None:
        below = 16 * depth * 2  # from the upper 16 rows to the lower ones
        if num_steps == 2:  # Q stays in tiles
            load_2(q, depth * 2)
            load_3(q + below, depth * 2)
            load_4(q + 64, depth * 2)
            load_5(q + below + 64, depth * 2)
        for column in range((count + 15) // 16):
            zero_0()
            zero_1()
            at = keys + column * num_steps * _TILE_BYTES
            if num_steps == 2:
                load_6(at, 64)
                load_7(at + _TILE_BYTES, 64)
                add_2_6_to_0()
                add_3_6_to_1()
                add_4_7_to_0()
                add_5_7_to_1()
            else:
                for step in range(num_steps):
                    load_6(at + step * _TILE_BYTES, 64)
                    load_2(q + step * 64, depth * 2)
                    load_3(q + below + step * 64, depth * 2)
                    add_2_6_to_0()
                    add_3_6_to_1()
            store_0(scores + column * 64, _CHUNK * 4)
            store_1(scores + 16 * _CHUNK * 4 + column * 64, _CHUNK * 4)

    @njit
    def multiply_values(weights: int, values: int, sums: int, count: int) -> None:
        below = 16 * depth * 4
        for column in range(0, num_columns, 2):
            at = sums + column * 64
            load_0(at, depth * 4)
            load_1(at + 64, depth * 4)
            load_2(at + below, depth * 4)
            load_3(at + below + 64, depth * 4)
            for step in range((count + 31) // 32):
                load_4(weights + step * 64, _CHUNK * 2)
                load_5(weights + 16 * _CHUNK * 2 + step * 64, _CHUNK * 2)
                load_6(values + (step * num_columns + column) * _TILE_BYTES, 64)
                load_7(values + (step * num_columns + column + 1) * _TILE_BYTES, 64)
                add_4_6_to_0()
                add_4_7_to_1()
                add_5_6_to_2()
                add_5_7_to_3()
            store_0(at, depth * 4)
            store_1(at + 64, depth * 4)
            store_2(at + below, depth * 4)
            store_3(at + below + 64, depth * 4)

    @njit(fastmath=True, error_model="numpy")
    def highest_of(scores: Any, count: int) -> float:
        highest = _LOWEST
        for k in range(count):
            highest = larger(highest, scores[k])
        return highest

    @njit(fastmath=True, error_model="numpy")
    def weigh(scores: Any, count: int, scale: float, highest: float, weights: Any, lanes: Any) -> None:
        for k in range(0, count, _LANES):
            for lane in range(_LANES):
                weight = coarse_exp2(scores[k + lane] * scale - highest)
                weights[k + lane] = uint16((float_bits(weight) + uint32(0x8000)) >> uint32(16))
                lanes[lane] += weight

    @njit
    def clear(weights: Any, count: int) -> None:
        for k in range(count):
            weights[k] = uint16(0)

    @njit
    def shrink_by(sums: Any, factor: float) -> None:
        for d in range(depth):
            sums[d] *= factor

    @njit(error_model="numpy")
    def work(a: Any, item: int, thread: int) -> None:
        kv_heads, begun, scale = a[5], a[20] != 0, float32(float64_of(a[21]))
        tile, head = item // kv_heads, item % kv_heads
        first_token, last_token = int64(int_pointer(a[12])[tile]), int64(int_pointer(a[12])[tile + 1])
        tokens, limits = int_pointer(a[10]), int_pointer(a[11])
        num_rows = (last_token - first_token) * group
        num_pairs = (num_rows + _PAIR - 1) // _PAIR
        table = int_pointer(a[15] + int64(int_pointer(a[13])[tile]) * a[16] * 4)
        begin = int64(int_pointer(a[14])[tile])
        pool = a[17] + head * a[19] * 2

        sums_at = a[23] + thread * scratch_bytes(depth)
        q_at = sums_at + MAX_ROWS * depth * 4
        keys_at = q_at + MAX_ROWS * depth * 2
        values_at = keys_at + _CHUNK * depth * 2
        scores_at = values_at + _CHUNK * depth * 2
        weights_at = scores_at + _PAIR * _CHUNK * 4
        top_at = weights_at + _PAIR * _CHUNK * 2
        total_at = top_at + MAX_ROWS * 4
        saved_at = total_at + MAX_ROWS * _LANES * 4
        top, total = float_pointer(top_at), float_pointer(total_at)
        q, sums = half_pointer(q_at), float_pointer(sums_at)
        keys, values = word_pointer(keys_at), word_pointer(values_at)

        for i in range(num_pairs * _PAIR * depth):
            q[i] = uint16(0)
            sums[i] = float32(0)
        for i in range(_CHUNK * depth // 2):
            keys[i] = uint32(0)
        end = int64(0)
        for row in range(num_rows):
            token = int64(tokens[first_token + row // group])
            end = max(end, int64(limits[first_token + row // group]))
            source = half_pointer(a[6] + (token * a[7] + (head * group + row % group) * head_dim) * 2)
            for d in range(head_dim):
                q[row * depth + d] = source[d]
            top[row] = _LOWEST
            for lane in range(_LANES):
                total[row * _LANES + lane] = float32(0)
            if begun and begin > 0:
                query = token * kv_heads * group + head * group + row % group
                before = half_pointer(a[8] + query * head_dim * 2)
                for d in range(head_dim):
                    sums[row * depth + d] = load_bfloat16(before, d)
                top[row], total[row * _LANES] = float_pointer(a[9])[query] * float32(LOG2_E), float32(1)
        amx.save_config(saved_at)
        amx.load_config(a[22])
        for first in range(begin, end, _CHUNK):
            count = min(_CHUNK, end - first)
            if count < _CHUNK:
                for i in range(_CHUNK * depth // 2):
                    values[i] = uint32(0)
            pack_keys(pool, a[18], table, first, count, keys)
            pack_values(pool, a[18], table, first, count, values)
            for pair in range(num_pairs):
                most = int64(0)
                for row in range(pair * _PAIR, min(num_rows, (pair + 1) * _PAIR)):
                    most = max(most, min(count, int64(limits[first_token + row // group]) - first))
                if most <= 0:
                    continue
                multiply_keys(q_at + pair * _PAIR * depth * 2, keys_at, scores_at, most)
                rounded = (most + 31) // 32 * 32
                for i in range(_PAIR):
                    row = pair * _PAIR + i
                    of_row = half_pointer(weights_at + i * _CHUNK * 2)
                    seen = int64(0)
                    if row < num_rows:
                        seen = min(count, int64(limits[first_token + row // group]) - first)
                    if seen > 0:
                        of_total = float_pointer(total_at + row * _LANES * 4)
                        own = float_pointer(scores_at + i * _CHUNK * 4)
                        for k in range(seen, rounded):
                            own[k] = _LOWEST
                        highest = max(top[row], highest_of(own, rounded) * scale)
                        if highest > top[row]:
                            shrink = exp2(top[row] - highest)
                            top[row] = highest
                            for lane in range(_LANES):
                                of_total[lane] *= shrink
                            shrink_by(float_pointer(sums_at + row * depth * 4), shrink)
                        weigh(own, rounded, scale, highest, of_row, of_total)
                    else:
                        clear(of_row, rounded)
                multiply_values(
                    weights_at,
                    values_at,
                    sums_at + pair * _PAIR * depth * 4,
                    most,
                )
        amx.load_config(saved_at)
        for row in range(num_rows):
            token = int64(tokens[first_token + row // group])
            query = token * kv_heads * group + head * group + row % group
            target = half_pointer(a[8] + query * head_dim * 2)
            sum_of_weights = float32(0)
            for lane in range(_LANES):
                sum_of_weights += total[row * _LANES + lane]
            factor = float32(1) / sum_of_weights
            for d in range(head_dim):
                store_bfloat16(target, d, sums[row * depth + d] * factor)
            float_pointer(a[9])[query] = (top[row] + math.log2(sum_of_weights)) * float32(_LN_2)

    return per_item(work)
