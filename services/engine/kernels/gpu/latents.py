# mypy: disable-error-code="no-untyped-def"
# A kernel has no Python types.
"""Paged attention over latents in Triton: the absorbed form of `attention.latent_base`, and what writes the latents.

All heads share one row of KV, [latent, k_rope]. A tile of it is read once: the queries, which are over latents too,
meet the whole row, and what they find is a sum of its latents. Work items are those of `kernels.gpu.attention`. A
program has some heads of an item's entries: HEAD_TILE of them, next to each other; all tiles of heads read the same
keys, which are in the cache after the first.
"""

import triton
import triton.language as tl

from services.engine.kernels.gpu.attention import LN2, load_entries, load_item, load_keys, weigh
from services.engine.kernels.gpu.casts import cast, through


@triton.jit
def _attend_latents(
    acc,  # float32[ROWS, RANKS], not yet divided by `total`
    top,  # float32[ROWS]: the highest score so far, times log2(e)
    total,  # float32[ROWS]: the sum of 2 ** (score - top)
    q_latent,  # [ROWS, RANKS]
    q_rope,  # [ROWS, ROPES]
    plane,  # this layer's rows in block 0
    table,
    upper,  # int32[ROWS]: a row sees keys below this one
    begin,
    end,
    qk_scale,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANKS: tl.constexpr,
    ROPES: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Attends to the keys from begin to end. Without a mask, all rows see all of these keys, which fill whole tiles."""
    ranks, ropes = tl.arange(0, RANKS), tl.arange(0, ROPES)
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        present = keys < end
        if MASKED:
            blocks = tl.load(table + keys // BLOCK_SIZE, mask=present, other=0)
        else:
            blocks = tl.load(table + keys // BLOCK_SIZE)
        at = blocks.to(tl.int64) * BLOCK_STRIDE + (keys % BLOCK_SIZE) * (RANK + ROPE)
        latent = load_keys(plane + (at[:, None] + ranks[None, :]), present, RANKS, RANK, MASKED).to(DOT)
        rope = load_keys(plane + (at[:, None] + (RANK + ropes)[None, :]), present, ROPES, ROPE, MASKED).to(DOT)
        scores = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
        scores = tl.dot(q_latent, tl.trans(latent), scores, input_precision="ieee") * qk_scale
        p, fade, top, total = weigh(scores, keys, top, total, upper, 0, 0, MASKED)
        acc = tl.dot(p.to(DOT), latent, acc * fade[:, None], input_precision="ieee")
    return acc, top, total


@triton.jit(do_not_specialize=["layer"])
def attend_latents(
    q_latent,  # [T, HEADS, RANK], with any distance of tokens and heads
    q_rope,  # [T, HEADS, ROPE], a token's heads next to each other
    out,  # [T, HEADS, RANK]
    lse,  # float32[T, HEADS]
    partial_out,  # float32[P, HEADS, RANK]
    partial_lse,  # float32[P, HEADS]
    pool,  # [num_blocks, 1, LAYERS, 1, BLOCK_SIZE, RANK + ROPE]
    items,
    tokens,
    limits,
    partials,
    tables,  # int32, rows of block numbers
    layer,
    latent_stride,  # of a token
    latent_head_stride,
    rope_stride,  # of a token
    qk_scale,  # the scale of scores times log2(e)
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANKS: tl.constexpr,  # RANK up to a power of two
    ROPES: tl.constexpr,  # ROPE up to a power of two
    ROWS: tl.constexpr,  # rows of a tile: a power of two, at least an item's entries times HEAD_TILE
    KEYS: tl.constexpr,  # keys of a tile
    UNMASKED: tl.constexpr,  # attend to keys that all rows see in a loop of their own
    DOT: tl.constexpr,
):
    """Runs items. Grid: (programs, tiles of heads), with any number of programs."""
    PLANE: tl.constexpr = BLOCK_SIZE * (RANK + ROPE)
    plane = pool + layer.to(tl.int64) * PLANE
    rows = tl.arange(0, ROWS)
    ranks, ropes = tl.arange(0, RANKS), tl.arange(0, ROPES)
    heads = tl.program_id(1) * HEAD_TILE + rows % HEAD_TILE
    for item in range(tl.program_id(0), tl.load(items), tl.num_programs(0)):
        first_entry, num_entries, table, first_key, end_key, split = load_item(items, item, tables)
        present = (rows < num_entries * HEAD_TILE) & (heads < HEADS)
        entries = first_entry + rows // HEAD_TILE
        token, limit, partial = load_entries(tokens, limits, partials, entries, present)
        inside = present[:, None] & (ranks < RANK)[None, :]
        at_latent = token * latent_stride + heads.to(tl.int64) * latent_head_stride
        query = tl.load(q_latent + at_latent[:, None] + ranks[None, :], mask=inside, other=0.0).to(DOT)
        with_rope = present[:, None] & (ropes < ROPE)[None, :]
        at_rope = token * rope_stride + heads * ROPE
        turned = tl.load(q_rope + at_rope[:, None] + ropes[None, :], mask=with_rope, other=0.0).to(DOT)

        acc = tl.zeros([ROWS, RANKS], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        upper = tl.minimum(limit, end_key)
        begin = first_key
        if UNMASKED:
            all_see = tl.min(tl.where(present, upper, end_key))
            middle = begin + tl.maximum(all_see - begin, 0) // KEYS * KEYS
            acc, top, total = _attend_latents(
                acc, top, total, query, turned, plane, table, upper, begin, middle, qk_scale,
                LAYERS * PLANE, BLOCK_SIZE, RANK, ROPE, RANKS, ROPES, KEYS, False, DOT,
            )  # fmt: skip
            begin = middle
        acc, top, total = _attend_latents(
            acc, top, total, query, turned, plane, table, upper, begin, end_key, qk_scale,
            LAYERS * PLANE, BLOCK_SIZE, RANK, ROPE, RANKS, ROPES, KEYS, True, DOT,
        )  # fmt: skip

        found = total > 0
        result = acc * (1.0 / tl.where(found, total, 1.0))[:, None]
        score = tl.where(found, (top + tl.math.log2(tl.where(found, total, 1.0))) * LN2, float("-inf"))
        alone = present & (partial < 0)
        at = token * HEADS + heads
        tl.store(lse + at, score, mask=alone)
        tl.store(
            out + (at * RANK)[:, None] + ranks[None, :],
            cast(result, out.dtype.element_ty),
            mask=inside & alone[:, None],
        )
        apart = present & (partial >= 0)
        place = (partial + split).to(tl.int64) * HEADS + heads
        tl.store(partial_lse + place, score, mask=apart)
        tl.store(partial_out + (place * RANK)[:, None] + ranks[None, :], result, mask=inside & apart[:, None])


@triton.jit(do_not_specialize=["layer"])
def store_latents_kernel(
    kv,  # [T, ROPE + RANK], tokens kv_stride elements apart
    cos,  # [T, 1, ROPE]
    sin,  # [T, 1, ROPE]: signed
    weight,  # [RANK]
    pool,  # [num_blocks, 1, LAYERS, 1, BLOCK_SIZE, RANK + ROPE]
    offsets,  # int64[T]: the element at which a token's row in layer 0 begins; -1: it has none
    kv_stride,
    cos_stride,
    sin_stride,
    eps,
    layer,
    PLANE: tl.constexpr,  # elements of a layer in a block
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANKS: tl.constexpr,  # RANK up to a power of two
    HALF: tl.constexpr,  # half of ROPE, up to a power of two
):
    """Norms one token's latent, rotates its k_rope and writes both, in the pool's order. Grid: (T,).

    The norm and the rotation round as those of `rows` and `rotary` do.
    """
    dtype: tl.constexpr = kv.dtype.element_ty
    half: tl.constexpr = ROPE // 2
    token = tl.program_id(0).to(tl.int64)
    # The hint that offsets are multiples of a row permits stores of several elements at once.
    offset = tl.multiple_of(tl.load(offsets + token), (RANK + ROPE) & -(RANK + ROPE))
    if offset >= 0:
        target = pool + offset + layer.to(tl.int64) * PLANE
        ranks, columns = tl.arange(0, RANKS), tl.arange(0, HALF)
        in_rank, in_half = ranks < RANK, columns < half
        latent = tl.load(kv + token * kv_stride + ROPE + ranks, mask=in_rank, other=0).to(tl.float32)
        scale = tl.load(weight + ranks, mask=in_rank, other=0).to(tl.float32)
        root = tl.rsqrt(tl.sum(latent * latent, axis=0) / RANK + eps)
        normed = through(latent * root, weight.dtype.element_ty) * scale
        tl.store(target + ranks, cast(normed, dtype), mask=in_rank)

        cos_at, sin_at = cos + token * cos_stride + columns, sin + token * sin_stride + columns
        low_cos = tl.load(cos_at, mask=in_half, other=0).to(tl.float32)
        high_cos = tl.load(cos_at + half, mask=in_half, other=0).to(tl.float32)
        low_sin = tl.load(sin_at, mask=in_half, other=0).to(tl.float32)
        high_sin = tl.load(sin_at + half, mask=in_half, other=0).to(tl.float32)
        low = tl.load(kv + token * kv_stride + columns, mask=in_half, other=0).to(tl.float32)
        high = tl.load(kv + token * kv_stride + half + columns, mask=in_half, other=0).to(tl.float32)
        new_low = cast(through(low * low_cos, dtype) + high * low_sin, dtype)
        new_high = cast(through(high * high_cos, dtype) + low * high_sin, dtype)
        tl.store(target + RANK + columns, new_low, mask=in_half)
        tl.store(target + RANK + half + columns, new_high, mask=in_half)
