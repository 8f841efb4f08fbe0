# mypy: disable-error-code="no-untyped-def"
# A kernel has no Python types.
"""y = x Wᵀ + b in Triton, with W in the form of `PackedCodes`, by the tiles of `coded_tile.py`.

Products of few rows are cut along the depth into parts, which another kernel adds up in their order. The cut is a
function of the weight alone, so a row's result does not depend on the rows beside it, up to `FEW` of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.kernels.gpu.casts import cast
from services.engine.kernels.gpu.coded_tile import CodedTile, Rows, constants, multiply_tile
from services.engine.kernels.gpu.packed_codes import PackedCodes

FEW = 64  # rows
_PROGRAMS = 264  # of a product of few rows, about: two on each multiprocessor of a large card
_ADDED = 1024  # sums of a program that adds parts


@triton.jit(do_not_specialize=["num_rows", "num_row_tiles"])
def product_kernel(
    x,
    x_scales,
    codes,
    scales,
    offsets,
    bias,
    y,
    x_stride,
    y_stride,
    num_rows,
    num_row_tiles,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    CENTRED: tl.constexpr,
    SCALED: tl.constexpr,
    BY_GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Computes a tile of y, over one of PARTS of the depth; with several parts y is [PARTS, rows, OUT].

    BY_GROUP: x has a scale for each group of a row.
    """
    COLUMN_TILES: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    OF_PART: tl.constexpr = (BLOCKS + PARTS - 1) // PARTS
    tile = tl.program_id(0) // num_row_tiles
    rows = tl.program_id(0) % num_row_tiles * ROWS + tl.arange(0, ROWS)
    columns = tile % COLUMN_TILES * COLUMNS + tl.arange(0, COLUMNS)
    part = tile // COLUMN_TILES
    present = rows < num_rows
    rows = rows.to(tl.int64)
    if BY_GROUP:
        x_groups = x_scales + rows * ((DEPTH + GROUP - 1) // GROUP)
    else:
        x_groups = None
    acc = multiply_tile(
        x + rows * x_stride,
        x_groups,
        codes,
        scales,
        offsets,
        columns,
        present,
        part * OF_PART,
        tl.minimum(part * OF_PART + OF_PART, BLOCKS),
        WIDTH,
        DEPTH,
        STEP,
        GROUP,
        CODE,
        CENTRED,
        SCALED,
        ROWS,
        COLUMNS,
        DOT,
    )
    if x_scales is not None and not BY_GROUP:
        acc *= tl.load(x_scales + rows, mask=present, other=0.0)[None, :]
    wanted = columns < OUT
    if bias is not None:
        acc += tl.load(bias + columns, mask=wanted, other=0.0).to(tl.float32)[:, None]
    into = y + (part.to(tl.int64) * num_rows + rows)[None, :] * y_stride + columns[:, None]
    tl.store(into, cast(acc, y.dtype.element_ty), mask=wanted[:, None] & present[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def add_parts_kernel(parts, bias, y, y_stride, num_rows, OUT: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds up the parts of some columns of a row, and the bias."""
    tiles: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // tiles).to(tl.int64)
    columns = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    wanted = columns < OUT
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + (part * num_rows + row) * OUT + columns, mask=wanted, other=0.0)
    if bias is not None:
        total += tl.load(bias + columns, mask=wanted, other=0.0).to(tl.float32)
    tl.store(y + row * y_stride + columns, cast(total, y.dtype.element_ty), mask=wanted)


def multiply_into(x: Rows, weight: PackedCodes, bias: Tensor | None, y: Tensor) -> None:
    """Writes the product of x with a matrix, and its bias, to y, [rows, out], whose rows may lie apart."""
    num_rows, out = y.shape
    few = num_rows <= FEW
    tile = _tile(num_rows, x.numbers.dtype, adds=not weight.is_by_rows)
    blocks, tiles = len(weight.codes), triton.cdiv(out, tile.columns)
    parts = _parts(blocks, tiles) if few else 1
    into = y if parts == 1 else torch.empty((parts * num_rows, out), dtype=torch.float32, device=y.device)
    row_tiles = triton.cdiv(num_rows, tile.rows)
    product_kernel[(row_tiles * tiles * parts,)](
        x.numbers,
        x.scales,
        weight.codes,
        weight.scales,
        weight.offsets,
        bias if parts == 1 else None,
        into,
        x.numbers.stride(0),
        into.stride(0),
        num_rows,
        row_tiles,
        OUT=out,
        BLOCKS=blocks,
        PARTS=parts,
        **constants(x, weight, tile, few=few),
    )
    if parts > 1:
        columns = min(_ADDED, triton.next_power_of_2(out))
        add_parts_kernel[(num_rows * triton.cdiv(out, columns),)](
            into, bias, y, y.stride(0), num_rows, OUT=out, PARTS=parts, COLUMNS=columns, num_warps=4
        )


def _tile(num_rows: int, dtype: torch.dtype, *, adds: bool) -> CodedTile:
    """Returns the tile of a product. adds: an output has several scales."""
    if num_rows <= FEW:
        return CodedTile(max(16, triton.next_power_of_2(num_rows)), 64, 4, 4)
    if dtype == torch.float32:
        return CodedTile(64, 64, 4, 2)
    # The sums over a group and those over all groups need registers at once.
    return CodedTile(64, 128, 8, 3) if adds and dtype.itemsize == 1 else CodedTile(128, 128, 8, 3)


def _parts(blocks: int, tiles: int) -> int:
    """Returns the parts into which the depth of a product of few rows is cut: none of them is empty."""
    wanted = max(1, min(blocks, _PROGRAMS // tiles))
    return triton.cdiv(blocks, triton.cdiv(blocks, wanted))
