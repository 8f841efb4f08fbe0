"""Matrix products of experts, by register tiles: each block of rows is multiplied by the weight of its expert.

A plan says which expert a block has, and which rows (see `routing`). The weight of an expert is packed in panels as
`matmul` packs it, step by step along the depth; of gate and up, the two panels of the same columns are next to each
other, so that an item reads one stretch of memory:

    weight [experts, panels, 1 or 2, steps, 32 columns, depth of a step]

A row's products are added up in the order of the depth whatever rows are beside it, so its sums do not depend on them.
"""

from enum import Enum
from typing import Any

from numba import float32, int64

from services.engine.kernels.cpu.elements import ELEMENTS, Element
from services.engine.kernels.cpu.epilogue import make_finish
from services.engine.kernels.cpu.exponential import LOG2_E, exp2
from services.engine.kernels.cpu.intrinsics import (
    ISA,
    float64_of,
    float_pointer,
    half_pointer,
    int_pointer,
    load_bfloat16,
    njit,
)
from services.engine.kernels.cpu.matmul import (
    AHEAD,
    MOST_DEPTH,
    MOST_ROWS,
    PANELS_TOGETHER,
    PARTIAL_BYTES,
    SCRATCH_BYTES,
    SUMS_BYTES,
    WIDE_ROW_BYTES,
)
from services.engine.kernels.cpu.per_item import per_item, places
from services.engine.kernels.cpu.register_tiles import (
    COLUMNS,
    ROW_BYTES,
    STEP_BYTES,
    Arithmetic,
    arithmetic_of,
    multiply_rows,
)
from services.engine.kernels.cpu.routing import item_of_plan
from services.engine.kernels.cpu.vectors import (
    LANES,
    divide,
    larger_of,
    load_bfloat16s,
    load_floats,
    spread,
    store_floats,
    where_above,
)


class Epilogue(Enum):
    """The steps between a product and what is written."""

    PLAIN = "plain"
    SILU = "silu"  # SiLU(gate) * up
    CLAMPED = "clamped"  # gate * sigmoid(alpha * gate) * (up + 1) of clamped numbers (OpenAI 2025, arXiv 2508.10925)

    @property
    def parts(self) -> int:
        """Returns how many products it takes."""
        return 1 if self is Epilogue.PLAIN else 2


@per_item
def make_grouped_matmul(dtype: str, epilogue: Epilogue) -> Any:
    """Makes the kernel of the products of experts. Items that are next to each other are panels of the same block.

    Arguments of the kernel: x and the elements from row to row; the row of x of each pair, int32, or 0 where x has one
    for each pair; plan; target and the elements from row to row; packed weight; float32 biases [experts, parts, columns
    of whole panels], or 0; depth; panels of the target; SCRATCH_BYTES for each thread, on a 64-byte border; panels of
    an item; panels between the end of an item and the next item of its thread; limit and alpha of CLAMPED.
    """
    element, arithmetic = ELEMENTS[dtype], arithmetic_of(dtype)
    arg = places(
        "x stride rows_of_x plan target target_stride weight bias depth panels scratch panels_at_once skipped "
        "limit alpha"
    )
    parts, size, most_rows = epilogue.parts, element.size, ISA.tile_rows
    widens = arithmetic is Arithmetic.WIDENED
    a_bytes, of_step = arithmetic.a_bytes, arithmetic.depth
    most_steps = MOST_DEPTH // of_step
    multiply, finish, read_rows = (
        multiply_rows(arithmetic),
        make_grouped_finish(element, epilogue),
        _make_read_rows(dtype),
    )

    @njit
    def work(a: Any, item: int, thread: int) -> None:
        panels, panels_at_once = a[arg.panels], a[arg.panels_at_once]
        expert, first, rows, first_panel, end_panel = item_of_plan(a[arg.plan], item, panels, panels_at_once)
        if rows == 0:
            return
        all_steps = a[arg.depth] // of_step
        weight = a[arg.weight] + expert * panels * parts * all_steps * STEP_BYTES
        bias = a[arg.bias] + expert * parts * panels * COLUMNS * 4 if a[arg.bias] != 0 else 0
        target_stride, x_stride = a[arg.target_stride] * size, a[arg.stride] * size
        target_rows = a[arg.target] + first * target_stride
        limit, alpha = float32(float64_of(a[arg.limit])), float32(float64_of(a[arg.alpha]))
        sums = a[arg.scratch] + thread * SCRATCH_BYTES
        partial = sums + SUMS_BYTES
        wide = partial + PARTIAL_BYTES
        chunks = (all_steps + most_steps - 1) // most_steps
        chunk_steps = (all_steps + chunks - 1) // chunks
        tiles = (rows + most_rows - 1) // most_rows
        group_size = PANELS_TOGETHER if chunks > 1 else panels_at_once
        rows_of_x = a[arg.rows_of_x]
        copies = widens or rows_of_x != 0
        for group in range(first_panel, end_panel, group_size):
            for step in range(0, all_steps, chunk_steps):
                steps, is_last = min(chunk_steps, all_steps - step), step + chunk_steps >= all_steps
                x, stride = a[arg.x] + step * of_step * size, x_stride
                if copies:
                    if chunks > 1 or group == first_panel:
                        read_rows(x, stride, rows_of_x, first, rows, steps * of_step, wide)
                    x, stride = wide, int64(WIDE_ROW_BYTES)
                else:
                    x += first * stride
                for panel in range(group, min(group + group_size, end_panel)):
                    b = weight + (panel * parts * all_steps + step) * STEP_BYTES
                    kept = partial + (panel - group) * parts * MOST_ROWS * ROW_BYTES
                    panel_bias = bias + panel * COLUMNS * 4 if bias != 0 else 0
                    up_bias = panel_bias + panels * COLUMNS * 4 if bias != 0 else 0
                    following = panel + 1 if panel + 1 < end_panel else min(end_panel + a[arg.skipped], panels - 1)
                    for tile in range(tiles):
                        begin, end = tile * rows // tiles, (tile + 1) * rows // tiles
                        into, apart = sums, int64(most_rows * ROW_BYTES)
                        if chunks > 1:
                            into, apart = kept + begin * ROW_BYTES, int64(MOST_ROWS * ROW_BYTES)
                        for part in range(parts):
                            of_part = b + part * all_steps * STEP_BYTES
                            # Each tile prefetches its share of the next panel; a single tile, what it reads soon.
                            ahead, ahead_step = of_part + AHEAD, int64(STEP_BYTES)
                            if tiles > 1:
                                ahead_step = STEP_BYTES // tiles + 1
                                ahead = of_part + (following - panel) * parts * all_steps * STEP_BYTES
                                ahead += tile * steps * ahead_step
                            multiply(
                                end - begin,
                                x + begin * stride,
                                stride,
                                a_bytes,
                                of_part,
                                steps,
                                into + part * apart,
                                step == 0,
                                ahead,
                                ahead_step,
                            )
                        if is_last:
                            target = target_rows + begin * target_stride + panel * COLUMNS * size
                            for row in range(end - begin):
                                shift = row * ROW_BYTES
                                finish(
                                    into + shift,
                                    into + apart + shift,
                                    target + row * target_stride,
                                    panel_bias,
                                    up_bias,
                                    limit,
                                    alpha,
                                )

    return work


def _make_read_rows(dtype: str) -> Any:
    """Makes a function that kernels call: it copies rows of x next to each other, as the products take them.

    Its arguments: address of x, and bytes from row to row; the rows of x, int32, or 0 for all; the first pair; rows;
    elements of a row; address of the copies, WIDE_ROW_BYTES from row to row.
    """
    widens, size = arithmetic_of(dtype) is Arithmetic.WIDENED, ELEMENTS[dtype].size

    @njit
    def read_rows(x: int, stride: int, rows_of_x: int, first: int, rows: int, width: int, wide: int) -> None:
        whole = width // LANES * LANES if widens else width * size // 64 * 64 // size
        for row in range(rows):
            source_row = int64(int_pointer(rows_of_x)[first + row]) if rows_of_x != 0 else first + row
            source, target = x + source_row * stride, wide + row * WIDE_ROW_BYTES
            if widens:
                for i in range(0, whole, LANES):
                    store_floats(target + i * 4, load_bfloat16s(source + i * 2))
                for i in range(whole, width):
                    float_pointer(target)[i] = load_bfloat16(half_pointer(source), i)
            else:
                for at in range(0, whole * size, 64):
                    store_floats(target + at, load_floats(source + at))
                for i in range(whole * size // 2, width * size // 2):
                    half_pointer(target)[i] = half_pointer(source)[i]

    return read_rows


def make_grouped_finish(element: Element, epilogue: Epilogue) -> Any:
    """Makes a function like that of `make_finish`, which also takes limit and alpha."""
    if epilogue is Epilogue.CLAMPED:
        return _make_clamped_finish(element)
    plain = make_finish(element, gated=epilogue is Epilogue.SILU)

    @njit(error_model="numpy")
    def finish(sums: int, ups: int, target: int, bias: int, up_bias: int, _limit: float, _alpha: float) -> None:
        plain(sums, ups, target, bias, up_bias)

    return finish


def _make_clamped_finish(element: Element) -> Any:
    """Makes the function of CLAMPED, which rounds once."""
    store_vector, size = element.store_vector, element.size

    @njit(error_model="numpy")
    def biased(sums: int, bias: int) -> Any:
        return load_floats(sums) + load_floats(bias) if bias != 0 else load_floats(sums)

    @njit(error_model="numpy")
    def finish(sums: int, ups: int, target: int, bias: int, up_bias: int, limit: float, alpha: float) -> None:
        most, one = spread(limit), spread(float32(1))
        for at in range(0, COLUMNS * 4, LANES * 4):
            gate = biased(sums + at, bias + at if bias != 0 else 0)
            up = biased(ups + at, up_bias + at if up_bias != 0 else 0)
            gate = where_above(gate, most, most, gate)
            up = larger_of(spread(-limit), where_above(up, most, most, up))
            weighed = divide(gate, one + exp2(gate * spread(alpha * float32(-LOG2_E))))
            store_vector(target + at // 4 * size, weighed * (up + one))

    return finish
