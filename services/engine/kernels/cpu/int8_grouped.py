"""Products of experts in int8: codes of each block of rows are multiplied by the codes of its expert's weight.

    panels [experts, parts, panels, steps, 32, 4]    as `int8_matmul` packs them, as it does their numbers

A plan says which expert a block has, and which rows (see `routing`); rows are quantized beforehand, in the order of the
pairs (`quantize_rows`). Sums and their numbers are those of `int8_matmul`. Each panel is multiplied along its whole
depth, which is that of one expert.
"""

from typing import Any

from numba import float32, int64

from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.grouped_matmul import Epilogue, make_grouped_finish
from services.engine.kernels.cpu.int8_matmul import NUMBERS_BYTES, SUMS_BYTES, make_scale
from services.engine.kernels.cpu.intrinsics import ISA, float64_of, float_pointer, njit
from services.engine.kernels.cpu.matmul import AHEAD
from services.engine.kernels.cpu.per_item import per_item, places
from services.engine.kernels.cpu.register_tiles import (
    COLUMNS,
    ROW_BYTES,
    STEP_BYTES,
    arithmetic_of_codes,
    multiply_rows,
)
from services.engine.kernels.cpu.routing import item_of_plan


@per_item
def make_grouped_int8(dtype: str, epilogue: Epilogue) -> Any:
    """Makes the kernel of the products of experts. Items that are next to each other are panels of the same block.

    Arguments of the kernel: codes of x and the bytes from row to row in them; the byte of a row at which its scale is;
    plan; target, of this dtype, and the elements from row to row; packed weight; numbers of its panels; steps; panels
    of the target; SUMS_BYTES for each thread, on a 64-byte border; panels of an item; limit and alpha of CLAMPED.
    """
    element, arithmetic, parts = ELEMENTS[dtype], arithmetic_of_codes(), epilogue.parts
    arg = places(
        "codes stride scale_at plan target target_stride weight numbers steps panels scratch panels_at_once limit alpha"
    )
    size, most_rows, a_bytes, apart = element.size, ISA.tile_rows, arithmetic.a_bytes, ISA.tile_rows * ROW_BYTES
    multiply, finish, scale_sums = multiply_rows(arithmetic), make_grouped_finish(element, epilogue), make_scale()

    @njit
    def work(a: Any, item: int, thread: int) -> None:
        panels, panels_at_once = a[arg.panels], a[arg.panels_at_once]
        expert, first, rows, first_panel, end_panel = item_of_plan(a[arg.plan], item, panels, panels_at_once)
        if rows == 0:
            return
        steps, stride, target_stride = a[arg.steps], a[arg.stride], a[arg.target_stride] * size
        panel_bytes = steps * STEP_BYTES
        part_bytes, part_numbers = panels * panel_bytes, panels * NUMBERS_BYTES
        weight = a[arg.weight] + expert * parts * part_bytes
        all_numbers = a[arg.numbers] + expert * parts * part_numbers
        codes, target = a[arg.codes] + first * stride, a[arg.target] + first * target_stride
        sums = a[arg.scratch] + thread * SUMS_BYTES
        limit, alpha = float32(float64_of(a[arg.limit])), float32(float64_of(a[arg.alpha]))
        tiles = (rows + most_rows - 1) // most_rows
        for panel in range(first_panel, end_panel):
            b, numbers = weight + panel * panel_bytes, all_numbers + panel * NUMBERS_BYTES
            for tile in range(tiles):
                begin, end = tile * rows // tiles, (tile + 1) * rows // tiles
                x = codes + begin * stride
                for part in range(parts):
                    of_part = b + part * part_bytes
                    # Each tile prefetches its share of the next panel; a single tile, what it reads soon.
                    ahead, ahead_step = of_part + AHEAD, int64(STEP_BYTES)
                    if tiles > 1:
                        ahead_step = int64(STEP_BYTES // tiles + 1)
                        ahead = of_part + panel_bytes + tile * steps * ahead_step
                    into = sums + part * apart
                    multiply(end - begin, x, stride, a_bytes, of_part, steps, into, True, ahead, ahead_step)
                for row in range(end - begin):
                    at, scale = sums + row * ROW_BYTES, float_pointer(x + row * stride + a[arg.scale_at])[0]
                    scale_sums(at, numbers, scale)
                    if parts > 1:
                        scale_sums(at + apart, numbers + part_numbers, scale)
                    into_row = target + (begin + row) * target_stride + panel * COLUMNS * size
                    finish(at, at + apart, into_row, 0, 0, limit, alpha)

    return work
