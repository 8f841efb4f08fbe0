# mypy: disable-error-code="no-untyped-def"
# A kernel has no Python types.
"""The MLPs of a layer's experts, with weights as codes: products grouped by expert, as in `experts.py`.

Each program multiplies a tile of `coded_tile.py`. Gates and ups are one product, [pairs, 2 * width]; another
kernel makes of them what the second product takes, which inputs of one byte need: they are rounded row by row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.kernels.expert_tally import ExpertTally
from services.engine.kernels.gpu.casts import cast
from services.engine.kernels.gpu.coded_linear import rows_for
from services.engine.kernels.gpu.coded_tile import CodedTile, Rows, constants, multiply_tile
from services.engine.kernels.gpu.experts import find_block, glu, sort_pairs, sum_pairs
from services.engine.kernels.gpu.packed_codes import PackedCodes

_FEW = 64  # pairs of an expert
_COLUMNS = 1024  # of a program that activates


class CodedStacks(NamedTuple):
    """The weights of all experts of a layer: each tensor of a matrix has the experts as its first dimension."""

    gate_up: PackedCodes  # [2 * width, hidden], gate first
    down: PackedCodes  # [hidden, width]
    gate_up_bias: Tensor | None = None  # [E, 2 * width]
    down_bias: Tensor | None = None  # [E, hidden]


class _Pairs(NamedTuple):
    """Pairs of a token and an expert, by expert, see `experts.py`."""

    counts: Tensor
    order: Tensor


@triton.jit(do_not_specialize=["num_blocks"])
def grouped_product_kernel(
    x,
    x_scales,
    codes,
    scales,
    offsets,
    bias,
    order,
    counts,
    y,
    x_stride,
    num_blocks,
    TOP_K: tl.constexpr,
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
    GROUPS: tl.constexpr,
    NUM: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Computes a tile of the product of an expert's matrix with some of its pairs.

    TOP_K: x has a row for each token, which has so many pairs, and y one for each place. 0: x has one for each place,
    and y one for each pair.
    """
    expert, first, end = find_block(counts, tl.program_id(0) % num_blocks, NUM, EXPERTS, ROWS)
    if expert < NUM:
        places = first + tl.arange(0, ROWS)
        present = places < end
        columns = tl.program_id(0) // num_blocks * COLUMNS + tl.arange(0, COLUMNS)
        wanted = columns < OUT
        pairs = tl.load(order + places, mask=present, other=0)
        if TOP_K > 0:
            rows, into = (pairs // TOP_K).to(tl.int64), places.to(tl.int64)
        else:
            rows, into = places.to(tl.int64), pairs.to(tl.int64)
        if BY_GROUP:
            x_groups = x_scales + rows * ((DEPTH + GROUP - 1) // GROUP)
        else:
            x_groups = None
        at = expert.to(tl.int64)
        if offsets is None:
            own_offsets = None
        else:
            own_offsets = offsets + at * (GROUPS * WIDTH)
        acc = multiply_tile(
            x + rows * x_stride,
            x_groups,
            codes + at * (BLOCKS * WIDTH * STEP),
            scales + at * (GROUPS * WIDTH),
            own_offsets,
            columns,
            present,
            0,
            BLOCKS,
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
        if bias is not None:
            acc += tl.load(bias + at * OUT + columns, mask=wanted, other=0.0).to(tl.float32)[:, None]
        target = y + into[None, :] * OUT + columns[:, None]
        tl.store(target, cast(acc, y.dtype.element_ty), mask=wanted[:, None] & present[None, :])


@triton.jit
def activate_kernel(
    gate_up, inner, LIMIT: tl.constexpr, ALPHA: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):
    """Computes some columns of SiLU(gate) * up of a row, with a LIMIT of its clamped form."""
    dtype: tl.constexpr = inner.dtype.element_ty
    tiles: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // tiles).to(tl.int64)
    columns = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    wanted = columns < WIDTH
    at = gate_up + row * (2 * WIDTH) + columns
    gate = tl.load(at, mask=wanted, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=wanted, other=0.0).to(tl.float32)
    tl.store(inner + row * WIDTH + columns, cast(glu(gate, up, LIMIT, ALPHA, dtype), dtype), mask=wanted)


def grouped_coded_mlp(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    stacks: CodedStacks,
    swiglu: tuple[float, float] | None = None,
    tally: ExpertTally | None = None,
) -> Tensor:
    """Returns the weighted sum of what each token's experts make of it, [T, hidden]: see `experts.grouped_mlp`."""
    (num_tokens, top_k), width = chosen.shape, stacks.down.shape[1]
    num_pairs, num_experts = num_tokens * top_k, len(stacks.gate_up.codes)
    pairs = _Pairs(*sort_pairs(chosen, num_experts, tally))
    gate_up = x.new_empty(num_pairs, 2 * width)
    _multiply_into(rows_for(stacks.gate_up, x), stacks.gate_up, stacks.gate_up_bias, pairs, gate_up, top_k)
    inner, columns = x.new_empty(num_pairs, width), min(_COLUMNS, triton.next_power_of_2(width))
    limit, alpha = swiglu or (0.0, 0.0)
    activate_kernel[(num_pairs * triton.cdiv(width, columns),)](
        gate_up, inner, LIMIT=limit, ALPHA=alpha, WIDTH=width, COLUMNS=columns, num_warps=4
    )
    outer = x.new_empty(num_pairs, stacks.down.shape[0])
    _multiply_into(rows_for(stacks.down, inner), stacks.down, stacks.down_bias, pairs, outer, 0)
    return sum_pairs(outer, weights)


def _multiply_into(x: Rows, weight: PackedCodes, bias: Tensor | None, pairs: _Pairs, y: Tensor, top_k: int) -> None:
    """Writes the products of all pairs to y, see `grouped_product_kernel`."""
    num_experts, num_pairs, out = len(weight.codes), len(y), weight.shape[0]
    of_expert = num_pairs / num_experts
    tile = _tile(of_expert, x.numbers.dtype, adds=not weight.is_by_rows)
    num_blocks = min(num_pairs, triton.cdiv(num_pairs, tile.rows) + num_experts - 1)
    grouped_product_kernel[(num_blocks * triton.cdiv(out, tile.columns),)](
        x.numbers,
        x.scales,
        weight.codes,
        weight.scales,
        weight.offsets,
        bias,
        pairs.order,
        pairs.counts,
        y,
        x.numbers.stride(0),
        num_blocks,
        TOP_K=top_k,
        OUT=out,
        BLOCKS=weight.codes.shape[1],
        GROUPS=weight.scales.shape[1],
        NUM=num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        **constants(x, weight, tile, few=of_expert <= _FEW),
    )


def _tile(of_expert: float, dtype: torch.dtype, *, adds: bool) -> CodedTile:
    """Returns the tile of a product, with about as many rows as an expert has pairs. adds: see `coded_product`."""
    if of_expert <= 16:
        return CodedTile(16, 64, 4, 4)
    if of_expert <= _FEW or dtype == torch.float32:
        return CodedTile(64, 64, 4, 3)
    return CodedTile(64, 128, 8, 3) if adds and dtype.itemsize == 1 else CodedTile(128, 128, 8, 3)
