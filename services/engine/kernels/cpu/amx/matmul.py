"""Matrix products by AMX: y = x W^T + b, and SiLU(gate(x)) * up(x), which takes two products.

This is said of bfloat16; `int8_matmul` computes the same in int8, whose steps have a depth of 64, in fours and not in
pairs, and whose sums are int32. A step has as many bytes.

One block is 32 rows of x times 32 rows of W; its sums are in four tiles:

    sums [32, 32] += x [32, 32] x W^T [32, 32]

The weight is packed as oneDNN packs it: in panels of 32 columns of y; a panel in steps of 32 along the depth; a step as
16 pairs of the depth for each of 32 columns. An item's rows of x stay in the second-level cache while one panel of the
weight after another comes from memory; the next panel is prefetched while one is multiplied.

Tiles of x and W are loaded past the first-level cache, which would not hold them until they are used again. So the sums
stay in that cache; they are rounded and written while the next block is multiplied. That made one product 1.4 times as
fast when its operands were in the second-level cache already. If rows are too long for that cache, some units are
multiplied along one part of the depth, then along the next.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from services.engine.kernels.cpu.amx import tiles as amx
from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.epilogue import make_finish
from services.engine.kernels.cpu.intrinsics import njit, prefetch_far
from services.engine.kernels.cpu.per_item import per_item, places

load_0, load_1, load_2, load_3 = amx.load[:4]
load_4, load_5, load_6, load_7 = amx.stream[4:]
store_0, store_1, store_2, store_3 = amx.store[:4]
zero_0, zero_1, zero_2, zero_3 = amx.zero[:4]

BLOCK = 32  # rows and columns of a block, and the depth of a step
_SUMS_AT = 64  # in the scratch memory, after the saved tile configuration of other code
_SUMS_BYTES = BLOCK * BLOCK * 4
_PARTIAL_AT = _SUMS_AT + 4 * _SUMS_BYTES
MOST_ROWS = 256  # of one item
_UNITS_TOGETHER, _MOST_STEPS = 8, 64
SCRATCH_BYTES = _PARTIAL_AT + _UNITS_TOGETHER * 2 * MOST_ROWS // BLOCK * _SUMS_BYTES  # for one thread
_HALF = BLOCK // 2
_STEP_BYTES, _LINE = 2048, 64  # bytes of a panel's step; of a cache line


def block_configs() -> np.ndarray:
    """Returns tile configurations, uint8[32, 64]. Entry n is for a block of n rows; entry 0 is for all 32."""
    configs = np.tile(amx.tile_config(), (BLOCK, 1))
    rows = np.arange(1, BLOCK, dtype=np.uint8)[:, None]
    configs[1:, [48, 49, 52]] = np.minimum(rows, _HALF)  # upper sums, upper x
    configs[1:, [50, 51, 53]] = np.maximum(rows, _HALF + 1) - _HALF  # lower sums, lower x; a tile must have a row
    return configs


@njit(error_model="numpy")
def _ask_for(address: int, lines: int) -> None:
    for line in range(lines):
        prefetch_far(address + line * _LINE)


@njit(error_model="numpy")
def _begin(sums: int, afresh: bool, both: bool) -> None:
    """Loads the sums of a block into tiles, or zeros the tiles."""
    if afresh:
        zero_0()
        zero_1()
        if both:
            zero_2()
            zero_3()
        return
    load_0(sums, 128)
    load_1(sums + 64, 128)
    if both:
        load_2(sums + 2048, 128)
        load_3(sums + 2112, 128)


@njit(error_model="numpy")
def _end(sums: int, both: bool) -> None:
    store_0(sums, 128)
    store_1(sums + 64, 128)
    if both:
        store_2(sums + 2048, 128)
        store_3(sums + 2112, 128)


def make_multiply(add_product: Any) -> Any:
    """Makes a function that adds the products of a step to the sums in tiles."""
    add_4_6_to_0, add_4_7_to_1 = add_product(0, 4, 6), add_product(1, 4, 7)
    add_5_6_to_2, add_5_7_to_3 = add_product(2, 5, 6), add_product(3, 5, 7)

    @njit(error_model="numpy")
    def multiply(x: int, stride: int, panel: int, both: bool) -> None:
        load_6(panel, 128)
        load_7(panel + 64, 128)
        load_4(x, stride)
        add_4_6_to_0()
        add_4_7_to_1()
        if both:
            load_5(x + _HALF * stride, stride)
            add_5_6_to_2()
            add_5_7_to_3()

    return multiply


_multiply = make_multiply(amx.add_product)


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Differences between kinds of products."""

    multiply: Any  # of `make_multiply`
    finish: Any  # sums; those of the gated; target; numbers of both units; address of the row's scale: writes one row
    unit_bytes: int  # of a row of the target
    numbers_bytes: int  # of what belongs to a unit's columns


@njit(error_model="numpy")
def multiply_blocks(
    rows: int, x: int, stride: int, panel: int, steps: int, sums: int, afresh: bool, configs: int
) -> None:
    """Multiplies rows of x by steps of a panel, block after block. sums: float32[rows, 32], next to each other.

    Leaves the last block's configuration; `save_config` and `load_config` are around it.
    """
    for row in range(0, rows, BLOCK):
        count = min(BLOCK, rows - row)
        amx.load_config(configs + count % BLOCK * 64)
        both, own = count > _HALF, sums + row * BLOCK * 4
        _begin(own, afresh, both)
        for step in range(steps):
            _multiply(x + row * stride + step * 64, stride, panel + step * _STEP_BYTES, both)
        _end(own, both)


@per_item
def make_matmul(dtype: str, *, gated: bool) -> Any:
    """Makes a kernel with the arguments of `cpu.matmul.make_matmul`, and one more: `block_configs`. Tensors are
    bfloat16.
    """
    assert dtype == "bfloat16"
    arg = places(
        "x stride target target_stride weight bias rows depth units scratch rows_at_once units_at_once skipped configs"
    )
    finish_row = make_finish(ELEMENTS[dtype], gated=gated)

    @njit
    def finish(sums: int, gated_sums: int, target: int, bias: int, gated_bias: int, _scale: int) -> None:
        finish_row(sums, gated_sums, target, bias, gated_bias)

    kind = Kind(_multiply, finish, unit_bytes=BLOCK * 2, numbers_bytes=BLOCK * 4)
    multiply_item = make_item(kind, gated=gated)

    @njit(error_model="numpy")
    def work(a: Any, item: int, thread: int) -> None:
        multiply_item(
            a[arg.x],
            a[arg.stride] * 2,
            0,
            0,
            a[arg.target],
            a[arg.target_stride] * 2,
            a[arg.weight],
            a[arg.bias],
            a[arg.rows],
            a[arg.depth] // BLOCK,
            a[arg.units],
            a[arg.scratch] + thread * SCRATCH_BYTES,
            a[arg.rows_at_once],
            a[arg.units_at_once],
            a[arg.skipped],
            a[arg.configs],
            item,
        )

    return work


def _make_finish(kind: Kind) -> Any:
    finish_kind = kind.finish

    @njit
    def finish(sums: int, target: int, numbers: int, up_numbers: int, scale: int) -> None:
        """Rounds and writes one row of a block."""
        finish_kind(sums, sums + _SUMS_BYTES, target, numbers, up_numbers, scale)

    return finish


def _make_finish_rest(kind: Kind) -> Any:
    """Makes a function that rounds and writes some rows of a block."""
    finish = _make_finish(kind)

    @njit(error_model="numpy")
    def finish_rest(
        begin: int,
        end: int,
        sums: int,
        target: int,
        target_stride: int,
        numbers: int,
        up_numbers: int,
        scales: int,
        scale_stride: int,
    ) -> None:
        for i in range(begin, end):
            finish(sums + i * 128, target + i * target_stride, numbers, up_numbers, scales + i * scale_stride)

    return finish_rest


def _make_multiply_and_finish(kind: Kind) -> Any:
    multiply, finish = kind.multiply, _make_finish(kind)

    @njit(error_model="numpy")
    def multiply_and_finish(
        x: int,
        stride: int,
        panel: int,
        both: bool,
        steps: int,
        asked: int,
        lines: int,
        pairs: int,
        sums: int,
        target: int,
        target_stride: int,
        numbers: int,
        up_numbers: int,
        scale: int,
        scale_stride: int,
    ) -> None:
        """Multiplies the steps of a block. Beside the first steps, finishes pairs of rows of the previous block."""
        for _ in range(pairs):
            multiply(x, stride, panel, both)
            _ask_for(asked, lines)
            finish(sums, target, numbers, up_numbers, scale)
            finish(sums + 128, target + target_stride, numbers, up_numbers, scale + scale_stride)
            x, panel, asked = x + 64, panel + _STEP_BYTES, asked + lines * _LINE
            sums, target, scale = sums + 256, target + 2 * target_stride, scale + 2 * scale_stride
        for _ in range(steps - pairs):
            multiply(x, stride, panel, both)
            _ask_for(asked, lines)
            x, panel, asked = x + 64, panel + _STEP_BYTES, asked + lines * _LINE

    return multiply_and_finish


def make_item(kind: Kind, *, gated: bool) -> Any:
    """Makes a function that computes an item. Strides are in bytes; those of scales are 0 where there are none."""
    parts = 2 if gated else 1
    share, numbers_bytes, unit_bytes = BLOCK // parts, kind.numbers_bytes, kind.unit_bytes
    finish_rest, multiply_and_finish = _make_finish_rest(kind), _make_multiply_and_finish(kind)

    @njit(error_model="numpy")
    def multiply_item(
        x: int,
        stride: int,
        scales: int,
        scale_stride: int,
        target: int,
        target_stride: int,
        weight: int,
        numbers: int,
        rows: int,
        all_steps: int,
        units: int,
        scratch: int,
        rows_at_once: int,
        units_at_once: int,
        skipped: int,
        configs: int,
        item: int,
    ) -> None:
        panel_bytes = all_steps * _STEP_BYTES
        items = (units + units_at_once - 1) // units_at_once  # that share their rows
        first_row, first_unit = item // items * rows_at_once, item % items * units_at_once
        end_row, end_unit = min(first_row + rows_at_once, rows), min(first_unit + units_at_once, units)
        blocks = (end_row - first_row + BLOCK - 1) // BLOCK
        lines = (_STEP_BYTES // _LINE + blocks - 1) // blocks
        chunks = (all_steps + _MOST_STEPS - 1) // _MOST_STEPS
        chunk_steps = (all_steps + chunks - 1) // chunks
        sums, done_sums = scratch + _SUMS_AT, scratch + _SUMS_AT + parts * _SUMS_BYTES
        amx.save_config(scratch)
        amx.load_config(configs)
        is_full = True
        done, done_at, done_target, done_scales = 0, 0, 0, 0  # of the previous block's rows
        done_numbers, done_up_numbers = 0, 0
        for group in range(first_unit, end_unit, _UNITS_TOGETHER):
            end_group = min(group + _UNITS_TOGETHER, end_unit)
            for step in range(0, all_steps, chunk_steps):
                steps, is_last = min(chunk_steps, all_steps - step), step + chunk_steps >= all_steps
                for unit in range(group, end_group):
                    if unit + 1 < end_group:
                        ahead = weight + (unit + 1) * panel_bytes + step * _STEP_BYTES
                    elif not is_last:
                        ahead = weight + group * panel_bytes + (step + steps) * _STEP_BYTES
                    else:
                        following = unit + 1 if unit + 1 < end_unit else min(end_unit + skipped, units - 1)
                        ahead = weight + following * panel_bytes
                    unit_numbers = numbers + unit * numbers_bytes if numbers != 0 else 0
                    up_numbers = unit_numbers + units * numbers_bytes if numbers != 0 else 0
                    partial = scratch + _PARTIAL_AT + (unit - group) * parts * blocks * _SUMS_BYTES
                    for row in range(first_row, end_row, BLOCK):
                        count = min(BLOCK, end_row - row)
                        if count < BLOCK or not is_full:
                            amx.load_config(configs + count % BLOCK * 64)
                            is_full = count == BLOCK
                        both = count > _HALF
                        for part in range(parts):
                            pairs = min(min(share, done - done_at) // 2, steps)
                            _begin(partial, step == 0, both)
                            multiply_and_finish(
                                x + row * stride + step * 64,
                                stride,
                                weight + (unit + part * units) * panel_bytes + step * _STEP_BYTES,
                                both,
                                steps,
                                ahead + part * units * panel_bytes,
                                lines,
                                pairs,
                                done_sums + done_at * 128,
                                done_target + done_at * target_stride,
                                target_stride,
                                done_numbers,
                                done_up_numbers,
                                done_scales + done_at * scale_stride,
                                scale_stride,
                            )
                            _end(sums + part * _SUMS_BYTES if is_last else partial, both)
                            done_at += 2 * pairs
                            partial += _SUMS_BYTES
                        ahead += steps * lines * _LINE
                        if is_last:
                            finish_rest(
                                done_at,
                                done,
                                done_sums,
                                done_target,
                                target_stride,
                                done_numbers,
                                done_up_numbers,
                                done_scales,
                                scale_stride,
                            )
                            sums, done_sums = done_sums, sums
                            done, done_at, done_target = count, 0, target + row * target_stride + unit * unit_bytes
                            done_numbers, done_up_numbers = unit_numbers, up_numbers
                            done_scales = scales + row * scale_stride
        finish_rest(
            done_at,
            done,
            done_sums,
            done_target,
            target_stride,
            done_numbers,
            done_up_numbers,
            done_scales,
            scale_stride,
        )
        amx.load_config(scratch)

    return multiply_item
