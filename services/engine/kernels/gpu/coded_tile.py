# mypy: disable-error-code="no-untyped-def"
# A kernel has no Python types.
"""A tile of a product with weights in the form of `PackedCodes`: what kernels of products and of experts share.

Each program multiplies some rows of W with some rows of x: W is the left operand, which goes from memory to the matrix
units through registers, where its codes become numbers. Where scales come in:

    AT_END    an output has one scale: the sum over all of the depth is multiplied, once
    SUMS      few rows, or inputs of one byte: the sum over each group is multiplied, in float32. Codes are exact, so
              nothing is rounded before the sums, and sums are fewer than numbers of W
    NUMBERS   many rows: each number of W is multiplied, and rounded to the inputs' dtype, as `CodedMatrix.numbers` is:
              a group has fewer numbers than there are sums, and the matrix units need not wait between groups
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from services.engine.kernels.gpu.casts import cast
from services.engine.kernels.gpu.code_values import E2M1, UINT4, one_value, two_values
from services.engine.kernels.gpu.launch import dot_dtype
from services.engine.kernels.gpu.packed_codes import PackedCodes

AT_END, SUMS, NUMBERS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class CodedTile(NamedTuple):
    """The part of a product that one program computes, and how it does."""

    rows: int  # of x
    columns: int  # of y, rows of W
    num_warps: int
    num_stages: int


class Rows(NamedTuple):
    """Rows that are multiplied. The numbers of a row lie next to each other."""

    numbers: Tensor  # [rows, depth], in the dtype that is multiplied
    scales: Tensor | None = None  # float32[rows, 1] or [rows, groups], contiguous: what a row's numbers are times


@triton.jit
def multiply_tile(
    x,
    x_scales,
    codes,
    scales,
    offsets,
    columns,
    present,
    first,
    last,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    CENTRED: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Returns the product of COLUMNS rows of W and ROWS rows of x, over blocks first to last of the depth.

    x: where the rows begin, [ROWS]; x_scales: where their scales begin, or None. columns: rows of W, [COLUMNS].
    """
    IS_NARROW: tl.constexpr = True if CODE == UINT4 else CODE == E2M1
    OF_BLOCK: tl.constexpr = 2 * STEP if IS_NARROW else STEP
    WHOLE: tl.constexpr = DEPTH % OF_BLOCK == 0
    SUM: tl.constexpr = tl.int32 if tl.int8 == DOT else tl.float32
    acc = tl.zeros((COLUMNS, ROWS), dtype=SUM if SCALED == AT_END else tl.float32)
    totals = tl.zeros((ROWS,), dtype=tl.float32)  # of x, for offsets
    places = tl.arange(0, STEP)
    at = codes + tl.cast(first, tl.int64) * (WIDTH * STEP) + columns[:, None] * STEP + places[None, :]
    for block in range(first, last):
        stored = tl.load(at)
        at += WIDTH * STEP
        depth = block * OF_BLOCK
        tile = _load_rows(x, present, depth + places, DEPTH, WHOLE)
        if IS_NARROW:
            left, others = two_values(stored, CODE, CENTRED, DOT)
            more = _load_rows(x, present, depth + STEP + places, DEPTH, WHOLE)
        else:
            left = one_value(stored, CODE, DOT)
        if SCALED == AT_END:
            acc = _dot(left, tile, acc, DOT, SUM)
            if IS_NARROW:
                acc = _dot(others, more, acc, DOT, SUM)
            if offsets is not None:
                totals += tl.sum(tile.to(tl.float32), 0)
                if IS_NARROW:
                    totals += tl.sum(more.to(tl.float32), 0)
        elif SCALED == NUMBERS:
            left = _scaled(left, scales, offsets, columns, depth // GROUP, WIDTH, x.dtype.element_ty)
            acc = _dot(left, tile, acc, DOT, SUM)
            if IS_NARROW:
                others = _scaled(others, scales, offsets, columns, (depth + STEP) // GROUP, WIDTH, x.dtype.element_ty)
                acc = _dot(others, more, acc, DOT, SUM)
        else:
            nothing = tl.zeros((COLUMNS, ROWS), dtype=SUM)
            part = _dot(left, tile, nothing, DOT, SUM)
            if IS_NARROW and GROUP % OF_BLOCK == 0:
                part = _dot(others, more, part, DOT, SUM)
                acc = _add(acc, part, tile, more, x_scales, scales, offsets, columns, present, depth // GROUP, WIDTH)
            else:
                acc = _add(acc, part, tile, None, x_scales, scales, offsets, columns, present, depth // GROUP, WIDTH)
                if IS_NARROW:
                    part = _dot(others, more, nothing, DOT, SUM)
                    group = (depth + STEP) // GROUP
                    acc = _add(acc, part, more, None, x_scales, scales, offsets, columns, present, group, WIDTH)
    if SCALED == AT_END:
        acc = acc.to(tl.float32) * tl.load(scales + columns).to(tl.float32)[:, None]
        if offsets is not None:
            acc += tl.load(offsets + columns).to(tl.float32)[:, None] * totals[None, :]
    return acc


@triton.jit
def _load_rows(x, present, depths, DEPTH: tl.constexpr, WHOLE: tl.constexpr):
    """Returns some numbers of the rows that are present, zeros of the others, [depths, ROWS]."""
    if WHOLE:
        return tl.load(x[None, :] + depths[:, None], mask=present[None, :], other=0.0)
    return tl.load(x[None, :] + depths[:, None], mask=present[None, :] & (depths < DEPTH)[:, None], other=0.0)


@triton.jit
def _dot(left, right, acc, DOT: tl.constexpr, SUM: tl.constexpr):
    """Adds a product to acc. Sums of e4m3 are taken over from the matrix units, which keep 14 bits of them, after 128
    numbers at most (DeepSeek-V3, arXiv 2412.19437, 3.3.2).
    """
    if tl.float8e4nv == DOT:
        return tl.dot(left, right, acc, max_num_imprecise_acc=min(left.shape[1], 128))
    return tl.dot(left, right.to(DOT), acc, input_precision="ieee", out_dtype=SUM)


@triton.jit
def _scaled(numbers, scales, offsets, columns, group, WIDTH: tl.constexpr, dtype: tl.constexpr):
    """Returns numbers of W times their scale, plus their offset, rounded once."""
    scaled = numbers.to(tl.float32) * tl.load(scales + group * WIDTH + columns).to(tl.float32)[:, None]
    if offsets is not None:
        scaled += tl.load(offsets + group * WIDTH + columns).to(tl.float32)[:, None]
    return cast(scaled, dtype).to(numbers.dtype)


@triton.jit
def _add(acc, part, tile, more, x_scales, scales, offsets, columns, present, group, WIDTH: tl.constexpr):
    """Adds the sum over a group to acc. tile, more: the numbers of x that were multiplied."""
    part = part.to(tl.float32) * tl.load(scales + group * WIDTH + columns).to(tl.float32)[:, None]
    if offsets is not None:
        total = tl.sum(tile.to(tl.float32), 0)
        if more is not None:
            total += tl.sum(more.to(tl.float32), 0)
        part += tl.load(offsets + group * WIDTH + columns).to(tl.float32)[:, None] * total[None, :]
    if x_scales is not None:
        part *= tl.load(x_scales + group, mask=present, other=0.0)[None, :]
    return acc + part


def constants(x: Rows, weight: PackedCodes, tile: CodedTile, *, few: bool) -> dict[str, object]:
    """Returns the constants of a launch that both kernels of products have. few: see above."""
    if weight.is_by_rows:
        scaled = AT_END
    else:
        scaled = SUMS if few or x.numbers.dtype.itemsize == 1 else NUMBERS
    return {
        "WIDTH": weight.width,
        "DEPTH": weight.shape[1],
        "STEP": weight.step,
        "GROUP": weight.group,
        "CODE": weight.code.value,
        "CENTRED": weight.is_centred,
        "SCALED": scaled.value,
        "BY_GROUP": x.scales is not None and x.scales.shape[1] > 1,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DOT": dot_dtype(x.numbers.dtype),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
