"""Matrix products of few rows in bfloat16, by AMX: y = x W^T + b, and SiLU(gate(x)) * up(x) of two of them.

The time is that of the weight's way from memory, so each panel of it is read once, for all rows, and the panel that
the thread will take later is asked for meanwhile. Of the rows, 32 at a time are multiplied, the sums in four tiles:

    sums [32, 32] += x [32, 32] x W^T [32, 32]

The weight lies as oneDNN packs it: in panels of 32 columns of y, a panel in steps of 32 along the depth, a step as 16
pairs of the depth of each of 32 columns. So products of many rows are oneDNN's.
"""

from typing import Any

import numpy as np
from numba import float32, njit
from torch import Tensor

from services.engine.kernels import amx
from services.engine.kernels.intrinsics import EXP2, LOG2_E, prefetch_far
from services.engine.kernels.per_item import per_item
from services.engine.kernels.vectors import (
    above_whole,
    divide,
    load_floats,
    multiply_add,
    round_bfloat16s,
    spread,
    store_bfloat16s,
    times_power,
)

load_0, load_1, load_2, load_3, load_4, load_5, load_6, load_7 = amx.load
store_0, store_1, store_2, store_3 = amx.store[:4]
zero_0, zero_1, zero_2, zero_3 = amx.zero[:4]
add_4_6_to_0, add_4_7_to_1 = amx.add_product(0, 4, 6), amx.add_product(1, 4, 7)
add_5_6_to_2, add_5_7_to_3 = amx.add_product(2, 5, 6), amx.add_product(3, 5, 7)

BLOCK = 32  # rows, and columns, that are multiplied at a time; and the depth of a step
_SUMS_AT = 64  # in the scratch, behind the tile configuration that others may have left
SCRATCH_BYTES = _SUMS_AT + BLOCK * BLOCK * 4  # that a thread needs, on a 64-byte border
_HALF = BLOCK // 2
_STEP_BYTES, _LINE = 2048, 64  # of a panel
_AHEAD = 2  # panels


def pack(weight: Tensor) -> Tensor:
    """bfloat16 [out, depth], multiples of 32, as it has to lie."""
    panels = weight.view(-1, BLOCK, weight.shape[1] // BLOCK, _HALF, 2)  # panel, column, step, pair, of a pair
    return panels.permute(0, 2, 3, 1, 4).contiguous()


def block_configs() -> np.ndarray:
    """uint8[32, 64]: tile configurations by the rows of a block; 0: all 32."""
    configs = np.tile(amx.tile_config(), (BLOCK, 1))
    rows = np.arange(1, BLOCK, dtype=np.uint8)[:, None]
    configs[1:, [48, 49, 52]] = np.minimum(rows, _HALF)  # upper sums, upper x
    configs[1:, [50, 51, 53]] = np.maximum(rows, _HALF + 1) - _HALF  # lower ones, which may not be none
    return configs


def make_matmul() -> Any:
    """Arguments: x and the elements from row to row; target, and the same; packed weight; float32 bias, or 0; rows,
    depth, columns of the weight; 1: its columns are as many gates and, after them, what they gate, so that the target
    has half as many, else 0; `block_configs`; SCRATCH_BYTES for each thread.

    An item is 32 columns, or 16 gates and what they gate.
    """

    @njit
    def ask_for(address: int, lines: int) -> None:
        for line in range(lines):
            prefetch_far(address + line * _LINE)

    @njit
    def multiply(
        x: int, stride: int, left: int, right: int, steps: int, sums: int, both: bool, ahead: int, lines: int
    ) -> None:
        """left, right: 16 columns of a panel. both: there are more than 16 rows."""
        below = x + _HALF * stride
        zero_0()
        zero_1()
        if both:
            zero_2()
            zero_3()
        for step in range(steps):
            load_6(left + step * _STEP_BYTES, 128)
            load_7(right + step * _STEP_BYTES, 128)
            load_4(x + step * 64, stride)
            add_4_6_to_0()
            add_4_7_to_1()
            if both:
                load_5(below + step * 64, stride)
                add_5_6_to_2()
                add_5_7_to_3()
            ask_for(ahead + step * lines * _LINE, lines)
        store_0(sums, 128)
        store_1(sums + 64, 128)
        if both:
            store_2(sums + 2048, 128)
            store_3(sums + 2112, 128)

    @njit
    def finish(sums: int, target: int, left_bias: int, right_bias: int) -> None:
        """A row."""
        left, right = load_floats(sums), load_floats(sums + 64)
        if left_bias != 0:
            left, right = left + load_floats(left_bias), right + load_floats(right_bias)
        store_bfloat16s(target, left)
        store_bfloat16s(target + 32, right)

    @njit
    def finish_gated(sums: int, target: int, left_bias: int, right_bias: int) -> None:
        """A row."""
        left, right = load_floats(sums), load_floats(sums + 64)
        if left_bias != 0:
            left, right = left + load_floats(left_bias), right + load_floats(right_bias)
        gate = round_bfloat16s(left)
        exponent = multiply_add(gate, spread(float32(-LOG2_E)), spread(float32(0.5)))
        f = above_whole(exponent) - spread(float32(0.5))
        y = spread(EXP2[5])
        for i in range(4, -1, -1):
            y = multiply_add(y, f, spread(EXP2[i]))
        silu = divide(gate, spread(float32(1)) + times_power(y, exponent))
        store_bfloat16s(target, round_bfloat16s(silu) * round_bfloat16s(right))

    @njit(error_model="numpy")
    def work(a: Any, item: int, thread: int) -> None:
        x, x_stride, target, target_stride, weight, bias = a[5], a[6] * 2, a[7], a[8] * 2, a[9], a[10]
        rows, depth, columns, gated, configs = a[11], a[12], a[13], a[14] != 0, a[15]
        steps, blocks = depth // BLOCK, (rows + BLOCK - 1) // BLOCK
        panel_bytes = steps * _STEP_BYTES
        if gated:
            left = weight + item // 2 * panel_bytes + item % 2 * _LINE
            right = left + columns // 2 // BLOCK * panel_bytes
            first = item * _HALF
            left_bias, right_bias = bias + first * 4, bias + (columns // 2 + first) * 4
            ahead = weight + item // 2 * panel_bytes + item % 2 * (right - left) + _AHEAD * panel_bytes
        else:
            left = weight + item * panel_bytes
            right = left + _LINE
            first = item * BLOCK
            left_bias, right_bias = bias + first * 4, bias + (first + _HALF) * 4
            ahead = left + _AHEAD * panel_bytes
        if bias == 0:
            left_bias = 0
        scratch = a[16] + thread * SCRATCH_BYTES
        sums = scratch + _SUMS_AT
        amx.save_config(scratch)
        amx.load_config(configs)
        lines = (_STEP_BYTES // _LINE + blocks - 1) // blocks
        for block in range(blocks):
            row = block * BLOCK
            count = min(BLOCK, rows - row)
            if count < BLOCK:
                amx.load_config(configs + count * 64)
            both = count > _HALF
            multiply(x + row * x_stride, x_stride, left, right, steps, sums, both, ahead, lines)
            ahead += steps * lines * _LINE
            for i in range(count):
                to = target + (row + i) * target_stride + first * 2
                if gated:
                    finish_gated(sums + i * 128, to, left_bias, right_bias)
                else:
                    finish(sums + i * 128, to, left_bias, right_bias)
        amx.load_config(scratch)

    return per_item(work)
