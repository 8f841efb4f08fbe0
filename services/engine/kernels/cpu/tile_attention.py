"""Attention of many query tokens over paged KV: for prompts, and for prefixes that rows share.

An item is a tile of query tokens and a KV head; all query heads of the KV head are rows of the tile. All matrices are
transposed, so that a query has one lane of each vector to itself, and its softmax needs no other lane:

    scores  [keys, 32]     = K [keys, head_dim] x Q^T [head_dim, 32]      float32, of 32 queries
    weights [keys, 32]     = exp2(scores - reference)
    sums    [head_dim, 32] += V^T [head_dim, keys] x weights [keys, 32]   float32

K and V of a segment of keys are copied once for all rows of the tile, into the order in which AMX or register tiles
multiply them fastest.

Of latents (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434) the value is the first part of the key: a row of
the pool is read once for both, and for all query heads.
"""

import math
from typing import Any

from numba import float32, int64

from services.engine.kernels.cpu.amx.tile_products import amx_products
from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.exponential import LOG2_E
from services.engine.kernels.cpu.head_rows import clear, make_read, make_read_rows, make_write, padded
from services.engine.kernels.cpu.intrinsics import ISA, float64_of, float_pointer, int_pointer, njit
from services.engine.kernels.cpu.kv_forms import KvForm
from services.engine.kernels.cpu.per_item import NUM_ITEMS, per_item, places
from services.engine.kernels.cpu.register_tiles import Arithmetic, arithmetic_of
from services.engine.kernels.cpu.tile_products import QUERIES, TileProducts, latent_products, register_products
from services.engine.kernels.cpu.tile_softmax import (
    LIMITS,
    LOWEST,
    STATE_BYTES,
    TOTAL,
    cap_scores,
    hide,
    hide_outside_window,
    make_soften,
)
from services.engine.kernels.cpu.vectors import LANES, divide, load_floats, spread, store_floats, transpose

_CHUNK = 128  # keys whose scores are kept at a time
_LINE, _ROW_BYTES = 64, 128  # bytes of 16 words; of a row of 32 words
_LN_2 = math.log(2)


class TileAttentionKernel:
    """The kernel for one dtype and shape of heads, its `config` argument, and the scratch memory that it needs."""

    def __init__(
        self,
        dtype: str,
        head_dim: int,
        group: int,
        block_size: int,
        rope_dim: int = 0,
        *,
        capped: bool = False,
        form: KvForm = KvForm.PLAIN,
    ) -> None:
        """Compiles the kernel. dtype: of the model. group: query heads of a KV head, at most the rows of a tile, but of
        latents any number.

        rope_dim: 0: K and V have planes of their own. Else they are latents of head_dim numbers, followed by rope_dim
        numbers of K alone; the query has head_dim numbers for the former, and elsewhere rope_dim for the latter.
        capped: scores have a soft cap. form: of the pool; latents are PLAIN.
        """
        products = _make_products(dtype, head_dim, block_size, group, rope_dim, form)
        assert group <= products.max_rows
        assert _CHUNK % products.key_step == 0
        self.config = products.config
        self.max_tokens = products.max_rows // group  # of one tile
        self.scratch_bytes = _memory_of(dtype, head_dim, rope_dim, products).bytes  # for one thread
        self.kernel = _make_kernel(dtype, head_dim, group, block_size, rope_dim, capped=capped, form=form)


class _Memory:
    """The layout of a thread's memory: offsets in bytes."""

    def __init__(self, dtype: str, max_rows: int, segment: int, key_dim: int, value_dim: int) -> None:
        depth = padded(key_dim)
        self.row = depth * (2 if arithmetic_of(dtype) is Arithmetic.PAIRS else 4)  # bytes of a key, value or query
        self.sums = 0
        self.queries = self.sums + max_rows * padded(value_dim) * 4
        self.keys = self.queries + max_rows * self.row
        self.values = self.keys + (segment + QUERIES) * self.row
        self.staged = self.values + (segment + QUERIES) * self.row  # 32 rows of words, or 16 of float32
        self.scores = self.staged + QUERIES * depth * 4
        self.states = self.scores + _CHUNK * _ROW_BYTES
        self.spans = self.states + max_rows // LANES * STATE_BYTES  # for 16 queries: lowest and highest limit
        self.saved = self.spans + max_rows // LANES * 8
        self.bytes = -(-(self.saved + _LINE) // _LINE) * _LINE


_ARG = places(
    "kv_heads q q_stride out lse tokens limits starts rows first_keys tables table_width pool block_stride head_stride"
    " begun window scale cap sinks config scratch rope rope_stride kv_scales"
)


def _memory_of(dtype: str, head_dim: int, rope_dim: int, products: TileProducts) -> _Memory:
    return _Memory(dtype, products.max_rows, products.segment, head_dim + rope_dim, head_dim)


def _make_products(
    dtype: str, head_dim: int, block_size: int, group: int = 1, rope_dim: int = 0, form: KvForm = KvForm.PLAIN
) -> TileProducts:
    as_pairs = arithmetic_of(dtype) is Arithmetic.PAIRS
    assert not (rope_dim and form.is_coded), "latents have no codes"
    if rope_dim:
        return latent_products(head_dim, rope_dim, group, as_pairs=as_pairs)
    read_rows = make_read_rows(dtype, head_dim, block_size, as_pairs=as_pairs, form=form)
    if ISA.has_amx and as_pairs:
        return amx_products(head_dim, read_rows)
    return register_products(head_dim, read_rows, as_pairs=as_pairs)


@per_item
def _make_kernel(
    dtype: str, head_dim: int, group: int, block_size: int, rope_dim: int, *, capped: bool, form: KvForm
) -> Any:
    """Makes the kernel for N tiles; `TileAttentionKernel` explains its parameters.

    Arguments of the kernel, by their names in `_ARG`. M: tokens of all tiles, one tile after the other.

        kv_heads, scale, config     config: of the products
        q, q_stride                 q_stride: elements from token to token in q
        out, lse                    [T, heads, head_dim], float32[T, heads]
        tokens, limits              int32[M], int32[M]: index in q, out and lse; number of keys that the token sees
        starts                      int32[N + 1]: where each tile's tokens begin
        rows, first_keys            int32[N], int32[N]: row of `tables`; first key, a multiple of block_size
        tables, table_width         block tables, int32[R, table_width]
        pool                        at the layer; block_stride, head_stride: elements (of codes: bytes) from block to
                                    block, head to head
        begun                       1: out and lse hold the attention over the keys before the first one; else 0
        window                      how many keys a token sees at most; 0: all
        cap                         soft cap of the scores, if the kernel is `capped`
        sinks                       float32[heads], counted where no attention is `begun`; 0: none
        scratch                     scratch_bytes for each thread, on a 64-byte border
        rope, rope_stride           of latents: [T, heads, rope_dim], elements from token to token; else 0
        kv_scales                   static scales of the layer, float32[2, kv_heads], if the form has these; else 0
    """
    as_pairs, key_dim = arithmetic_of(dtype) is Arithmetic.PAIRS, head_dim + rope_dim
    products = _make_products(dtype, head_dim, block_size, group, rope_dim, form)
    read_rows = make_read_rows(dtype, key_dim, block_size, as_pairs=as_pairs, form=form)
    arg, size, segment = _ARG, form.item_bytes(dtype), products.segment
    memory = _memory_of(dtype, head_dim, rope_dim, products)
    plane_bytes, row_bytes, key_step = form.plane_bytes(dtype, head_dim, block_size), memory.row, products.key_step
    static_scales = _make_static_scales(form)
    sums_bytes, queries_bytes = padded(head_dim) * _ROW_BYTES, row_bytes // 4 * _ROW_BYTES  # for 32 queries
    thread_bytes = memory.bytes
    queries_at, keys_at, values_at = memory.queries, memory.keys, memory.values
    staged_at, scores_at, states_at = memory.staged, memory.scores, memory.states
    spans_at, saved_at = memory.spans, memory.saved
    read_values = _make_read_values(products.read_values, is_latent=rope_dim > 0)
    multiply_keys = _by_width(products.multiply_keys, products.multiply_keys_narrow)
    multiply_values = _by_width(products.multiply_values, products.multiply_values_narrow)
    begin_products, end_products = products.begin, products.end
    begin_queries = _make_begin_queries(dtype, head_dim, group, rope_dim, as_pairs=as_pairs)
    # Of latents, values are read from where the keys were copied to: as rows of float32 they are there already.
    is_latent, values_in_keys = rope_dim > 0, rope_dim > 0 and not as_pairs
    if values_in_keys:
        values_at = keys_at
    end_queries = _make_end_queries(dtype, head_dim, group)
    soften = make_soften(head_dim, as_pairs=as_pairs)

    @njit
    def begin_rows(a: Any, first_row: int, last_row: int, head: int, begun: bool, v_scale: float, memory: int) -> int:
        """Prepares all queries of the tile. Returns the highest limit."""
        spans, end = int_pointer(memory + spans_at), int64(0)
        for i in range((last_row - first_row + QUERIES - 1) // QUERIES * 2):
            lowest, highest = begin_queries(
                a,
                first_row + i * LANES,
                last_row,
                head,
                begun,
                v_scale,
                memory + queries_at + i // 2 * queries_bytes + i % 2 * _LINE,
                memory + states_at + i * STATE_BYTES,
                memory + i // 2 * sums_bytes + i % 2 * _LINE,
                memory + staged_at,
            )
            spans[2 * i], spans[2 * i + 1] = lowest, highest
            end = max(end, highest)
        return end

    @njit
    def attend_chunk(
        pair: int, first: int, count: int, keys: int, values: int, window: int, scale: Any, cap: Any, memory: int
    ) -> None:
        """Attends with 32 queries to some keys, from `first` on."""
        scores, sums = memory + scores_at, memory + pair * sums_bytes
        rounded = (count + key_step - 1) // key_step * key_step
        is_narrow = is_latent and int_pointer(memory + spans_at + (2 * pair + 1) * 8)[1] == 0
        multiply_keys(keys, memory + queries_at + pair * queries_bytes, scores, rounded, is_narrow)
        for half in range(2):
            i = 2 * pair + half
            spans = int_pointer(memory + spans_at + i * 8)
            lowest, highest = int64(spans[0]), int64(spans[1])
            if highest == 0:
                continue
            state, of_scores = memory + states_at + i * STATE_BYTES, scores + half * _LINE
            limits = load_floats(state + LIMITS)
            if capped:
                cap_scores(of_scores, rounded, scale, cap)
            hide(of_scores, lowest, first + rounded, first, limits)
            if window != 0:
                hide_outside_window(of_scores, rounded, first, limits, highest, window)
            soften(of_scores, rounded, spread(float32(1)) if capped else scale, state, sums + half * _LINE)
        multiply_values(values, scores, sums, rounded, is_narrow)

    @njit
    def attend_segment(num_pairs: int, first: int, count: int, window: int, scale: Any, cap: Any, memory: int) -> None:
        for pair in range(num_pairs):
            spans = int_pointer(memory + spans_at + pair * 16)
            begin, end = int64(0), min(count, int64(max(spans[1], spans[3])) - first)
            if window != 0:
                begin = max(int64(0), int64(min(spans[0], spans[2])) - window - first) // _CHUNK * _CHUNK
            for k in range(begin, end, _CHUNK):
                keys, values = memory + keys_at + k * row_bytes, memory + values_at + k * row_bytes
                attend_chunk(pair, first + k, min(_CHUNK, end - k), keys, values, window, scale, cap, memory)

    @njit
    def work(a: Any, item: int, thread: int) -> None:
        kv_heads, cap = a[arg.kv_heads], spread(float32(float64_of(a[arg.cap])))
        num_tiles = a[NUM_ITEMS] // kv_heads
        tile, head = num_tiles - 1 - item // kv_heads, item % kv_heads  # a row's last tokens, which see most, first
        k_scale, v_scale = static_scales(a, head)
        scale = spread(float32(float64_of(a[arg.scale])) * k_scale)
        starts = int_pointer(a[arg.starts])
        first_row, last_row = int64(starts[tile]) * group, int64(starts[tile + 1]) * group
        num_pairs = (last_row - first_row + QUERIES - 1) // QUERIES
        table = int_pointer(a[arg.tables] + int64(int_pointer(a[arg.rows])[tile]) * a[arg.table_width] * 4)
        begin = int64(int_pointer(a[arg.first_keys])[tile])
        keys = a[arg.pool] + head * a[arg.head_stride] * size
        memory = a[arg.scratch] + thread * thread_bytes
        end = begin_rows(a, first_row, last_row, head, a[arg.begun] != 0 and begin > 0, v_scale, memory)
        begin_products(memory + saved_at, a[arg.config])
        for first in range(begin, end, segment):
            count = min(segment, end - first)
            read_rows(keys, a[arg.block_stride], table, first, count, memory + keys_at)
            place = (keys + plane_bytes, a[arg.block_stride], table, first, count)
            read_values(place, memory + keys_at, memory + staged_at, memory + values_at)
            attend_segment(num_pairs, first, count, a[arg.window], scale, cap, memory)
        end_products(memory + saved_at, a[arg.config])
        for i in range((last_row - first_row + LANES - 1) // LANES):
            end_queries(
                a,
                first_row + i * LANES,
                last_row,
                head,
                v_scale,
                memory + states_at + i * STATE_BYTES,
                memory + i // 2 * sums_bytes + i % 2 * _LINE,
                memory + staged_at,
            )

    return work


def _make_static_scales(form: KvForm) -> Any:
    """Makes a function that returns a head's static scales of K and of V, or 1."""
    arg, is_static = _ARG, form is KvForm.FP8_STATIC

    @njit
    def static_scales(a: Any, head: int) -> tuple[float, float]:
        if not is_static:
            return float32(1), float32(1)
        scales = float_pointer(a[arg.kv_scales])
        return scales[head], scales[a[arg.kv_heads] + head]

    return static_scales


def _make_read_values(read: Any, *, is_latent: bool) -> Any:
    """Makes a function of the place of values in the pool (see `make_read_rows`), and of the addresses of the segment's
    keys, of room, and of the values that it writes. Of latents it takes the values from the keys.
    """

    @njit
    def read_values(place: Any, keys: int, room: int, values: int) -> None:
        pool, block_stride, table, first, count = place
        if is_latent:
            read(keys, count, values)
        else:
            read(pool, block_stride, table, first, count, room, values)

    return read_values


def _by_width(wide: Any, narrow: Any) -> Any:
    """Makes a function of both products, whose last argument is True for the narrow one, if there is one."""
    has_narrow, of_narrow = narrow is not None, narrow or wide

    @njit
    def multiply(a: int, b: int, c: int, count: int, is_narrow: bool) -> None:
        if has_narrow and is_narrow:
            of_narrow(a, b, c, count)
        else:
            wide(a, b, c, count)

    return multiply


def _make_begin_queries(dtype: str, head_dim: int, group: int, rope_dim: int, *, as_pairs: bool) -> Any:
    arg, element, depth = _ARG, ELEMENTS[dtype], padded(head_dim)
    read_words, read_floats = (
        make_read(element, head_dim, as_pairs=as_pairs),
        make_read(element, head_dim, as_pairs=False),
    )
    read_rope, word_size = make_read(element, rope_dim, as_pairs=as_pairs), 2 if as_pairs else 4
    size, row_bytes = element.size, padded(head_dim + rope_dim) * word_size

    @njit(error_model="numpy")
    def begin_queries(
        a: Any,
        row: int,
        last_row: int,
        head: int,
        begun: bool,
        value_scale: float,
        queries: int,
        state: int,
        sums: int,
        staged: int,
    ) -> tuple[int, int]:
        """Prepares 16 queries from `row` on. Returns their lowest and highest limit; (.., 0): there are no queries.

        Sums are smaller than results by the value scale.
        """
        tokens, limits, kv_heads = int_pointer(a[arg.tokens]), int_pointer(a[arg.limits]), a[arg.kv_heads]
        lowest, highest = int64(1 << 30), int64(0)
        clear(staged, LANES * row_bytes)
        for lane in range(LANES):
            own = min(row + lane, last_row - 1)
            limit = int64(limits[own // group])
            float_pointer(state + LIMITS)[lane] = float32(limit)
            lowest, highest = min(lowest, limit), max(highest, limit)
            if row + lane < last_row:
                at = int64(tokens[own // group]) * a[arg.q_stride] + (head * group + own % group) * head_dim
                read_words(a[arg.q] + at * size, staged + lane * row_bytes)
                if rope_dim > 0:
                    at = int64(tokens[own // group]) * a[arg.rope_stride] + own % group * rope_dim
                    read_rope(a[arg.rope] + at * size, staged + lane * row_bytes + head_dim * word_size)
        for line in range(0, row_bytes, _LINE):
            transpose(staged + line, row_bytes, queries + line // 4 * _ROW_BYTES, _ROW_BYTES)
        for d in range(depth):
            store_floats(sums + d * _ROW_BYTES, spread(float32(0)))
        store_floats(state, spread(LOWEST))
        store_floats(state + TOTAL, spread(float32(0)))
        if a[arg.sinks] != 0 and not begun:
            for lane in range(LANES):
                sink = float_pointer(a[arg.sinks])[head * group + (row + lane) % group] * float32(LOG2_E)
                float_pointer(state)[lane] = max(sink, LOWEST)
                float_pointer(state + TOTAL)[lane] = float32(1)
        if begun:
            clear(staged, LANES * depth * 4)
            for lane in range(min(LANES, last_row - row)):
                own = row + lane
                query = (int64(tokens[own // group]) * kv_heads + head) * group + own % group
                read_floats(a[arg.out] + query * head_dim * size, staged + lane * depth * 4)
                float_pointer(state)[lane] = float_pointer(a[arg.lse])[query] * float32(LOG2_E)
                float_pointer(state + TOTAL)[lane] = float32(1)
            for at in range(staged, staged + LANES * depth * 4, _LINE):
                store_floats(at, load_floats(at) * spread(float32(1) / value_scale))
            for d in range(0, depth, LANES):
                transpose(staged + d * 4, depth * 4, sums + d * _ROW_BYTES, _ROW_BYTES)
        return lowest, highest if row < last_row else int64(0)

    return begin_queries


def _make_end_queries(dtype: str, head_dim: int, group: int) -> Any:
    arg, element, depth = _ARG, ELEMENTS[dtype], padded(head_dim)
    write, size = make_write(element, head_dim), element.size

    @njit(error_model="numpy")
    def end_queries(
        a: Any, row: int, last_row: int, head: int, value_scale: float, state: int, sums: int, staged: int
    ) -> None:
        tokens, kv_heads = int_pointer(a[arg.tokens]), a[arg.kv_heads]
        factor = divide(spread(value_scale), load_floats(state + TOTAL))
        for d in range(depth):
            store_floats(sums + d * _ROW_BYTES, load_floats(sums + d * _ROW_BYTES) * factor)
        for d in range(0, depth, LANES):
            transpose(sums + d * _ROW_BYTES, _ROW_BYTES, staged + d * 4, depth * 4)
        for lane in range(min(LANES, last_row - row)):
            own = row + lane
            query = (int64(tokens[own // group]) * kv_heads + head) * group + own % group
            write(staged + lane * depth * 4, a[arg.out] + query * head_dim * size)
            top, total = float_pointer(state)[lane], float_pointer(state + TOTAL)[lane]
            float_pointer(a[arg.lse])[query] = (top + math.log2(total)) * float32(_LN_2)

    return end_queries
