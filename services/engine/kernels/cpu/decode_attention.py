"""Attention of single tokens over paged KV. Reads each K and V once, in the pool, for all query heads of its group.

Keys are taken 16 at a time:

    scores  [heads, 16]        = q x K^T, in 16 lanes for each key, which are then added up for the 16 keys together
    weights [heads, 16]        = exp2(scores - reference)
    sums    [heads, head_dim] += weights x V, by register tiles

The scores of 16 keys are computed before the values of the 16 before them are added, so that no product waits for its
weights. The softmax is online, in powers of two.
"""

import math
from typing import Any

import numpy as np
from numba import float32, int64

from services.engine.kernels.cpu.decode_products import arithmetic_of_values, make_add_values, make_score_keys
from services.engine.kernels.cpu.decode_rows import (
    AHEAD,
    make_decoded_rows_at,
    make_key_at,
    make_rows_ahead_at,
    make_rows_at,
    make_scale_at,
    make_scales_at,
)
from services.engine.kernels.cpu.decode_softmax import clear_hidden, hide, make_soften
from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.exponential import LOG2_E, capped_score
from services.engine.kernels.cpu.head_rows import clear, make_read, make_write, padded
from services.engine.kernels.cpu.intrinsics import (
    float64_of,
    float_pointer,
    int_pointer,
    long_pointer,
    njit,
    prefetch_scattered,
)
from services.engine.kernels.cpu.kv_forms import KvForm
from services.engine.kernels.cpu.per_item import NUM_ITEMS, per_item, places
from services.engine.kernels.cpu.register_tiles import Arithmetic, arithmetic_of
from services.engine.kernels.cpu.tile_softmax import LOWEST
from services.engine.kernels.cpu.vectors import LANES, load_floats, spread, store_floats, sum_of_lanes

PLACES = places(
    "kv_heads q q_stride out lse tokens pool block_stride head_stride tables table_width first_keys seq_lens begun"
    " scale cap sinks config scratch kv_scales"
)
_KEYS = LANES  # at a time
_LINE = 64  # bytes
_LN_2 = math.log(2)


class DecodeAttention:
    """The kernel for one dtype and shape of heads, its `config` argument, and the scratch memory that it needs."""

    def __init__(
        self,
        dtype: str,
        head_dim: int,
        group: int,
        block_size: int,
        *,
        capped: bool = False,
        form: KvForm = KvForm.PLAIN,
    ) -> None:
        """Compiles the kernel. dtype: of the model. capped: scores have a soft cap. form: of the pool."""
        self.config = np.zeros(1, dtype=np.uint8)
        self.scratch_bytes = _Memory(dtype, head_dim, group).bytes  # for one thread
        self.kernel = _make_kernel(dtype, head_dim, group, block_size, capped=capped, form=form)


class _Memory:
    """The layout of a thread's memory: offsets in bytes."""

    def __init__(self, dtype: str, head_dim: int, group: int) -> None:
        depth, size = padded(head_dim), ELEMENTS[dtype].size
        self.query = depth * (2 if arithmetic_of(dtype) is Arithmetic.PAIRS else 4)  # bytes of a query
        self.row = depth * size  # bytes of a key or value
        self.queries = 0
        self.scores = self.queries + group * self.query
        self.weights = self.scores + group * _LINE
        self.sums = self.weights + group * _LINE
        self.totals = self.sums + group * depth * 4
        self.references = self.totals + group * _LINE
        self.result = self.references + -(-group * 4 // _LINE) * _LINE
        self.staged = self.result + depth * 4  # 16 keys, or values
        self.last = self.staged + _KEYS * self.row  # the last value of an odd number
        self.zeros = self.last + self.row  # its partner
        self.following = self.zeros + self.row  # of the next item: its pool and table, first key, length
        self.key_scales = self.following + _LINE  # of 16 keys, where they are not read in the pool
        self.value_scales = self.key_scales + _LINE
        self.bytes = self.value_scales + _LINE


@per_item
def _make_kernel(dtype: str, head_dim: int, group: int, block_size: int, *, capped: bool, form: KvForm) -> Any:
    """Makes the kernel for one query token in each of R rows. An item is a row and a KV head.

    Arguments of the kernel: kv_heads; q and the elements from token to token in it; out [T, heads, head_dim] and lse,
    float32[T, heads]; int32[R] index of each row's token in q, out and lse; pool at the layer, elements (of codes:
    bytes) from block to block and from head to head; block tables int32[R, ..] and their width; int32[R] first key, the
    keys before it are not read; int32[R] sequence length; 1 when out and lse already hold the attention over the keys
    before the first, else 0; scale; soft cap of the scores if the kernel is `capped`; float32[heads] sinks or 0, which
    are counted where there is no such attention; `config`; scratch_bytes for each thread, on a 64-byte border; static
    scales of the layer, float32[2, kv_heads], if the form has these.

    Codes are widened to numbers of the model's dtype in the thread's memory, 16 rows at a time, and multiplied there.
    Their scales go into scores and weights: a product of 16 numbers for each head, not for each element.
    """
    arg, size, memory = PLACES, form.item_bytes(dtype), _Memory(dtype, head_dim, group)
    plane_bytes, thread_bytes = form.plane_bytes(dtype, head_dim, block_size), memory.bytes
    has_token_scales, has_static_scales = form.has_token_scales, form is KvForm.FP8_STATIC
    queries_at, scores_at = memory.queries, memory.scores
    contiguous = block_size % _KEYS == 0
    in_pool = contiguous and head_dim == padded(head_dim) and not form.is_coded  # multiplied where they lie
    is_filled = in_pool or (form.is_coded and contiguous and head_dim == padded(head_dim))  # by each 16 rows
    following_at, cleared_at = memory.following, memory.zeros if is_filled else memory.staged
    cleared_bytes = memory.following - cleared_at
    key_at = make_key_at(head_dim * size, block_size)
    if form.is_coded:
        rows_at = make_decoded_rows_at(form, dtype, head_dim, block_size, memory.staged)
    else:
        rows_at = make_rows_at(key_at, head_dim * size, memory.staged, memory.row, contiguous, in_pool=in_pool)
    scale_at = make_scale_at(head_dim, block_size)
    scales_at = make_scales_at(scale_at, block_size)
    rows_ahead_at = make_rows_ahead_at(key_at, scale_at, memory.following, contiguous=contiguous)
    in_products = contiguous and not form.is_coded  # they prefetch
    score_keys = make_score_keys(dtype, padded(head_dim), group, prefetches=in_products)
    soften = _make_soften(dtype, head_dim, group, memory, capped=capped, scaled=has_token_scales)
    add_values = _make_add_values(dtype, head_dim, group, memory, prefetches=in_products)
    begin_heads = _make_begin_heads(dtype, head_dim, group, memory)
    end_heads = _make_end_heads(dtype, head_dim, group, memory)
    key_scales_at, value_scales_at = memory.key_scales, memory.value_scales

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
        cap = float32(float64_of(a[arg.cap]))
        row, head = item // kv_heads, item % kv_heads
        begin, length = int64(int_pointer(a[arg.first_keys])[row]), int64(int_pointer(a[arg.seq_lens])[row])
        token = int64(int_pointer(a[arg.tokens])[row])
        table = int_pointer(a[arg.tables] + row * a[arg.table_width] * 4)
        pool, block_stride = a[arg.pool] + head * a[arg.head_stride] * size, a[arg.block_stride] * size
        memory = a[arg.scratch] + thread * thread_bytes
        clear(memory + cleared_at, cleared_bytes)
        note_following(a, item, memory)
        value_scale, key_scales, value_scales = float32(1), int64(0), int64(0)
        if has_static_scales:
            scale *= float_pointer(a[arg.kv_scales])[head]
            value_scale = float_pointer(a[arg.kv_scales])[kv_heads + head]
        begin_heads(a, token, head, a[arg.begun] != 0 and begin > 0, value_scale, memory)
        start = begin // _KEYS * _KEYS if contiguous else begin  # no block before that of the first key is read
        for first in range(start, length + _KEYS, _KEYS):
            ahead, scales_ahead = rows_ahead_at(pool, block_stride, table, first + AHEAD, length, memory)
            if has_token_scales:
                prefetch_scattered(scales_ahead)
                prefetch_scattered(scales_ahead + plane_bytes)
            if first < length:
                keys = rows_at(pool, block_stride, table, first, length, ahead, memory)
                score_keys(keys, memory + queries_at, memory + scores_at, ahead)
            if first > start:
                earlier = first - _KEYS
                values = rows_at(pool + plane_bytes, block_stride, table, earlier, length, ahead + plane_bytes, memory)
                add_values(values, min(int64(_KEYS), length - earlier), ahead + plane_bytes, memory)
            if first < length:
                if has_token_scales:
                    place = (block_stride, table, first, length)
                    key_scales = scales_at(pool, place, memory + key_scales_at)
                    value_scales = scales_at(pool + plane_bytes, place, memory + value_scales_at)
                soften(begin - first, length - first, scale, cap, key_scales, value_scales, memory)
        end_heads(a, token, head, value_scale, memory)

    return work


def _make_soften(dtype: str, head_dim: int, group: int, memory: _Memory, *, capped: bool, scaled: bool) -> Any:
    as_pairs = arithmetic_of(dtype) is Arithmetic.PAIRS
    soften_head = make_soften(padded(head_dim), as_pairs=as_pairs, scaled=scaled)
    value_scales_at = memory.value_scales
    sums_bytes = padded(head_dim) * 4
    scores_at, references_at, totals_at, sums_at = memory.scores, memory.references, memory.totals, memory.sums
    weights_at = memory.weights

    @njit
    def soften(begin: int, end: int, scale: float, cap: float, key_scales: int, value_scales: int, memory: int) -> None:
        """Writes the weights of 16 keys, of which those before `begin` and from `end` on are hidden."""
        if scaled and (begin > 0 or end < LANES):  # what is hidden may have any scale, and a weight of 0
            store_floats(memory + value_scales_at, load_floats(value_scales))
            value_scales = memory + value_scales_at
            clear_hidden(value_scales, begin, end)
        for g in range(group):
            scores = memory + scores_at + g * _LINE
            if scaled:
                store_floats(scores, load_floats(scores) * load_floats(key_scales))
            if capped:
                store_floats(scores, capped_score(load_floats(scores), spread(scale), spread(cap)))
            hide(scores, begin, end)
            soften_head(
                scores,
                float32(1) if capped else scale,
                float_pointer(memory + references_at + g * 4),
                memory + totals_at + g * _LINE,
                memory + sums_at + g * sums_bytes,
                memory + weights_at + g * _LINE,
                value_scales,
            )

    return soften


def _make_add_values(dtype: str, head_dim: int, group: int, memory: _Memory, *, prefetches: bool) -> Any:
    row_bytes, weights_at, sums_at, last_at = memory.row, memory.weights, memory.sums, memory.last
    arithmetic = arithmetic_of_values(dtype)
    add_products = make_add_values(arithmetic, padded(head_dim), group, prefetches=prefetches)
    depth = arithmetic.depth

    @njit
    def add_values(values: int, count: int, ahead: int, memory: int) -> None:
        """Adds so many values, at most 16, by their weights, and prefetches as many others."""
        steps = count // depth
        if steps > 0:
            add_products(memory + weights_at, values, steps, memory + sums_at, ahead)
        if count % depth != 0:
            for line in range(0, row_bytes, _LINE):
                store_floats(memory + last_at + line, load_floats(values + (count - 1) * row_bytes + line))
            add_products(memory + weights_at + steps * 4, memory + last_at, int64(1), memory + sums_at, ahead)

    return add_values


def _make_begin_heads(dtype: str, head_dim: int, group: int, memory: _Memory) -> Any:
    arg, size, depth = PLACES, ELEMENTS[dtype].size, padded(head_dim)
    query_bytes, sums_bytes = memory.query, depth * 4
    sums_at, totals_at, references_at, result_at = memory.sums, memory.totals, memory.references, memory.result
    read = make_read(ELEMENTS[dtype], head_dim, as_pairs=arithmetic_of(dtype) is Arithmetic.PAIRS)
    read_floats = make_read(ELEMENTS[dtype], head_dim, as_pairs=False)

    @njit(error_model="numpy")
    def begin_heads(a: Any, token: int, head: int, begun: bool, value_scale: float, memory: int) -> None:
        """Writes queries, sums, totals and references; the latter three continue earlier attention if `begun`, and
        begin with the sinks if not. Sums are smaller than results by the value scale.
        """
        clear(memory, group * query_bytes)
        clear(memory + sums_at, group * depth * 4)
        clear(memory + totals_at, group * _LINE)
        first_head = (token * a[arg.kv_heads] + head) * group
        for g in range(group):
            read(a[arg.q] + (token * a[arg.q_stride] + (head * group + g) * head_dim) * size, memory + g * query_bytes)
            float_pointer(memory + references_at)[g] = LOWEST
            if a[arg.sinks] != 0 and not begun:
                sink = float_pointer(a[arg.sinks])[head * group + g] * float32(LOG2_E)
                float_pointer(memory + totals_at + g * _LINE)[0] = float32(1)
                float_pointer(memory + references_at)[g] = max(sink, LOWEST)
            if begun:
                float_pointer(memory + totals_at + g * _LINE)[0] = float32(1)
                float_pointer(memory + references_at)[g] = float_pointer(a[arg.lse])[first_head + g] * float32(LOG2_E)
                read_floats(a[arg.out] + (first_head + g) * head_dim * size, memory + result_at)
                for line in range(0, depth * 4, _LINE):
                    at = memory + sums_at + g * sums_bytes + line
                    store_floats(at, load_floats(memory + result_at + line) * spread(float32(1) / value_scale))

    return begin_heads


def _make_end_heads(dtype: str, head_dim: int, group: int, memory: _Memory) -> Any:
    arg, size, depth, sums_bytes = PLACES, ELEMENTS[dtype].size, padded(head_dim), padded(head_dim) * 4
    sums_at, totals_at, references_at, result_at = memory.sums, memory.totals, memory.references, memory.result
    write = make_write(ELEMENTS[dtype], head_dim)

    @njit(error_model="numpy")
    def end_heads(a: Any, token: int, head: int, value_scale: float, memory: int) -> None:
        first_head = (token * a[arg.kv_heads] + head) * group
        for g in range(group):
            total = sum_of_lanes(load_floats(memory + totals_at + g * _LINE))
            factor = spread(value_scale / total)
            for line in range(0, depth * 4, _LINE):
                at = memory + sums_at + g * sums_bytes + line
                store_floats(memory + result_at + line, load_floats(at) * factor)
            write(memory + result_at, a[arg.out] + (first_head + g) * head_dim * size)
            reference = float_pointer(memory + references_at)[g]
            float_pointer(a[arg.lse])[first_head + g] = (reference + math.log2(total)) * float32(_LN_2)

    return end_heads
