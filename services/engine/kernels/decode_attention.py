"""Attention of single tokens over paged KV: reads each K and V once, where it lies, for all query heads of its group.

The softmax is online (Milakov and Gimelshein 2018, arXiv 1805.02867) over blocks, in powers of two. Sums are float32.
"""

import math
from typing import Any

from numba import float32, int64, njit

from services.engine.kernels.elements import Element
from services.engine.kernels.intrinsics import (
    LOG2_E,
    exp2,
    float64_of,
    float_pointer,
    int_pointer,
    prefetch,
    stack,
)
from services.engine.kernels.per_item import per_item, places

PLACES = places(
    "kv_heads q q_stride out lse tokens pool block_stride head_stride tables table_width first_keys seq_lens begun"
    " scale config scratch"
)
_LOWEST = float32(-1e30)
_LN_2 = math.log(2)
_LINE = 64  # bytes of a cache line
_AHEAD = 1  # blocks, of what is asked for in advance: the hardware follows no block table


def make_decode_attention(element: Element, head_dim: int, group: int, block_size: int) -> Any:
    """One query token for each of R rows. An item is a row and a KV head.

    Arguments: kv_heads; q and the elements from token to token there; out [T, heads, head_dim] and lse, float32[T,
    heads]; int32[R] index of each row's token in both; pool at the layer, elements from block to block and from head
    to head; block tables int32[R, ..] and their width; int32[R] first key, the keys before it are not looked at;
    int32[R] sequence length; 1 when out and lse already hold the attention over the keys before the first, else 0;
    scale.
    """
    load, store, pointer, size = element.load, element.store, element.pointer, element.size
    arg = PLACES
    num_outputs, num_scores, plane = group * head_dim, group * block_size, block_size * head_dim

    @njit(fastmath=True, error_model="numpy")
    def attend(
        q: Any,
        out: Any,
        lse: Any,
        begun: bool,
        pool: int,
        block_stride: int,
        table: Any,
        first: int,
        length: int,
        scale: float,
    ) -> None:
        scaled, sums, scores = stack(num_outputs), stack(num_outputs), stack(num_scores)
        top, total = stack(group), stack(group)
        for i in range(num_outputs):
            scaled[i] = load(q, i) * scale
            sums[i] = load(out, i) if begun else float32(0)
        for g in range(group):
            top[g] = lse[g] * float32(LOG2_E) if begun else _LOWEST
            total[g] = float32(1) if begun else float32(0)
        end = (length + block_size - 1) // block_size
        for index in range(first // block_size, end):
            following = pool + int64(table[min(index + _AHEAD, end - 1)]) * block_stride * size
            keys = pointer(pool + int64(table[index]) * block_stride * size)
            start, stop = max(0, first - index * block_size), min(block_size, length - index * block_size)
            for j in range(start, stop):
                for line in range(0, head_dim * size, _LINE):
                    prefetch(following + j * head_dim * size + line)
                for g in range(group):
                    score = float32(0)
                    for d in range(head_dim):
                        score += scaled[g * head_dim + d] * load(keys, j * head_dim + d)
                    scores[g * block_size + j] = score
            for g in range(group):
                highest = top[g]
                for j in range(start, stop):
                    highest = max(highest, scores[g * block_size + j])
                shrink = exp2(top[g] - highest)
                top[g] = highest
                sum_of_weights = total[g] * shrink
                for j in range(start, stop):
                    weight = exp2(scores[g * block_size + j] - highest)
                    scores[g * block_size + j] = weight
                    sum_of_weights += weight
                total[g] = sum_of_weights
                for d in range(head_dim):
                    sums[g * head_dim + d] *= shrink
            for j in range(start, stop):
                for line in range(0, head_dim * size, _LINE):
                    prefetch(following + (plane + j * head_dim) * size + line)
                for g in range(group):
                    weight = scores[g * block_size + j]
                    for d in range(head_dim):
                        sums[g * head_dim + d] += weight * load(keys, plane + j * head_dim + d)
        for g in range(group):
            factor = float32(1) / total[g]
            for d in range(head_dim):
                store(out, g * head_dim + d, sums[g * head_dim + d] * factor)
            lse[g] = (top[g] + math.log2(total[g])) * float32(_LN_2)

    @njit
    def work(a: Any, item: int, _thread: int) -> None:
        kv_heads = a[arg.kv_heads]
        row, head = item // kv_heads, item % kv_heads
        token = int64(int_pointer(a[arg.tokens])[row])
        first_key, length = int64(int_pointer(a[arg.first_keys])[row]), int64(int_pointer(a[arg.seq_lens])[row])
        first_head = token * kv_heads * group + head * group
        attend(
            pointer(a[arg.q] + (token * a[arg.q_stride] + head * num_outputs) * size),
            pointer(a[arg.out] + first_head * head_dim * size),
            float_pointer(a[arg.lse] + first_head * 4),
            a[arg.begun] != 0 and first_key > 0,
            a[arg.pool] + head * a[arg.head_stride] * size,
            a[arg.block_stride],
            int_pointer(a[arg.tables] + row * a[arg.table_width] * 4),
            first_key,
            length,
            float32(float64_of(a[arg.scale])),
        )

    return per_item(work)
