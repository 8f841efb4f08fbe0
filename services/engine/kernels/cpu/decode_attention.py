"""Attention of single tokens over paged KV. Reads each K and V once, in the pool, for all query heads of its group.

    scores  [heads, keys]      = q x K^T, in 16 lanes for each key, which are then added up for 16 keys together
    weights [heads, keys]      = exp2(scores - highest)
    sums    [heads, head_dim] += weights x V, by register tiles

The softmax is online (Milakov and Gimelshein 2018, arXiv 1805.02867) over chunks of keys, in powers of two.
"""

import math
from typing import Any

import numpy as np
from numba import float32, int64

from services.engine.kernels.cpu.decode_softmax import hide, make_soften
from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.exponential import LOG2_E
from services.engine.kernels.cpu.head_rows import clear, make_read, make_write, padded
from services.engine.kernels.cpu.intrinsics import (
    float64_of,
    float_pointer,
    int_pointer,
    long_pointer,
    njit,
    prefetch_scattered,
)
from services.engine.kernels.cpu.per_item import NUM_ITEMS, per_item, places
from services.engine.kernels.cpu.register_tiles import COLUMNS, ROW_BYTES, Arithmetic, arithmetic_of, multiply_rows
from services.engine.kernels.cpu.tile_softmax import LOWEST
from services.engine.kernels.cpu.vectors import (
    LANES,
    add_products_of_pairs,
    interleave_pairs,
    load_floats,
    multiply_add,
    spread,
    store_floats,
    sum_of_lanes,
    sums_of_rows,
)

PLACES = places(
    "kv_heads q q_stride out lse tokens pool block_stride head_stride tables table_width first_keys seq_lens begun"
    " scale config scratch"
)
_CHUNK = 128  # keys at a time
# Each key and value is prefetched, a few lines at a time: the hardware follows no block table, and a burst of
# prefetches keeps the core from other work. On an EPYC of Zen 5, ns for a key and value of 128 bytes each that no cache
# holds: with a prefetch (into all caches) of the beginning of each block of 16 keys 27, of a whole block at once 25, of
# one key at a time 12. Memory itself takes 7.
_AHEAD = 48  # keys
_LINE = 64  # bytes
_LN_2 = math.log(2)


class DecodeAttention:
    """The kernel for one dtype and shape of heads, its `config` argument, and the scratch memory that it needs."""

    def __init__(self, dtype: str, head_dim: int, group: int, block_size: int) -> None:
        """Compiles the kernel."""
        self.config = np.zeros(1, dtype=np.uint8)
        self.scratch_bytes = _Memory(dtype, head_dim, group).bytes  # for one thread
        self.kernel = _make_kernel(dtype, head_dim, group, block_size)


class _Memory:
    """The layout of a thread's memory: offsets in bytes."""

    def __init__(self, dtype: str, head_dim: int, group: int) -> None:
        depth = padded(head_dim)
        self.row = depth * (2 if arithmetic_of(dtype) is Arithmetic.PAIRS else 4)  # bytes of a value or query
        self.queries = 0
        self.values = self.queries + group * self.row
        self.products = self.values + _CHUNK * self.row
        self.scores = self.products + group * LANES * _LINE
        self.weights = self.scores + group * _CHUNK * 4
        self.sums = self.weights + group * _CHUNK * 4
        self.totals = self.sums + group * depth * 4
        self.tops = self.totals + group * _LINE
        self.staged = self.tops + -(-group * 4 // _LINE) * _LINE
        self.following = self.staged + 3 * self.row  # of the next item: its pool and table, first key, length
        self.bytes = self.following + _LINE


@per_item
def _make_kernel(dtype: str, head_dim: int, group: int, block_size: int) -> Any:
    """Makes the kernel for one query token in each of R rows. An item is a row and a KV head.

    Arguments of the kernel: kv_heads; q and the elements from token to token in it; out [T, heads, head_dim] and lse,
    float32[T, heads]; int32[R] index of each row's token in q, out and lse; pool at the layer, elements from block to
    block and from head to head; block tables int32[R, ..] and their width; int32[R] first key, the keys before it are
    not read; int32[R] sequence length; 1 when out and lse already hold the attention over the keys before the first,
    else 0; scale; `config`; scratch_bytes for each thread, on a 64-byte border.
    """
    arg, size, as_pairs = PLACES, ELEMENTS[dtype].size, arithmetic_of(dtype) is Arithmetic.PAIRS
    memory = _Memory(dtype, head_dim, group)
    key_bytes, plane_bytes = head_dim * size, block_size * head_dim * size
    queries_at, values_at, products_at, scores_at = memory.queries, memory.values, memory.products, memory.scores
    weights_at, sums_at, totals_at, tops_at = memory.weights, memory.sums, memory.totals, memory.tops
    row_bytes, thread_bytes = memory.row, memory.bytes
    of_word = 2 if as_pairs else 1
    weights_bytes = _CHUNK * 4 // of_word  # for one head
    sums_bytes = group * ROW_BYTES  # for 32 columns
    following_at, staged_at, is_whole = memory.following, memory.staged, key_bytes % _LINE == 0
    read = make_read(ELEMENTS[dtype], head_dim, as_pairs=as_pairs)
    key_at = make_key_at(key_bytes, block_size)
    ask_for = _make_ask_for(key_at, key_bytes, memory.following)
    read_values = _make_read_values(key_at, ask_for, read, key_bytes, plane_bytes, memory, as_pairs=as_pairs)
    dots = _make_dots(dtype, head_dim, group, row_bytes, as_pairs=as_pairs)
    multiply = multiply_rows(Arithmetic.PAIRS if as_pairs else Arithmetic.SINGLES)
    soften = make_soften(padded(head_dim) // LANES, sums_bytes, ROW_BYTES // 2, as_pairs=as_pairs)
    begin_heads = _make_begin_heads(dtype, head_dim, group, memory, read)
    end_heads = _make_end_heads(dtype, head_dim, group, memory)

    @njit
    def score_keys(pool: int, block_stride: int, table: Any, first: int, length: int, scores: int, memory: int) -> None:
        """Writes the scores of 16 keys. Keys from the length on get the score of the last key."""
        for lane in range(LANES):
            at = key_at(pool, block_stride, table, min(first + lane, length - 1))
            ask_for(pool, block_stride, table, first + lane, length, 0, memory)
            if not is_whole:
                read(at, memory + staged_at)
                at = memory + staged_at
            dots(at, memory + queries_at, memory + products_at + lane * _LINE)
        for g in range(group):
            products = memory + products_at + g * LANES * _LINE
            store_floats(scores + g * _CHUNK * 4, sums_of_rows(products))

    @njit
    def attend_chunk(
        pool: int, block_stride: int, table: Any, first: int, begin: int, length: int, scale: float, memory: int
    ) -> None:
        """Attends to the keys from `first` to the length, at most a chunk of them; keys before `begin` are hidden."""
        count = min(int64(_CHUNK), length - first)
        values, weights = memory + values_at, memory + weights_at
        for k in range(0, count, LANES):
            score_keys(pool, block_stride, table, first + k, length, memory + scores_at + k * 4, memory)
            some = min(int64(LANES), count - k)
            read_values(pool, block_stride, table, first + k, some, length, memory, values + k * row_bytes)
        rounded = (count + 2 * LANES - 1) // (2 * LANES) * 2 * LANES
        for g in range(group):
            scores = memory + scores_at + g * _CHUNK * 4
            hide(scores, rounded, begin - first, count)
            soften(
                scores,
                rounded,
                scale,
                float_pointer(memory + tops_at + g * 4),
                memory + totals_at + g * _LINE,
                memory + sums_at + g * ROW_BYTES,
                memory + weights_at + g * weights_bytes,
            )
        steps = (count + of_word - 1) // of_word
        for column in range(0, head_dim, COLUMNS):
            b, sums = values + column * 4, memory + sums_at + column // COLUMNS * sums_bytes
            multiply(group, weights, weights_bytes, 4, b, row_bytes * of_word, steps, sums, False, b, 0)

    @njit
    def note_following(a: Any, item: int, memory: int) -> None:
        """Stores the place of the next item's keys: a thread most often takes the next item too."""
        kv_heads = a[arg.kv_heads]
        next_item = min(item + 1, a[NUM_ITEMS] - 1)
        row, head = next_item // kv_heads, next_item % kv_heads
        following = long_pointer(memory + following_at)
        following[0] = a[arg.pool] + head * a[arg.head_stride] * size
        following[1] = a[arg.tables] + row * a[arg.table_width] * 4
        following[2] = int64(int_pointer(a[arg.first_keys])[row])
        following[3] = int64(int_pointer(a[arg.seq_lens])[row])

    @njit
    def work(a: Any, item: int, thread: int) -> None:
        kv_heads, scale = a[arg.kv_heads], float32(float64_of(a[arg.scale]))
        row, head = item // kv_heads, item % kv_heads
        begin, length = int64(int_pointer(a[arg.first_keys])[row]), int64(int_pointer(a[arg.seq_lens])[row])
        token = int64(int_pointer(a[arg.tokens])[row])
        table = int_pointer(a[arg.tables] + row * a[arg.table_width] * 4)
        pool, block_stride = a[arg.pool] + head * a[arg.head_stride] * size, a[arg.block_stride] * size
        memory = a[arg.scratch] + thread * thread_bytes
        clear(memory + staged_at, 3 * row_bytes)
        note_following(a, item, memory)
        begin_heads(a, token, head, a[arg.begun] != 0 and begin > 0, memory)
        for first in range(begin // LANES * LANES, length, _CHUNK):
            attend_chunk(pool, block_stride, table, first, begin, length, scale, memory)
        end_heads(a, token, head, memory)

    return work


def make_key_at(key_bytes: int, block_size: int) -> Any:
    """Makes a function that returns the address of a key. Its arguments: address of the head's keys in the first block;
    bytes from block to block; the block table's row; the key.
    """

    @njit
    def key_at(pool: int, block_stride: int, table: Any, k: int) -> int:
        return pool + int64(table[k // block_size]) * block_stride + k % block_size * key_bytes

    return key_at


def _make_ask_for(key_at: Any, key_bytes: int, following_at: int) -> Any:
    @njit
    def ask_for(pool: int, block_stride: int, table: Any, k: int, length: int, plane: int, memory: int) -> None:
        """Prefetches a key, or its value, that is read a little later: for this item, or for the next one."""
        later = k + _AHEAD
        if later < length:
            at = key_at(pool, block_stride, table, later)
        else:
            following = long_pointer(memory + following_at)
            own = min(later - length + following[2], following[3] - 1)
            at = key_at(following[0], block_stride, int_pointer(following[1]), own)
        for line in range(0, key_bytes, _LINE):
            prefetch_scattered(at + plane + line)

    return ask_for


def _make_read_values(
    key_at: Any, ask_for: Any, read: Any, key_bytes: int, plane_bytes: int, memory: _Memory, *, as_pairs: bool
) -> Any:
    row_bytes, staged_at, is_whole = memory.row, memory.staged, key_bytes % _LINE == 0

    @njit
    def read_singles(
        pool: int, block_stride: int, table: Any, first: int, count: int, length: int, memory: int, values: int
    ) -> None:
        """Writes values as float32 rows, as `multiply` takes them."""
        for k in range(count):
            ask_for(pool, block_stride, table, first + k, length, plane_bytes, memory)
            read(key_at(pool, block_stride, table, first + k) + plane_bytes, values + k * row_bytes)

    @njit
    def read_pairs(
        pool: int, block_stride: int, table: Any, first: int, count: int, length: int, memory: int, values: int
    ) -> None:
        """Writes bfloat16 values with one word for two keys; the second key of the last word may be zeros."""
        room = memory + staged_at
        for k in range(0, count, 2):
            ask_for(pool, block_stride, table, first + k, length, plane_bytes, memory)
            ask_for(pool, block_stride, table, first + k + 1, length, plane_bytes, memory)
            even = key_at(pool, block_stride, table, first + k) + plane_bytes
            odd = room + 2 * row_bytes
            if k + 1 < count:
                odd = key_at(pool, block_stride, table, first + k + 1) + plane_bytes
            if not is_whole:
                read(even, room)
                read(odd, room + row_bytes)
                even, odd = room, room + row_bytes
            for line in range(0, row_bytes, _LINE):
                interleave_pairs(even + line, odd + line, values + k * row_bytes + 2 * line)

    return read_pairs if as_pairs else read_singles


def _make_dots(dtype: str, head_dim: int, group: int, row_bytes: int, *, as_pairs: bool) -> Any:
    element = ELEMENTS[dtype]
    size, is_whole = element.size, head_dim * element.size % _LINE == 0
    load_vector = element.load_vector if is_whole else load_floats  # staged keys are rows of float32
    vectors, vector_bytes = -(-head_dim // LANES), LANES * (size if is_whole else 4)
    if as_pairs:
        vectors = -(-head_dim // (2 * LANES))

    @njit
    def dots(key: int, queries: int, products: int) -> None:
        """Multiplies a key by each head's query, lane by lane. Products of consecutive heads are 16 rows apart."""
        for g in range(group):
            q = queries + g * row_bytes
            sums = spread(float32(0))
            if as_pairs:
                for i in range(vectors):
                    sums = add_products_of_pairs(sums, load_floats(key + i * _LINE), load_floats(q + i * _LINE))
            else:
                for i in range(vectors):
                    sums = multiply_add(load_vector(key + i * vector_bytes), load_floats(q + i * _LINE), sums)
            store_floats(products + g * LANES * _LINE, sums)

    return dots


def _make_begin_heads(dtype: str, head_dim: int, group: int, memory: _Memory, read: Any) -> Any:
    arg, size, depth = PLACES, ELEMENTS[dtype].size, padded(head_dim)
    row_bytes, sums_bytes = memory.row, group * ROW_BYTES
    sums_at, totals_at, tops_at, products_at = memory.sums, memory.totals, memory.tops, memory.products
    read_floats = make_read(ELEMENTS[dtype], head_dim, as_pairs=False)

    @njit
    def begin_heads(a: Any, token: int, head: int, begun: bool, memory: int) -> None:
        """Writes queries, sums, totals and highest scores; the latter three continue earlier attention if `begun`."""
        clear(memory, group * row_bytes)
        clear(memory + sums_at, group * depth * 4)
        clear(memory + totals_at, group * _LINE)
        first_head = (token * a[arg.kv_heads] + head) * group
        for g in range(group):
            read(a[arg.q] + (token * a[arg.q_stride] + (head * group + g) * head_dim) * size, memory + g * row_bytes)
            float_pointer(memory + tops_at)[g] = LOWEST
            if begun:
                float_pointer(memory + totals_at + g * _LINE)[0] = float32(1)
                float_pointer(memory + tops_at)[g] = float_pointer(a[arg.lse])[first_head + g] * float32(LOG2_E)
                read_floats(a[arg.out] + (first_head + g) * head_dim * size, memory + products_at)
                for line in range(0, depth * 4, _LINE):
                    at = memory + sums_at + line // ROW_BYTES * sums_bytes + g * ROW_BYTES + line % ROW_BYTES
                    store_floats(at, load_floats(memory + products_at + line))

    return begin_heads


def _make_end_heads(dtype: str, head_dim: int, group: int, memory: _Memory) -> Any:
    arg, size, depth, sums_bytes = PLACES, ELEMENTS[dtype].size, padded(head_dim), group * ROW_BYTES
    sums_at, totals_at, tops_at, products_at = memory.sums, memory.totals, memory.tops, memory.products
    write = make_write(ELEMENTS[dtype], head_dim)

    @njit(error_model="numpy")
    def end_heads(a: Any, token: int, head: int, memory: int) -> None:
        first_head = (token * a[arg.kv_heads] + head) * group
        for g in range(group):
            total = sum_of_lanes(load_floats(memory + totals_at + g * _LINE))
            factor = spread(float32(1) / total)
            for line in range(0, depth * 4, _LINE):
                at = memory + sums_at + line // ROW_BYTES * sums_bytes + g * ROW_BYTES + line % ROW_BYTES
                store_floats(memory + products_at + line, load_floats(at) * factor)
            write(memory + products_at, a[arg.out] + (first_head + g) * head_dim * size)
            top = float_pointer(memory + tops_at)[g]
            float_pointer(a[arg.lse])[first_head + g] = (top + math.log2(total)) * float32(_LN_2)

    return end_heads
