"""Products in int8 by register tiles: y = x W^T + b, and SiLU(gate(x)) * up(x), which takes two products.

    y[r, c] = scale_x[r] * scale_w[c] * (sum over i of code_x[r, i] * code_w[c, i]) + b[c]

The sums are exact: int32 that wrap around, and the last one is below 2^31 for depths below MOST_DEPTH, since codes are
at least -128 and at most 127. Codes of x have 128 added (`quantize_rows`), so 128 times the sum of a column of W is
subtracted, which is known when W is packed. Scales and bias follow in float32, and y is rounded once. So y is the same
in every class of processors.

The weight is packed as in `matmul`, with a depth of 4 in a step; items, parts of the depth and prefetches are those of
`matmul`, too. Each panel has a row of scales, a row of what is subtracted and a row of biases (`PanelNumbers`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.epilogue import make_finish
from services.engine.kernels.cpu.int8_vectors import load_difference
from services.engine.kernels.cpu.intrinsics import ISA, float_pointer, njit
from services.engine.kernels.cpu.matmul import AHEAD, MOST_ROWS, PANELS_TOGETHER, WEIGHTS, padded
from services.engine.kernels.cpu.per_item import per_item, places
from services.engine.kernels.cpu.register_tiles import (
    COLUMNS,
    ROW_BYTES,
    STEP_BYTES,
    arithmetic_of_codes,
    multiply_rows,
)
from services.engine.kernels.cpu.vectors import LANES, load_floats, multiply_add, spread, store_floats

MOST_DEPTH = 1 << 17
DEPTH_OF_STEP = 4
MOST_STEPS = 1024  # multiplied at a time
SUMS_BYTES = 2 * ISA.tile_rows * ROW_BYTES
PARTIAL_BYTES = PANELS_TOGETHER * 2 * MOST_ROWS * ROW_BYTES
SCRATCH_BYTES = SUMS_BYTES + PARTIAL_BYTES  # for one thread
NUMBERS_BYTES = 3 * ROW_BYTES  # of a panel
_SUBTRACTED_AT, _BIAS_AT = ROW_BYTES, 2 * ROW_BYTES
_ZERO = 128  # the code of x = 0, as it is stored


def pack_codes(codes: Tensor, depth_of_block: int = DEPTH_OF_STEP) -> Tensor:
    """Packs int8 [out, depth] into panels, [out / 32, steps, 32, 4], in huge pages; zeros fill the last panel, and the
    depth up to whole blocks.
    """
    out, depth = codes.shape
    steps = -(-depth // depth_of_block) * (depth_of_block // DEPTH_OF_STEP)
    panels = WEIGHTS.empty(torch.Size((padded(out) // COLUMNS, steps, COLUMNS, DEPTH_OF_STEP)), codes.dtype)
    put_panels(panels, codes)
    return panels


def put_panels(panels: Tensor, codes: Tensor) -> None:
    """Writes int8 [out, depth] to its panels, filled up with zeros."""
    (out, depth), (num_panels, steps, _, _) = codes.shape, panels.shape
    whole = functional.pad(codes, (0, steps * DEPTH_OF_STEP - depth, 0, num_panels * COLUMNS - out))
    panels.copy_(whole.view(num_panels, COLUMNS, steps, DEPTH_OF_STEP).transpose(1, 2))


def pack_numbers(codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Packs what belongs to the columns of a product, float32 [panels, 3, 32]: scales; what is subtracted, int32; bias.

    codes: int8 [out, depth]. scales and bias: [out].
    """
    numbers = torch.zeros(3, padded(len(codes)))
    numbers[0, : len(codes)] = scales
    numbers[1].view(torch.int32)[: len(codes)] = _ZERO * codes.sum(dim=1, dtype=torch.int32)
    if bias is not None:
        numbers[2, : len(codes)] = bias
    return numbers.view(3, -1, COLUMNS).transpose(0, 1).contiguous()


def make_scale() -> Any:
    """Makes a function that kernels call: it replaces 32 sums, int32, by their numbers, float32, biases added.

    Its arguments: address of the sums; address of the panel's numbers; the scale of the row.
    """

    @njit(error_model="numpy")
    def scale_sums(sums: int, numbers: int, scale: float) -> None:
        of_row = spread(scale)
        for at in range(0, ROW_BYTES, LANES * 4):
            exact = load_difference(sums + at, numbers + _SUBTRACTED_AT + at)
            scaled = exact * load_floats(numbers + at)
            store_floats(sums + at, multiply_add(scaled, of_row, load_floats(numbers + _BIAS_AT + at)))

    return scale_sums


@per_item
def make_int8_matmul(dtype: str, *, gated: bool) -> Any:
    """Makes the kernel of a product. Items that are next to each other are panels of the same rows.

    Arguments of the kernel: codes of x and the bytes from row to row in them; the byte of a row at which its scale is;
    target, of this dtype, and the elements from row to row; packed weight; numbers of its panels; rows; steps; panels
    of the target; SCRATCH_BYTES for each thread, on a 64-byte border; rows (at most MOST_ROWS) and panels of an item;
    panels between the end of an item and the next item of its thread.

    gated: the first half of the weight's panels are gates, the second half are gated: SiLU(first half) * second half.
    """
    element, arithmetic = ELEMENTS[dtype], arithmetic_of_codes()
    arg = places(
        "codes stride scale_at target target_stride weight numbers rows steps panels scratch rows_at_once "
        "panels_at_once skipped"
    )
    parts, size, most_rows, a_bytes = 2 if gated else 1, element.size, ISA.tile_rows, arithmetic.a_bytes
    multiply, finish, scale_sums = multiply_rows(arithmetic), make_finish(element, gated=gated), make_scale()

    @njit
    def finish_rows(
        rows: int,
        sums: int,
        gated_sums: int,
        scales: int,
        stride: int,
        target: int,
        target_stride: int,
        numbers: int,
        gated_numbers: int,
    ) -> None:
        for row in range(rows):
            shift, scale = row * ROW_BYTES, float_pointer(scales + row * stride)[0]
            scale_sums(sums + shift, numbers, scale)
            if gated:
                scale_sums(gated_sums + shift, gated_numbers, scale)
            finish(sums + shift, gated_sums + shift, target + row * target_stride, 0, 0)

    @njit
    def work(a: Any, item: int, thread: int) -> None:
        weight, all_numbers, panels = a[arg.weight], a[arg.numbers], a[arg.panels]
        rows_at_once, panels_at_once = a[arg.rows_at_once], a[arg.panels_at_once]
        stride, target_stride = a[arg.stride], a[arg.target_stride] * size
        items = (panels + panels_at_once - 1) // panels_at_once  # that share their rows
        first_row, first_panel = item // items * rows_at_once, item % items * panels_at_once
        rows, end_panel = min(rows_at_once, a[arg.rows] - first_row), min(first_panel + panels_at_once, panels)
        code_rows = a[arg.codes] + first_row * stride
        target_rows = a[arg.target] + first_row * target_stride
        sums = a[arg.scratch] + thread * SCRATCH_BYTES
        partial = sums + SUMS_BYTES
        all_steps = a[arg.steps]
        chunks = (all_steps + MOST_STEPS - 1) // MOST_STEPS
        chunk_steps = (all_steps + chunks - 1) // chunks
        tiles = (rows + most_rows - 1) // most_rows
        group_size = PANELS_TOGETHER if chunks > 1 else panels_at_once
        for group in range(first_panel, end_panel, group_size):
            for step in range(0, all_steps, chunk_steps):
                steps, is_last = min(chunk_steps, all_steps - step), step + chunk_steps >= all_steps
                codes = code_rows + step * a_bytes
                for panel in range(group, min(group + group_size, end_panel)):
                    b = weight + (panel * all_steps + step) * STEP_BYTES
                    kept = partial + (panel - group) * parts * MOST_ROWS * ROW_BYTES
                    numbers = all_numbers + panel * NUMBERS_BYTES
                    following = panel + 1 if panel + 1 < end_panel else min(end_panel + a[arg.skipped], panels - 1)
                    for tile in range(tiles):
                        begin, end = tile * rows // tiles, (tile + 1) * rows // tiles
                        into, apart = sums, most_rows * ROW_BYTES
                        if chunks > 1:
                            into, apart = kept + begin * ROW_BYTES, MOST_ROWS * ROW_BYTES
                        for part in range(parts):
                            of_part = b + part * panels * all_steps * STEP_BYTES
                            # Each tile prefetches its share of the next panel; a single tile, what it reads soon.
                            ahead, ahead_step = of_part + AHEAD, STEP_BYTES
                            if tiles > 1:
                                ahead_step = STEP_BYTES // tiles + 1
                                ahead = of_part + (following - panel) * all_steps * STEP_BYTES
                                ahead += tile * steps * ahead_step
                            multiply(
                                end - begin,
                                codes + begin * stride,
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
                            finish_rows(
                                end - begin,
                                into,
                                into + apart,
                                code_rows + begin * stride + a[arg.scale_at],
                                stride,
                                target_rows + begin * target_stride + panel * COLUMNS * size,
                                target_stride,
                                numbers,
                                numbers + panels * NUMBERS_BYTES,
                            )

    return work
