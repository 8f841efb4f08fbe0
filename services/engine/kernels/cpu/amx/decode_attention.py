"""Attention of single tokens over paged KV in bfloat16, by AMX: computes what `decode_attention` does, in less time.

All query heads of a KV head are computed together; they fill only some of a tile's 16 rows or columns. Keys and values
are read in the pool, 16 at a time:

    scores  [keys, heads]   = K [keys, head_dim] x Q^T [head_dim, heads]      float32
    weights [heads, keys]   = exp2(scores - reference)^T                      bfloat16
    sums    [heads, head_dim] += weights x V [keys, head_dim]                 float32, `decode_sums`

The scores of 16 keys are computed before the values of the 16 before them are added, so that the processor has work
while it waits for keys. The reference of a head is a score near its highest, as in `tile_softmax`.
"""

import math
from typing import Any

from numba import float32, int64

from services.engine.kernels.cpu.amx import tiles as amx
from services.engine.kernels.cpu.amx.decode_sums import Sums, make_add_values, make_get, make_put
from services.engine.kernels.cpu.decode_attention import PLACES, DecodeAttention
from services.engine.kernels.cpu.decode_rows import make_key_at
from services.engine.kernels.cpu.decode_softmax import hide
from services.engine.kernels.cpu.exponential import LOG2_E, capped_score, exp2, exp2_for_bfloat16
from services.engine.kernels.cpu.head_rows import clear
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
from services.engine.kernels.cpu.per_item import NUM_ITEMS, per_item
from services.engine.kernels.cpu.tile_softmax import GROWTH, LOWEST
from services.engine.kernels.cpu.vectors import (
    LANES,
    any_above,
    highest_lane,
    larger_of,
    load_floats,
    multiply_add,
    round_half_even,
    round_half_up,
    spread,
    store_floats,
    store_pairs,
    sum_of_lanes,
    transpose_quads,
)

MAX_GROUP = LANES
_load_5, _load_6 = amx.load[5:7]
_store_4, _zero_4, _add_5_6_to_4 = amx.store[4], amx.zero[4], amx.add_product(4, 5, 6)
_KEYS = 16  # of a tile

# The processor's own prefetcher follows addresses in order within a page of 4 KB, if it sees the first few. So the
# kernel prefetches the beginning of keys this far ahead, of this item or the next. Values lie behind their keys: where
# a page holds both, the prefetcher goes on to them. Where a block's keys fill a page or more, the kernel prefetches the
# values when it has read their keys. On a Xeon, 64 rows of 600 tokens with heads of 64 took 2 % longer with beginnings
# of 512 bytes, 5 % with whole keys, 17 % with keys and values; heads of 128 took 8 % less with prefetched values.
_AHEAD, _BEGINNING = 2 * _KEYS, 1024  # keys, bytes
_LINE, _TILE_BYTES, _PAGE_BYTES = 64, 1024, 4096
_LN_2 = math.log(2)


class AmxDecodeAttention(DecodeAttention):
    """`DecodeAttention` in bfloat16 by AMX.

    head_dim: a multiple of 32. block_size: a multiple of 16. group: up to MAX_GROUP.
    """

    def __init__(self, dtype: str, head_dim: int, group: int, block_size: int, *, capped: bool = False) -> None:
        assert dtype == "bfloat16"
        self.config = amx.tile_config()
        self.scratch_bytes = _Memory(head_dim, group).bytes
        self.kernel = _make_kernel(head_dim, group, block_size, capped=capped)


class _Memory:
    """The layout of a thread's memory: offsets in bytes."""

    def __init__(self, head_dim: int, group: int) -> None:
        self.q = 0
        self.raw = self.q + head_dim // 32 * _TILE_BYTES  # scores of 16 keys and of the 16 after them, [keys, heads]
        self.scores = self.raw + 2 * _TILE_BYTES  # [heads, keys]
        self.sums = Sums(head_dim, group, self.scores + _TILE_BYTES)
        self.totals = self.sums.end
        self.references = self.totals + LANES * _LINE
        self.last = self.references + _LINE  # values of the row's last keys
        self.saved = self.last + _KEYS * head_dim * 2  # the tile configuration of other code on this thread
        self.bytes = self.saved + _LINE


@per_item
def _make_kernel(head_dim: int, group: int, block_size: int, *, capped: bool) -> Any:
    """Makes the kernel for one query token in each of R rows. Its arguments are those of
    `decode_attention._make_kernel`.
    """
    arg, plane_bytes = PLACES, block_size * head_dim * 2
    memory = _Memory(head_dim, group)
    raw_at, saved_at, thread_bytes = memory.raw, memory.saved, memory.bytes
    key_at = make_key_at(head_dim * 2, block_size)
    score = _make_score(head_dim, block_size, memory)
    soften = _make_soften(head_dim, group, memory, capped=capped)
    get_sums, put_sums, add_values = make_get(memory.sums), make_put(memory.sums), make_add_values(memory.sums)
    last_values = _make_last_values(head_dim, memory)
    begin_heads = _make_begin_heads(head_dim, group, memory)
    end_heads = _make_end_heads(head_dim, group, memory)

    @njit
    def prefetch_keys(a: Any, item: int, number: int) -> None:
        """Prefetches the beginning of 16 keys of an item: those `number` keys after its first 16, or its last."""
        row, head = item // a[arg.kv_heads], item % a[arg.kv_heads]
        pool = a[arg.pool] + head * a[arg.head_stride] * 2
        table = int_pointer(a[arg.tables] + row * a[arg.table_width] * 4)
        first, length = int64(int_pointer(a[arg.first_keys])[row]), int64(int_pointer(a[arg.seq_lens])[row])
        k = min(first // _KEYS * _KEYS + number, (length - 1) // _KEYS * _KEYS)
        keys = key_at(pool, a[arg.block_stride] * 2, table, k)
        for line in range(0, _BEGINNING, _LINE):
            prefetch_far(keys + line)

    @njit
    def attend(raw: int, keys: int, begin: int, end: int, scale: float, cap: float, memory: int) -> None:
        """Adds the values of 16 keys by their scores. Keys before `begin` and from `end` on are hidden."""
        soften(raw, begin, end, scale, cap, memory)
        values = keys + plane_bytes
        if end < _KEYS:
            values = last_values(values, end, memory)
        add_values(values, memory)

    @njit(error_model="numpy")
    def work(a: Any, item: int, thread: int) -> None:
        kv_heads, scale = a[arg.kv_heads], float32(float64_of(a[arg.scale]))
        cap = float32(float64_of(a[arg.cap]))
        row, head = item // kv_heads, item % kv_heads
        first_key, length = int64(int_pointer(a[arg.first_keys])[row]), int64(int_pointer(a[arg.seq_lens])[row])
        token = int64(int_pointer(a[arg.tokens])[row])
        pool = a[arg.pool] + head * a[arg.head_stride] * 2
        table = int_pointer(a[arg.tables] + row * a[arg.table_width] * 4)

        memory = a[arg.scratch] + thread * thread_bytes
        raw, other_raw, saved = memory + raw_at, memory + raw_at + _TILE_BYTES, memory + saved_at
        begin_heads(a, token, head, a[arg.begun] != 0 and first_key > 0, memory)
        amx.save_config(saved)
        amx.load_config(a[arg.config])
        get_sums(memory)
        start, earlier = first_key // _KEYS * _KEYS, int64(0)
        for k in range(start, length, _KEYS):
            keys = key_at(pool, a[arg.block_stride] * 2, table, k)
            if k + _AHEAD < length:
                prefetch_keys(a, item, k - start + _AHEAD)
            else:  # most often the thread takes the next item too
                prefetch_keys(a, min(item + 1, a[NUM_ITEMS] - 1), (k - start) % _AHEAD)
            score(keys, raw, memory)
            if k > start:
                attend(other_raw, earlier, first_key - k + _KEYS, length - k + _KEYS, scale, cap, memory)
            raw, other_raw, earlier = other_raw, raw, keys
        last = (length - 1) // _KEYS * _KEYS
        attend(other_raw, earlier, first_key - last, length - last, scale, cap, memory)
        put_sums(memory)
        amx.load_config(saved)
        end_heads(a, token, head, memory)

    return work


def _make_score(head_dim: int, block_size: int, memory: _Memory) -> Any:
    num_steps, row_bytes, q_at, plane_bytes = head_dim // 32, head_dim * 2, memory.q, block_size * head_dim * 2

    @njit
    def score(keys: int, raw: int, memory: int) -> None:
        """Multiplies 16 keys by the queries."""
        _zero_4()
        for step in range(num_steps):
            _load_5(keys + step * _LINE, row_bytes)
            _load_6(memory + q_at + step * _TILE_BYTES, _LINE)
            _add_5_6_to_4()
        _store_4(raw, _LINE)
        if plane_bytes >= _PAGE_BYTES:
            for line in range(0, _KEYS * row_bytes, _LINE):
                prefetch_far(keys + plane_bytes + line)

    return score


def _make_soften(head_dim: int, group: int, memory: _Memory, *, capped: bool) -> Any:
    scores_at, references_at, totals_at, sums = memory.scores, memory.references, memory.totals, memory.sums
    weights_at, odd_weights, sums_at, odd_sums = sums.weights, sums.odd_weights, sums.sums, sums.odd_sums
    columns = head_dim // 32
    get_sums, put_sums = make_get(sums), make_put(sums)

    @njit
    def take_new_references(scale: float, memory: int) -> None:
        references = float_pointer(memory + references_at)
        for g in range(group):
            own = larger_of(load_floats(memory + scores_at + g * _LINE), spread(LOWEST))  # instead of NaN
            highest = highest_lane(own) * scale
            reference = max(references[g], highest)
            shrink = exp2(spread(references[g] - reference))
            total = memory + totals_at + g * _LINE
            store_floats(total, load_floats(total) * shrink)
            for column in range(columns):
                at = memory + sums_at + column * _TILE_BYTES + g * _LINE
                store_floats(at, load_floats(at) * shrink)
                store_floats(at + odd_sums, load_floats(at + odd_sums) * shrink)
            references[g] = reference

    @njit
    def soften(raw: int, begin: int, end: int, scale: float, cap: float, memory: int) -> None:
        """Writes the weights of 16 keys, and shrinks sums if their references are too low."""
        scores, references = memory + scores_at, float_pointer(memory + references_at)
        for quad in range(0, group, 4):
            transpose_quads(raw + quad * 4, _LINE, scores + quad * _LINE, _LINE)
        if capped:
            for g in range(group):
                at = scores + g * _LINE
                store_floats(at, capped_score(load_floats(at), spread(scale), spread(cap)))
            scale = float32(1)
        if begin > 0 or end < _KEYS:
            for g in range(group):
                hide(scores + g * _LINE, begin, end)
        highest = spread(LOWEST)
        for g in range(group):
            exponent = multiply_add(load_floats(scores + g * _LINE), spread(scale), spread(-references[g]))
            highest = larger_of(exponent, highest)
        if any_above(highest, spread(GROWTH)):
            put_sums(memory)
            take_new_references(scale, memory)
            get_sums(memory)
        for g in range(group):
            exponent = multiply_add(load_floats(scores + g * _LINE), spread(scale), spread(-references[g]))
            weight = exp2_for_bfloat16(exponent)
            total, own = memory + totals_at + g * _LINE, memory + weights_at + g * _LINE
            store_floats(total, load_floats(total) + weight)
            store_pairs(own, round_half_up(weight), spread(float32(0)))
            store_pairs(own + odd_weights, spread(float32(0)), round_half_up(weight))

    return soften


def _make_last_values(head_dim: int, memory: _Memory) -> Any:
    row_bytes, last_at = head_dim * 2, memory.last

    @njit
    def last_values(values: int, count: int, memory: int) -> int:
        """Copies the values of a row's last keys and returns their address. After them come zeros: a block that another
        worker sent may have anything there, and a weight of 0 times NaN is NaN.
        """
        copy = memory + last_at
        for at in range(0, count * row_bytes, _LINE):
            store_floats(copy + at, load_floats(values + at))
        clear(copy + count * row_bytes, (_KEYS - count) * row_bytes)
        return copy

    return last_values


def _make_begin_heads(head_dim: int, group: int, memory: _Memory) -> Any:
    arg, row_bytes, q_at, sums_at, odd_sums = PLACES, head_dim * 2, memory.q, memory.sums.sums, memory.sums.odd_sums
    cleared_at, cleared_bytes = memory.sums.weights, memory.references - memory.sums.weights
    totals_at, references_at = memory.totals, memory.references

    @njit
    def begin_heads(a: Any, token: int, head: int, begun: bool, memory: int) -> None:
        """Writes queries, sums, totals and references.

        The last three are zeros or those of the sinks, or continue the attention over the keys before the first.
        """
        q, references = word_pointer(memory + q_at), float_pointer(memory + references_at)
        first_head = (token * a[arg.kv_heads] + head) * group
        clear(memory + cleared_at, cleared_bytes)
        for g in range(group):
            words = word_pointer(a[arg.q] + (token * a[arg.q_stride] + (head * group + g) * head_dim) * 2)
            for w in range(head_dim // 2):
                q[w * LANES + g] = words[w]
            references[g] = LOWEST
            if a[arg.sinks] != 0 and not begun:
                float_pointer(memory + totals_at + g * _LINE)[0] = float32(1)
                references[g] = max(float_pointer(a[arg.sinks])[head * group + g] * float32(LOG2_E), LOWEST)
            if begun:
                float_pointer(memory + totals_at + g * _LINE)[0] = float32(1)
                references[g] = float_pointer(a[arg.lse])[first_head + g] * float32(LOG2_E)
                before = half_pointer(a[arg.out] + (first_head + g) * row_bytes)
                for d in range(0, head_dim, 2):
                    at = memory + sums_at + d // 32 * _TILE_BYTES + g * _LINE
                    float_pointer(at)[d % 32 // 2] = load_bfloat16(before, d)
                    float_pointer(at + odd_sums)[d % 32 // 2] = load_bfloat16(before, d + 1)

    return begin_heads


def _make_end_heads(head_dim: int, group: int, memory: _Memory) -> Any:
    arg, row_bytes, columns = PLACES, head_dim * 2, head_dim // 32
    sums_at, odd_sums, totals_at, references_at = (
        memory.sums.sums,
        memory.sums.odd_sums,
        memory.totals,
        memory.references,
    )

    @njit(error_model="numpy")
    def end_heads(a: Any, token: int, head: int, memory: int) -> None:
        """Writes the results and their log-sum-exps."""
        first_head = (token * a[arg.kv_heads] + head) * group
        for g in range(group):
            total = sum_of_lanes(load_floats(memory + totals_at + g * _LINE))
            factor = spread(float32(1) / total)
            for column in range(columns):
                at = memory + sums_at + column * _TILE_BYTES + g * _LINE
                even, odd = load_floats(at) * factor, load_floats(at + odd_sums) * factor
                target = a[arg.out] + (first_head + g) * row_bytes + column * _LINE
                store_pairs(target, round_half_even(even), round_half_even(odd))
            reference = float_pointer(memory + references_at)[g]
            float_pointer(a[arg.lse])[first_head + g] = (reference + math.log2(total)) * float32(_LN_2)

    return end_heads
