# mypy: disable-error-code="no-untyped-def"
# A kernel has no Python types.
"""Attention of prompts over K and V that were made of latents: the expanded form of `attention.latent_base`, in Triton.

K and V of some heads are there for some rows' keys, and beside them the rows of the pool that they were made of, whose
last ROPE numbers are the part of K that all heads share. An item is a tile of one row's query tokens and a
stretch of its keys:

    items   int32[N, 7]   first token, number of tokens, how many of its row's keys the first token sees, where the
                          row's key 0 would lie among the keys (it may be below 0), first key, end key, whether another
                          item goes on with later keys

A later token sees one key more. Where the keys of a row are made in several pieces, one after the other, an item leaves
its sums behind, in float32, and the item of the next piece begins with them: to the bit as if there were one piece,
since pieces end where tiles of keys do.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.kernels.gpu.attention import load_keys, weigh
from services.engine.kernels.gpu.casts import cast
from services.engine.kernels.gpu.launch import dot_dtype
from services.engine.kernels.gpu.paged_attention import Tile, is_packed, padded


@triton.jit
def _attend_expanded(
    acc,  # float32[TOKENS, VALUES], not yet divided by `total`
    top,
    total,
    q_nope,  # [TOKENS, NOPES]
    q_rope,  # [TOKENS, ROPES]
    k,  # of this head and of key 0 of the row
    v,  # of this head and of key 0 of the row
    ropes,  # k_rope of key 0 of the row
    upper,  # int32[TOKENS]: a token sees keys below this one
    begin,
    end,
    qk_scale,
    key_stride,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    ROW: tl.constexpr,  # numbers from a key's k_rope to the next one's
    NOPES: tl.constexpr,
    ROPES: tl.constexpr,
    VALUES: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Attends to the keys from begin to end. Without a mask, all tokens see all of them, and they fill whole tiles."""
    nope_dims, rope_dims, value_dims = tl.arange(0, NOPES), tl.arange(0, ROPES), tl.arange(0, VALUES)
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        present = keys < end
        at, at_rope = keys.to(tl.int64) * key_stride, keys.to(tl.int64) * ROW
        k_nope = load_keys(k + (at[:, None] + nope_dims[None, :]), present, NOPES, NOPE, MASKED).to(DOT)
        k_rope = load_keys(ropes + (at_rope[:, None] + rope_dims[None, :]), present, ROPES, ROPE, MASKED).to(DOT)
        scores = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
        scores = tl.dot(q_nope, tl.trans(k_nope), scores, input_precision="ieee") * qk_scale
        p, fade, top, total = weigh(scores, keys, top, total, upper, 0, 0, MASKED)
        values = load_keys(v + (at[:, None] + value_dims[None, :]), present, VALUES, VALUE, MASKED).to(DOT)
        acc = tl.dot(p.to(DOT), values, acc * fade[:, None], input_precision="ieee")
    return acc, top, total


@triton.jit(do_not_specialize=["first_head"])
def attend_expanded(
    q_nope,  # [T, all heads, NOPE], a token's heads next to each other
    q_rope,  # [T, all heads, ROPE], a token's heads next to each other
    k,  # [keys, HEADS, NOPE]
    v,  # [keys, HEADS, VALUE]
    rows,  # [keys, RANK + ROPE]
    out,  # [T, all heads, VALUE], a token's heads next to each other
    sums,  # float32[T, HEADS, VALUE]: of items that another one goes on with, not yet divided by their totals
    tops,  # float32[T, HEADS, 2]: their tops and totals
    items,
    first_head,  # of all heads
    nope_stride,  # of a token
    rope_stride,  # of a token
    key_stride,  # of K and of V
    head_stride,  # of K and of V
    out_stride,  # of a token
    qk_scale,  # the scale of scores times log2(e)
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    NOPES: tl.constexpr,  # NOPE up to a power of two
    ROPES: tl.constexpr,
    VALUES: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens of a tile
    KEYS: tl.constexpr,  # keys of a tile
    DOT: tl.constexpr,
):
    """Runs items. Grid: (items, HEADS)."""
    fields = items + tl.program_id(0) * 7
    first_token = tl.load(fields)
    count = tl.load(fields + 1)
    first_limit = tl.load(fields + 2)
    place = tl.load(fields + 3).to(tl.int64)
    first_key = tl.load(fields + 4)
    end_key = tl.load(fields + 5)
    goes_on = tl.load(fields + 6) != 0
    head = tl.program_id(1)

    lines = tl.arange(0, TOKENS)
    present = lines < count
    nope_dims, rope_dims, value_dims = tl.arange(0, NOPES), tl.arange(0, ROPES), tl.arange(0, VALUES)
    token = (first_token + lines).to(tl.int64)
    of_all = (first_head + head).to(tl.int64)
    at_nope = token * nope_stride + of_all * NOPE
    with_nope = present[:, None] & (nope_dims < NOPE)[None, :]
    nope = tl.load(q_nope + at_nope[:, None] + nope_dims[None, :], mask=with_nope, other=0.0).to(DOT)
    at_rope = token * rope_stride + of_all * ROPE
    with_rope = present[:, None] & (rope_dims < ROPE)[None, :]
    rope = tl.load(q_rope + at_rope[:, None] + rope_dims[None, :], mask=with_rope, other=0.0).to(DOT)

    with_value = present[:, None] & (value_dims < VALUE)[None, :]
    at_sums = token * HEADS + head
    begun = present & (first_key > 0)
    at_value = sums + (at_sums * VALUE)[:, None] + value_dims[None, :]
    acc = tl.load(at_value, mask=with_value & (first_key > 0), other=0.0)
    top = tl.load(tops + 2 * at_sums, mask=begun, other=float("-inf"))
    total = tl.load(tops + 2 * at_sums + 1, mask=begun, other=0.0)

    upper = tl.minimum(first_limit + lines, end_key)
    at_keys = place * key_stride + head.to(tl.int64) * head_stride
    of_ropes = rows + place * (RANK + ROPE) + RANK
    all_see = tl.minimum(first_limit, end_key)
    middle = first_key + tl.maximum(all_see - first_key, 0) // KEYS * KEYS
    acc, top, total = _attend_expanded(
        acc, top, total, nope, rope, k + at_keys, v + at_keys, of_ropes, upper, first_key, middle, qk_scale,
        key_stride, NOPE, ROPE, VALUE, RANK + ROPE, NOPES, ROPES, VALUES, KEYS, False, DOT,
    )  # fmt: skip
    acc, top, total = _attend_expanded(
        acc, top, total, nope, rope, k + at_keys, v + at_keys, of_ropes, upper, middle, end_key, qk_scale,
        key_stride, NOPE, ROPE, VALUE, RANK + ROPE, NOPES, ROPES, VALUES, KEYS, True, DOT,
    )  # fmt: skip

    tl.store(at_value, acc, mask=with_value & goes_on)
    tl.store(tops + 2 * at_sums, top, mask=present & goes_on)
    tl.store(tops + 2 * at_sums + 1, total, mask=present & goes_on)
    result = acc * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
    at_out = token * out_stride + of_all * VALUE
    tl.store(
        out + at_out[:, None] + value_dims[None, :],
        cast(result, out.dtype.element_ty),
        mask=with_value & (goes_on == 0),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Sums that items leave for those that go on with later keys; float32, contiguous."""

    sums: Tensor  # [T, heads at a time, value_dim]
    tops: Tensor  # [T, heads at a time, 2]


@dataclass(frozen=True, slots=True, eq=False)
class ExpandedKeys:
    """The keys of a piece: all their K and V of some heads, made of rows of the pool."""

    rows: Tensor  # [keys, kv_rank + rope_dim], contiguous
    k_nope: Tensor  # [keys, heads, nope_dim]
    v: Tensor  # [keys, heads, value_dim], with the strides of k_nope
    heads: range


def expanded_tile(dtype: torch.dtype) -> Tile:
    """Returns a tile that spills no registers with the published sizes, and of which two fit a Hopper's multiprocessor.

    Nobody has timed it.
    """
    if dtype == torch.float32:  # has no matrix instructions; products need registers
        return Tile(32, keys=16, num_warps=8, num_stages=2)
    return Tile(64, keys=32, num_warps=4)


def run_expanded(
    queries: tuple[Tensor, Tensor], keys: ExpandedKeys, out: Tensor, sums: Sums, items: Tensor, scale: float
) -> None:
    """Attends to some heads' keys, in items of `expanded_tile`'s tokens, int32[N, 7].

    queries: q_nope and q_rope of all heads, [T, all heads, nope_dim or rope_dim], out: [T, all heads, value_dim]; a
    token's heads lie next to each other. scale: of attention scores.
    """
    (q_nope, q_rope), k, v, tile = queries, keys.k_nope, keys.v, expanded_tile(out.dtype)
    nope_dim, rope_dim, value_dim = q_nope.shape[2], q_rope.shape[2], out.shape[2]
    assert k.stride() == v.stride(), (k.stride(), v.stride())
    assert k.stride(2) == 1, k.stride()
    assert keys.rows.is_contiguous()
    assert all(map(is_packed, (q_nope, q_rope, out)))
    attend_expanded[(len(items), len(keys.heads))](
        q_nope, q_rope, k, v, keys.rows, out, sums.sums, sums.tops, items, keys.heads.start,
        q_nope.stride(0), q_rope.stride(0), k.stride(0), k.stride(1), out.stride(0), scale * math.log2(math.e),
        HEADS=len(keys.heads), RANK=keys.rows.shape[1] - rope_dim, NOPE=nope_dim, ROPE=rope_dim, VALUE=value_dim,
        NOPES=padded(nope_dim), ROPES=padded(rope_dim), VALUES=padded(value_dim), TOKENS=tile.tokens, KEYS=tile.keys,
        DOT=dot_dtype(out.dtype), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
