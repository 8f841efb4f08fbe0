"""Rotary position embedding and the KV write, in one kernel that reads and writes its tensors once.

A token's offset, int64, is the element of the pool at which its K of head 0 in layer 0 begins. A padded token has
offset -1: its KV is not written. In a pool [num_blocks, num_kv_heads, num_layers, 2, block_size, D], a token's KV is at

    offset + head * stride_of_a_head + (2 * layer) * block_size * D        K
    offset + head * stride_of_a_head + (2 * layer + 1) * block_size * D    V

Heads of a token are contiguous; tokens may lie apart.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.kernels.gpu.casts import cast, through, to_float8

_TILE = 1024  # elements of a program: 16 bytes of bfloat16 for each thread of 4 warps
_NUM_WARPS = 4


@dataclass(frozen=True, slots=True, eq=False)
class PagedKv:
    """A pool of KV blocks. One of float8_e4m3fn has scales, by which its numbers are multiplied to get K and V."""

    pool: Tensor  # [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim], contiguous
    scales: Tensor | None = None  # float32[num_layers, 2, num_kv_heads], contiguous, K before V

    def __post_init__(self) -> None:
        assert (self.scales is not None) == (self.pool.dtype == torch.float8_e4m3fn)

    @property
    def plane(self) -> int:
        """Returns the elements from a layer's K to its V, and from there to the next layer's K."""
        return self.pool.shape[4] * self.pool.shape[5]


@triton.jit
def _put(
    value: tl.tensor,
    target: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    scales: tl.tensor,
    scale_at: tl.tensor,
) -> None:
    """Writes K or V of heads, [heads, columns], where both masks are set: rows [heads, 1], columns [1, columns]."""
    if scales is not None:
        value = to_float8(value / tl.load(scales + scale_at, mask=rows, other=1))
    else:
        value = cast(value, target.dtype.element_ty)
    tl.store(target, value, mask=rows & columns)


@triton.jit(do_not_specialize=["layer"])
def rotate_kernel(
    heads: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    weight: tl.tensor,
    pool: tl.tensor,
    offsets: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    head_stride: tl.tensor,
    eps: tl.tensor,
    layer: tl.tensor,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PLANE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Rotates the first NUM_Q + NUM_KV heads of a token, after a norm if there is a weight.

    The first NUM_Q heads stay in place. The other rotated ones are K and go to the pool, as do the NUM_KV heads of V
    behind them, unchanged. A norm's weight may be float32, as in `rows.norm_kernel`. A program has HEADS heads of a
    token. HALF: half of head_dim, rounded up to a power of two.

    Of a head, the first ROTARY_DIM numbers turn. Its low numbers are the first half of these, then the first half of
    the others; its high ones are the rest.
    """
    dtype: tl.constexpr = heads.dtype.element_ty
    half_dim: tl.constexpr = HEAD_DIM // 2
    half_rotary: tl.constexpr = ROTARY_DIM // 2
    num_heads: tl.constexpr = NUM_Q + 2 * NUM_KV
    num_blocks: tl.constexpr = (num_heads + HEADS - 1) // HEADS
    token = (tl.program_id(0) // num_blocks).to(tl.int64)
    first_head = tl.program_id(0) % num_blocks * HEADS
    head = (first_head + tl.arange(0, HEADS))[:, None]
    columns = tl.arange(0, HALF)[None, :]
    in_half = columns < half_dim
    mask = (head < num_heads) & in_half
    low_columns, high_columns = columns, columns + half_dim
    if ROTARY_DIM < HEAD_DIM:
        low_columns = tl.where(columns < half_rotary, columns, columns + half_rotary)
        high_columns = tl.where(columns < half_rotary, columns + half_rotary, columns + half_dim)
    turned = columns < half_rotary

    cos_at, sin_at = cos + token * cos_stride + columns, sin + token * sin_stride + columns
    low_cos = tl.load(cos_at, mask=turned, other=0).to(tl.float32)
    high_cos = tl.load(cos_at + half_rotary, mask=turned, other=0).to(tl.float32)
    low_sin = tl.load(sin_at, mask=turned, other=0).to(tl.float32)
    high_sin = tl.load(sin_at + half_rotary, mask=turned, other=0).to(tl.float32)
    if ROTARY_DIM < HEAD_DIM:
        low_cos, high_cos = tl.where(turned, low_cos, 1.0), tl.where(turned, high_cos, 1.0)
    at = heads + token * stride + head * HEAD_DIM
    low_read = tl.load(at + low_columns, mask=mask, other=0).to(tl.float32)
    high_read = tl.load(at + high_columns, mask=mask, other=0).to(tl.float32)
    low, high = low_read, high_read

    if weight is not None:
        has_weight = (head < NUM_Q + NUM_KV) & in_half
        weight_at = weight + head * HEAD_DIM
        low_weight = tl.load(weight_at + low_columns, mask=has_weight, other=0).to(tl.float32)
        high_weight = tl.load(weight_at + high_columns, mask=has_weight, other=0).to(tl.float32)
        squares = tl.sum(low * low + high * high, axis=1)[:, None]
        factor = tl.rsqrt(squares / HEAD_DIM + eps)
        low = through(through(low * factor, weight.dtype.element_ty) * low_weight, dtype)
        high = through(through(high * factor, weight.dtype.element_ty) * high_weight, dtype)
    new_low = cast(through(low * low_cos, dtype) + high * low_sin, dtype)
    new_high = cast(through(high * high_cos, dtype) + low * high_sin, dtype)
    tl.store(at + low_columns, new_low, mask=mask & (head < NUM_Q))
    tl.store(at + high_columns, new_high, mask=mask & (head < NUM_Q))

    if pool is not None:
        # The hint that offsets are multiples of head_dim permits stores of several elements at once.
        offset = tl.multiple_of(tl.load(offsets + token), HEAD_DIM & -HEAD_DIM)
        if (offset >= 0) & (first_head + HEADS > NUM_Q):
            is_v = head >= NUM_Q + NUM_KV
            kv_head = tl.where(is_v, head - NUM_Q - NUM_KV, head - NUM_Q)
            plane = 2 * layer + is_v.to(tl.int32)
            target = pool + offset + kv_head.to(tl.int64) * head_stride + plane.to(tl.int64) * PLANE
            scale_at = plane * NUM_KV + kv_head
            stored = (head >= NUM_Q) & (head < num_heads)
            low = tl.where(is_v, low_read, new_low.to(tl.float32))
            high = tl.where(is_v, high_read, new_high.to(tl.float32))
            _put(low, target + low_columns, stored, in_half, scales, scale_at)
            _put(high, target + high_columns, stored, in_half, scales, scale_at)


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor, weight: Tensor | None, eps: float) -> None:
    """See `Operations.rotate`."""
    num_heads = heads.shape[1]
    _rotate(heads, (cos, signed_sin), weight, eps, num_q=num_heads, num_kv=0, target=None)


def rotate_and_store(
    heads: Tensor,
    rotation: tuple[Tensor, Tensor],
    weight: Tensor | None,
    eps: float,
    *,
    kv: PagedKv,
    layer: int,
    offsets: Tensor,
) -> None:
    """Does `Operations.rotate` to Q and K, and stores K and V. heads: [T, num_heads + 2 * num_kv_heads, head_dim], Q, K
    and V.

    Q is rotated in place. Rotated K and V go to the offsets, int64[T]; K and V in `heads` stay unchanged. rotation: cos
    and signed_sin.
    """
    num_kv = kv.pool.shape[1]
    num_q = heads.shape[1] - 2 * num_kv
    _rotate(heads, rotation, weight, eps, num_q=num_q, num_kv=num_kv, target=(kv, layer, offsets))


def _rotate(
    heads: Tensor,
    rotation: tuple[Tensor, Tensor],
    weight: Tensor | None,
    eps: float,
    *,
    num_q: int,
    num_kv: int,
    target: tuple[PagedKv, int, Tensor] | None,
) -> None:
    num_tokens, num_heads, head_dim = heads.shape
    assert heads.stride(1) == head_dim or num_heads == 1
    cos, sin = rotation
    half = triton.next_power_of_2(head_dim // 2)
    heads_each = min(triton.next_power_of_2(num_heads), max(1, _TILE // half))
    kv, layer, offsets = target or (None, 0, None)
    rotate_kernel[(num_tokens * triton.cdiv(num_heads, heads_each),)](
        heads,
        cos,
        sin,
        weight,
        None if kv is None else kv.pool,
        offsets,
        None if kv is None else kv.scales,
        heads.stride(0),
        cos.stride(0),
        sin.stride(0),
        0 if kv is None else kv.pool.stride(1),
        eps,
        layer,
        NUM_Q=num_q,
        NUM_KV=num_kv,
        HEAD_DIM=head_dim,
        ROTARY_DIM=cos.shape[-1],
        PLANE=0 if kv is None else kv.plane,
        HALF=half,
        HEADS=heads_each,
        num_warps=_NUM_WARPS,
    )


@triton.jit(do_not_specialize=["layer"])
def store_kernel(
    k: tl.tensor,
    v: tl.tensor,
    pool: tl.tensor,
    offsets: tl.tensor,
    scales: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    head_stride: tl.tensor,
    layer: tl.tensor,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PLANE: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Stores K and V. A program has HEADS heads of a token. BLOCK: head_dim, rounded up to a power of two."""
    num_blocks: tl.constexpr = (NUM_KV + HEADS - 1) // HEADS
    token = (tl.program_id(0) // num_blocks).to(tl.int64)
    head = (tl.program_id(0) % num_blocks * HEADS + tl.arange(0, HEADS))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    stored = head < NUM_KV
    in_head = columns < HEAD_DIM
    at = head * HEAD_DIM + columns
    k_value = tl.load(k + token * k_stride + at, mask=stored & in_head, other=0).to(tl.float32)
    v_value = tl.load(v + token * v_stride + at, mask=stored & in_head, other=0).to(tl.float32)
    offset = tl.multiple_of(tl.load(offsets + token), HEAD_DIM & -HEAD_DIM)  # see rotate_kernel
    if offset >= 0:
        plane = (2 * layer).to(tl.int64)
        target = pool + offset + head.to(tl.int64) * head_stride + plane * PLANE + columns
        _put(k_value, target, stored, in_head, scales, plane * NUM_KV + head)
        _put(v_value, target + PLANE, stored, in_head, scales, (plane + 1) * NUM_KV + head)


def store_kv(k: Tensor, v: Tensor, *, kv: PagedKv, layer: int, offsets: Tensor) -> None:
    """Stores k and v [T, num_kv_heads, head_dim] at the offsets, int64[T]."""
    num_tokens, num_heads, head_dim = k.shape
    assert num_heads == 1 or k.stride(1) == v.stride(1) == head_dim
    block = triton.next_power_of_2(head_dim)
    heads_each = min(triton.next_power_of_2(num_heads), max(1, _TILE // block))
    store_kernel[(num_tokens * triton.cdiv(num_heads, heads_each),)](
        k,
        v,
        kv.pool,
        offsets,
        kv.scales,
        k.stride(0),
        v.stride(0),
        kv.pool.stride(1),
        layer,
        NUM_KV=num_heads,
        HEAD_DIM=head_dim,
        PLANE=kv.plane,
        BLOCK=block,
        HEADS=heads_each,
        num_warps=_NUM_WARPS,
    )
