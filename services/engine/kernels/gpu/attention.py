# mypy: disable-error-code="no-untyped-def"
# A kernel has no Python types.
"""Paged attention in Triton: one kernel for decode, prefill and shared prefixes, driven by work items.

An item is a stretch of one row's keys and the query tokens (entries) that attend to it:

    items    int32[1 + N, 6]   row 0: N; then for each item: first entry, number of entries, where its row begins in
                               `tables`, first key, end key, the number of its split
    tokens   int32[M]          for each entry, the index of its token in the step
    limits   int32[M]          the entry sees keys below this one; with a window, the last ones of these
    partials int32[M]          below 0: the item answers the entry alone; else the first of the entry's partial outputs

All query heads of a KV head are rows of one tile, so K and V are read once for them. Items that share an entry write a
float32 output and a log-sum-exp to a place of their own (split KV: flash-decoding, Dao et al. 2023; shared prefixes:
cascade, Ye et al. 2025, arXiv 2501.01005), and `merge_partials` merges these. All data that changes from step to
step is in device memory: a launch depends only on its grid. The softmax is the online one of FlashAttention-2 (Dao
2023, arXiv 2307.08691), in powers of two.
"""

import triton
import triton.language as tl

from services.engine.kernels.gpu.casts import PAIR_SCALE, cast, split_pairs

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def load_item(items, item, tables):
    """Loads an item: its first entry, their number, its row's blocks, its first and its end key, and its split."""
    fields = items + (1 + item) * 6
    first_entry, num_entries = tl.load(fields), tl.load(fields + 1)
    table = tables + tl.load(fields + 2)
    return first_entry, num_entries, table, tl.load(fields + 3), tl.load(fields + 4), tl.load(fields + 5)


@triton.jit
def load_entries(tokens, limits, partials, entries, present):
    """Loads the token, the limit and the partial output of each row's entry; -1 as the latter where there is none."""
    token = tl.load(tokens + entries, mask=present, other=0).to(tl.int64)
    limit = tl.load(limits + entries, mask=present, other=0)
    return token, limit, tl.load(partials + entries, mask=present, other=-1)


@triton.jit
def load_keys(pointers, present, DIMS: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr):
    """Loads K or V of a tile, with zeros for missing keys: their memory may hold NaN, and 0 * NaN is NaN."""
    dims = tl.arange(0, DIMS)
    if MASKED:
        return tl.load(pointers, mask=present[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    if DIMS != HEAD_DIM:
        return tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def _capped(scores, cap):
    """Returns cap * tanh(scores / cap), in powers of two as both are."""
    return cap - 2 * cap / (1 + tl.math.exp2(tl.minimum(scores * (2 / LN2 / cap), 126.0)))


@triton.jit
def _begin(sinks, at, counted, ROWS: tl.constexpr):
    """Returns the top and total of rows that have seen no key. `merge_partials` counts the sinks of partial outputs."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        top = tl.load(sinks + at, mask=counted, other=float("-inf")) / LN2
        total = tl.where(counted, 1.0, 0.0)
    return top, total


@triton.jit
def _attend_keys(
    acc,  # float32[ROWS, DIMS], not yet divided by `total`
    top,  # float32[ROWS]: the highest score so far, times log2(e)
    total,  # float32[ROWS]: the sum of 2 ** (score - top)
    q,
    head,  # K of this layer and head in block 0
    table,
    upper,  # int32[ROWS]: a row sees keys below this one
    lower,  # int32[ROWS]: with a window, a row sees keys from this one on
    begin,
    end,
    qk_scale,
    cap,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLICES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Attends to the keys from begin to end. Without a mask, all rows see all of these keys, which fill whole tiles."""
    dims = tl.arange(0, DIMS)
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        present = keys < end
        if MASKED:
            blocks = tl.load(table + (keys // BLOCK_SIZE) * SLICES, mask=present, other=0)
        else:
            blocks = tl.load(table + (keys // BLOCK_SIZE) * SLICES)
        at = blocks.to(tl.int64) * BLOCK_STRIDE + (keys % BLOCK_SIZE) * HEAD_DIM
        pointers = head + (at[:, None] + dims[None, :])
        k = load_keys(pointers, present, DIMS, HEAD_DIM, MASKED)
        scores = tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee") * qk_scale
        if cap is not None:
            scores = _capped(scores, cap)
        p, fade, top, total = weigh(scores, keys, top, total, upper, lower, WINDOW, MASKED)
        v = load_keys(pointers + BLOCK_SIZE * HEAD_DIM, present, DIMS, HEAD_DIM, MASKED)
        acc = tl.dot(p.to(DOT), v.to(DOT), acc * fade[:, None], input_precision="ieee")
    return acc, top, total


@triton.jit
def _attend_pairs(
    accs,  # two of float32[ROWS, PAIRS], not yet divided by `total`: of the first numbers of pairs, and of the second
    top,
    total,
    qs,  # two of [ROWS, PAIRS]
    head,  # int16: K of this layer and head in block 0
    table,
    upper,
    lower,
    begin,
    end,
    qk_scale,
    cap,
    BLOCK_STRIDE: tl.constexpr,  # in pairs
    BLOCK_SIZE: tl.constexpr,
    SLICES: tl.constexpr,
    HEAD_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    DOT: tl.constexpr,
):
    """Attends with a mask as `_attend_keys` does, to K and V in float8, which are read as pairs of numbers.

    The instructions that bring a tile from shared memory to the matrix units move elements of 16 bits; elements of 8
    bits would go one by one. So pairs of them go, and are split in registers just before they are multiplied: the first
    numbers of all pairs by the first ones of the query, and the second ones likewise.
    """
    pairs = tl.arange(0, PAIRS)
    first, second = accs
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        present = keys < end
        blocks = tl.load(table + (keys // BLOCK_SIZE) * SLICES, mask=present, other=0)
        at = blocks.to(tl.int64) * BLOCK_STRIDE + (keys % BLOCK_SIZE) * HEAD_PAIRS
        pointers = head + (at[:, None] + pairs[None, :])
        k_first, k_second = split_pairs(load_keys(pointers, present, PAIRS, HEAD_PAIRS, True))
        scores = tl.dot(qs[0], tl.trans(k_first.to(DOT)), input_precision="ieee")
        scores = tl.dot(qs[1], tl.trans(k_second.to(DOT)), scores, input_precision="ieee") * qk_scale
        if cap is not None:
            scores = _capped(scores, cap)
        p, fade, top, total = weigh(scores, keys, top, total, upper, lower, WINDOW, True)
        v = load_keys(pointers + BLOCK_SIZE * HEAD_PAIRS, present, PAIRS, HEAD_PAIRS, True)
        v_first, v_second = split_pairs(v)
        first = tl.dot(p.to(DOT), v_first.to(DOT), first * fade[:, None], input_precision="ieee")
        second = tl.dot(p.to(DOT), v_second.to(DOT), second * fade[:, None], input_precision="ieee")
    return (first, second), top, total


@triton.jit
def weigh(scores, keys, top, total, upper, lower, WINDOW: tl.constexpr, MASKED: tl.constexpr):
    """Returns the weights of a tile's keys, what all earlier weights are multiplied by, and the new top and total."""
    if MASKED:
        seen = keys[None, :] < upper[:, None]
        if WINDOW:
            seen = seen & (keys[None, :] >= lower[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shift = new_top
    if MASKED:
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # for rows that have seen no key
    p = tl.math.exp2(scores - shift[:, None])
    fade = tl.math.exp2(top - shift)
    return p, fade, new_top, total * fade + tl.sum(p, 1)


@triton.jit(do_not_specialize=["layer"])
def attend_items(
    q,  # [T, HEADS, HEAD_DIM], tokens q_stride elements apart
    out,  # [T, HEADS, HEAD_DIM]
    lse,  # float32[T, HEADS]
    partial_out,  # float32[P, HEADS, HEAD_DIM]
    partial_lse,  # float32[P, HEADS]
    pool,  # [num_blocks, KV_HEADS, LAYERS, 2, BLOCK_SIZE, HEAD_DIM]
    items,
    tokens,
    limits,
    partials,
    tables,  # int32, rows of block numbers, from this slice's first one on
    scales,  # float32[LAYERS, 2, KV_HEADS], for K and V; None: no scales
    sinks,  # float32[LAYERS, HEADS]: one more score of each query, of a key without a value; None: there are none
    layer,
    q_stride,
    qk_scale,  # the scale of scores times log2(e)
    cap,  # the soft cap of scores times log2(e); None: there is none
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLICES: tl.constexpr,  # entries of a block in the tables; the pool has the layers of one
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,  # HEAD_DIM up to a power of two
    ROWS: tl.constexpr,  # rows of a tile: a power of two, at least an item's entries times HEADS // KV_HEADS
    KEYS: tl.constexpr,  # keys of a tile
    WINDOW: tl.constexpr,  # 0: none
    UNMASKED: tl.constexpr,  # attend to keys that all rows see in a loop of their own
    IN_PAIRS: tl.constexpr,  # the pool's elements are int16, each two of float8; not with UNMASKED
    DOT: tl.constexpr,
):
    """Runs items. Grid: (programs, KV_HEADS), with any number of programs."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PLANE: tl.constexpr = BLOCK_SIZE * HEAD_DIM // (2 if IN_PAIRS else 1)
    BLOCK_STRIDE: tl.constexpr = KV_HEADS * LAYERS * 2 * PLANE
    kv_head = tl.program_id(1)
    head = pool + (kv_head.to(tl.int64) * LAYERS + layer) * (2 * PLANE)
    v_scale = 1.0
    if scales is not None:
        qk_scale *= tl.load(scales + layer * (2 * KV_HEADS) + kv_head)
        v_scale = tl.load(scales + layer * (2 * KV_HEADS) + KV_HEADS + kv_head)
    if IN_PAIRS:
        qk_scale *= PAIR_SCALE
        v_scale *= PAIR_SCALE
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    heads = kv_head * GROUP + rows % GROUP
    for item in range(tl.program_id(0), tl.load(items), tl.num_programs(0)):
        first_entry, num_entries, table, first_key, end_key, split = load_item(items, item, tables)
        present = rows < num_entries * GROUP
        entries = first_entry + rows // GROUP
        token, limit, partial = load_entries(tokens, limits, partials, entries, present)
        inside = present[:, None] & (dims < HEAD_DIM)[None, :]
        queries = q + (token * q_stride + heads * HEAD_DIM)[:, None] + dims[None, :]
        query = tl.load(queries, mask=inside, other=0.0).to(DOT)

        acc = tl.zeros([ROWS, DIMS], tl.float32)
        top, total = _begin(sinks, layer * HEADS + heads, present & (partial < 0), ROWS)
        upper = tl.minimum(limit, end_key)
        lower = limit - WINDOW
        begin = first_key
        if UNMASKED:
            if WINDOW:
                # Keys before this edge lie outside some row's window.
                edge = tl.max(tl.where(present, lower, 0)) - first_key
                begin = first_key + tl.maximum(edge + KEYS - 1, 0) // KEYS * KEYS
                begin = tl.minimum(begin, end_key)
                acc, top, total = _attend_keys(
                    acc, top, total, query, head, table, upper, lower, first_key, begin, qk_scale, cap,
                    BLOCK_STRIDE, BLOCK_SIZE, SLICES, HEAD_DIM, DIMS, KEYS, WINDOW, True, DOT,
                )  # fmt: skip
            all_see = tl.min(tl.where(present, upper, end_key))
            middle = begin + tl.maximum(all_see - begin, 0) // KEYS * KEYS
            acc, top, total = _attend_keys(
                acc, top, total, query, head, table, upper, lower, begin, middle, qk_scale, cap,
                BLOCK_STRIDE, BLOCK_SIZE, SLICES, HEAD_DIM, DIMS, KEYS, WINDOW, False, DOT,
            )  # fmt: skip
            begin = middle
        if IN_PAIRS:
            halves = tl.split(tl.reshape(query, [ROWS, DIMS // 2, 2]))
            zeros = tl.zeros([ROWS, DIMS // 2], tl.float32)
            accs, top, total = _attend_pairs(
                (zeros, zeros), top, total, halves, head, table, upper, lower, begin, end_key, qk_scale, cap,
                BLOCK_STRIDE, BLOCK_SIZE, SLICES, HEAD_DIM // 2, DIMS // 2, KEYS, WINDOW, DOT,
            )  # fmt: skip
            acc = tl.interleave(accs[0], accs[1])
        else:
            acc, top, total = _attend_keys(
                acc, top, total, query, head, table, upper, lower, begin, end_key, qk_scale, cap,
                BLOCK_STRIDE, BLOCK_SIZE, SLICES, HEAD_DIM, DIMS, KEYS, WINDOW, True, DOT,
            )  # fmt: skip

        found = total > 0
        result = acc * (v_scale / tl.where(found, total, 1.0))[:, None]
        score = tl.where(found, (top + tl.math.log2(tl.where(found, total, 1.0))) * LN2, float("-inf"))
        alone = partial < 0
        at = token * HEADS + heads
        tl.store(lse + at, score, mask=present & alone)
        tl.store(
            out + (at * HEAD_DIM)[:, None] + dims[None, :],
            cast(result, out.dtype.element_ty),
            mask=inside & alone[:, None],
        )
        place = (partial + split).to(tl.int64) * HEADS + heads
        tl.store(partial_lse + place, score, mask=present & (partial >= 0))
        tl.store(
            partial_out + (place * HEAD_DIM)[:, None] + dims[None, :],
            result,
            mask=inside & (partial >= 0)[:, None],
        )


@triton.jit(do_not_specialize=["layer"])
def merge_partials(
    out,  # [T, HEADS, HEAD_DIM]
    lse,  # float32[T, HEADS]
    partial_out,  # float32[P, HEADS, HEAD_DIM]
    partial_lse,  # float32[P, HEADS]
    merges,  # int32[grid, 3]: token, first partial output, end of them; none: the output stays
    sinks,  # float32[LAYERS, HEADS]; None: there are none
    layer,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PARTIALS: tl.constexpr,  # partial outputs that are read at once
):
    """Merges one token's partial outputs of one head, weighted by their log-sum-exps. Grid: (merges, HEADS)."""
    fields = merges + tl.program_id(0) * 3
    token = tl.load(fields).to(tl.int64)
    first = tl.load(fields + 1)
    end = tl.load(fields + 2)
    head = tl.program_id(1)
    dims = tl.arange(0, DIMS)
    acc = tl.zeros([DIMS], tl.float32)
    top = float("-inf")
    total = 0.0
    if sinks is not None:
        top = tl.load(sinks + layer * HEADS + head)
        total = 1.0
    for start in range(first, end, PARTIALS):
        places = start + tl.arange(0, PARTIALS)
        present = places < end
        at = places.to(tl.int64) * HEADS + head
        scores = tl.load(partial_lse + at, mask=present, other=float("-inf"))
        inside = present[:, None] & (dims < HEAD_DIM)[None, :]
        parts = tl.load(partial_out + (at * HEAD_DIM)[:, None] + dims[None, :], mask=inside, other=0.0)
        new_top = tl.maximum(top, tl.max(scores, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(scores - shift)
        fade = tl.exp(top - shift)
        acc = acc * fade + tl.sum(parts * weights[:, None], 0)
        total = total * fade + tl.sum(weights, 0)
        top = new_top
    if end > first:
        found = total > 0
        at = token * HEADS + head
        whole = acc / tl.where(found, total, 1.0)
        tl.store(lse + at, tl.where(found, top + tl.log(tl.where(found, total, 1.0)), float("-inf")))
        tl.store(out + at * HEAD_DIM + dims, cast(whole, out.dtype.element_ty), mask=dims < HEAD_DIM)
