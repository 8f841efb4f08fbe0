"""Kernels over rows: norms, activation, quantisation, and the tokens that a step begins with.

Each kernel reads and writes its tensors once, computes in float32 and rounds where `transformers` rounds. The elements
of a row are contiguous; rows may lie apart, except those of new results. Kernels do not depend on the number of rows,
so none is compiled again for another number.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.kernels.gpu.casts import FLOAT8_MAX, INT8_MAX, cast, through, to_float8, to_int8

_TILE = 1024  # elements of a program, at least
_SILU_BLOCK = 2048
_FILL_BLOCK = 256


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x: tl.tensor,
    y: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    y_stride: tl.tensor,
    eps: tl.tensor,
    factor: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Adds y, times the factor if there is one, to x if there is a y, then computes the RMSNorm of x. A program has
    ROWS rows; BLOCK is a power of two.

    With a weight in float32, a row is rounded after it is multiplied by the weight alone.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (columns < WIDTH)
    scale = tl.load(weight + columns, mask=columns < WIDTH, other=0).to(tl.float32)
    value = tl.load(x + rows * x_stride + columns, mask=mask, other=0).to(tl.float32)
    if y is not None:
        more = tl.load(y + rows * y_stride + columns, mask=mask, other=0).to(tl.float32)
        if factor is not None:
            more = through(more * factor, dtype)
        added = value + more
        tl.store(x + rows * x_stride + columns, cast(added, dtype), mask=mask)
        value = through(added, dtype)
    root = tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + eps)[:, None]
    normed = through(value * root, weight.dtype.element_ty) * scale
    tl.store(out + rows * WIDTH + columns, cast(normed, dtype), mask=mask)


def norm_into(x: Tensor, y: Tensor | None, weight: Tensor, eps: float, out: Tensor, factor: float = 1.0) -> None:
    """Writes the RMSNorm of x [T, width] to out. If there is a y, adds it, times the factor, to x first, in place."""
    num_rows, width = x.shape
    block, rows, num_warps = _tile(width)
    norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        y,
        weight,
        out,
        num_rows,
        x.stride(0),
        0 if y is None else y.stride(0),
        eps,
        None if factor == 1 else factor,
        WIDTH=width,
        BLOCK=block,
        ROWS=rows,
        num_warps=num_warps,
    )


@triton.jit(do_not_specialize=["num_rows"])
def add_normed_kernel(
    x: tl.tensor,
    y: tl.tensor,
    weight: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    y_stride: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Adds the RMSNorm of y to x; without x, writes it to y. A program has ROWS rows; BLOCK is a power of two."""
    dtype: tl.constexpr = y.dtype.element_ty
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (columns < WIDTH)
    scale = tl.load(weight + columns, mask=columns < WIDTH, other=0).to(tl.float32)
    value = tl.load(y + rows * y_stride + columns, mask=mask, other=0).to(tl.float32)
    root = tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + eps)[:, None]
    if x is None:
        tl.store(y + rows * y_stride + columns, cast(value * root * scale, dtype), mask=mask)
    else:
        added = tl.load(x + rows * x_stride + columns, mask=mask, other=0).to(tl.float32)
        added += through(value * root * scale, dtype)
        tl.store(x + rows * x_stride + columns, cast(added, dtype), mask=mask)


def add_normed(x: Tensor | None, y: Tensor, weight: Tensor, eps: float) -> None:
    """Adds the RMSNorm of y [T, width] to x, in place; without x, overwrites y with it."""
    num_rows, width = y.shape
    block, rows, num_warps = _tile(width)
    add_normed_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        y,
        weight,
        num_rows,
        0 if x is None else x.stride(0),
        y.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        ROWS=rows,
        num_warps=num_warps,
    )


@triton.jit
def gated_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
) -> None:
    """Computes SiLU(gate) * up, or GELU(gate) * up by tanh. A program has BLOCK elements of a row."""
    dtype: tl.constexpr = gate_up.dtype.element_ty
    num_blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    columns = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate = tl.load(gate_up + row * stride + columns, mask=mask, other=0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + columns, mask=mask, other=0).to(tl.float32)
    inner = gate
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
        inner = tl.maximum(inner, -80.0)  # e ** 80 is finite, and large enough
    activated = through(gate / (1 + tl.exp(-inner)), dtype)
    tl.store(out + row * WIDTH + columns, cast(activated * up, dtype), mask=mask)


def gated_into(gate_up: Tensor, out: Tensor, *, gelu: bool) -> None:
    """Writes SiLU(gate) * up, or GELU(gate) * up by tanh, [T, 2 * width], to out [T, width]."""
    num_rows, width = out.shape
    block = min(_SILU_BLOCK, triton.next_power_of_2(width))
    gated_kernel[(num_rows * triton.cdiv(width, block),)](
        gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=block, GELU=gelu, num_warps=4
    )


@triton.jit(do_not_specialize=["num_rows"])
def quantize_kernel(
    x: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    num_rows: tl.tensor,
    stride: tl.tensor,
    TINY: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Quantises each row to the dtype of `out`, with a scale from its largest magnitude. A program has ROWS rows.

    The scale of a row with NaN or infinities is NaN.
    """
    is_float8: tl.constexpr = out.dtype.element_ty == tl.float8e4nv
    most: tl.constexpr = FLOAT8_MAX if is_float8 else INT8_MAX
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (columns < WIDTH)
    value = tl.load(x + rows * stride + columns, mask=mask, other=0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), axis=1), TINY)[:, None] / most
    scaled = value * (1 / scale)
    codes = to_float8(scaled) if is_float8 else to_int8(scaled)
    tl.store(out + rows * WIDTH + columns, codes, mask=mask)
    scale += tl.sum(value * 0, axis=1)[:, None]
    tl.store(scales + rows, scale, mask=rows < num_rows)


def quantize_rows(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """Returns x [T, width] as float8_e4m3fn or int8 [T, width], and float32 [T, 1], the factor of each row."""
    quantized = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    quantize_rows_into(x, quantized, scales)
    return quantized, scales


def quantize_rows_into(x: Tensor, out: Tensor, scales: Tensor) -> None:
    """Writes the results of `quantize_rows` to out and scales."""
    num_rows, width = x.shape
    block, rows, num_warps = _tile(width)
    quantize_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        out,
        scales,
        num_rows,
        x.stride(0),
        TINY=1e-12,
        WIDTH=width,
        BLOCK=block,
        ROWS=rows,
        num_warps=num_warps,
    )


@triton.jit(do_not_specialize=["count"])
def fill_tokens_kernel(
    ids: tl.tensor, previous: tl.tensor, out: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Does the work of `fill_tokens`. A program has BLOCK tokens."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + at, mask=at < count, other=0)
    sampled = tl.load(previous - 1 - token, mask=(at < count) & (token < 0), other=0)
    sampled = tl.maximum(sampled, 0)
    tl.store(out + at, tl.where(token < 0, sampled, token).to(tl.int64), mask=at < count)


def fill_tokens(ids: Tensor, previous: Tensor) -> Tensor:
    """Returns ids, int32[T], as int64[T]. An entry e < 0 stands for previous[-1 - e], of int32[N].

    Such entries are tokens that the previous step samples, and that the host does not know yet. If that is -1, because
    logits were not finite, the sequence ends as soon as the host knows, and until then it goes on with token 0.
    """
    out = torch.empty_like(ids, dtype=torch.int64)
    fill_tokens_into(ids, previous, out)
    return out


def fill_tokens_into(ids: Tensor, previous: Tensor, out: Tensor) -> None:
    """Writes the result of `fill_tokens` to out."""
    count = len(ids)
    fill_tokens_kernel[(triton.cdiv(count, _FILL_BLOCK),)](
        ids, previous, out, count, BLOCK=_FILL_BLOCK, num_warps=_FILL_BLOCK // 32
    )


def _tile(width: int) -> tuple[int, int, int]:
    """Returns columns, rows and warps of a program that has whole rows of this width."""
    block = triton.next_power_of_2(width)
    rows = max(1, _TILE // block)
    size = block * rows
    return block, rows, 32 if size > 16384 else min(16, size // 512)
