"""Matrix products by register tiles: y = x W^T + b, and SiLU(gate(x)) * up(x), which takes two products.

The weight is packed in panels of 32 columns of y, and a panel step by step along the depth (see `register_tiles`;
`pack` packs a weight). An item's rows of x stay in the second-level cache while one panel after another comes from
memory; all rows are multiplied by a panel before the next one. If rows are too long for the caches, some panels are
multiplied along a part of the depth, then along the next part, with the partial sums kept in memory.
"""

from typing import Any

import torch
from numba import int64
from torch import Tensor

from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.epilogue import make_finish
from services.engine.kernels.cpu.huge_pages import WeightMemory
from services.engine.kernels.cpu.intrinsics import ISA, float_pointer, half_pointer, load_bfloat16, njit
from services.engine.kernels.cpu.per_item import per_item, places
from services.engine.kernels.cpu.register_tiles import (
    COLUMNS,
    ROW_BYTES,
    STEP_BYTES,
    Arithmetic,
    arithmetic_of,
    multiply_rows,
)
from services.engine.kernels.cpu.vectors import LANES, load_bfloat16s, store_floats

MOST_ROWS = 256  # of one item
MOST_DEPTH = 2048  # multiplied at a time
PANELS_TOGETHER = 8
AHEAD = 4096  # bytes
SUMS_BYTES = 2 * ISA.tile_rows * ROW_BYTES
PARTIAL_BYTES = PANELS_TOGETHER * 2 * MOST_ROWS * ROW_BYTES
WIDE_ROW_BYTES = MOST_DEPTH * 4 + 64  # an odd number of cache lines, so that rows have different places in a cache
SCRATCH_BYTES = SUMS_BYTES + PARTIAL_BYTES + MOST_ROWS * WIDE_ROW_BYTES  # for one thread
# Weights lie in huge pages: on an EPYC of Zen 4, steps of 1 and 16 rows take a seventh less time so.
WEIGHTS = WeightMemory()


def padded(columns: int) -> int:
    """Returns the number of columns, rounded up to whole panels."""
    return -(-columns // COLUMNS) * COLUMNS


def pack(weight: Tensor) -> Tensor:
    """Packs [out, depth] into panels, [out / 32, steps, 32, depth of a step], in huge pages; zeros fill the last panel.

    A step has a depth of 2 in bfloat16, where the depth must be even, and of 1 in float32.
    """
    out, depth = weight.shape
    of_step = 2 if weight.dtype == torch.bfloat16 else 1
    panels = WEIGHTS.empty(torch.Size((padded(out) // COLUMNS, depth // of_step, COLUMNS, of_step)), weight.dtype)
    put_panels(panels, weight)
    return panels


def put_panels(panels: Tensor, weight: Tensor) -> None:
    """Writes [out, depth] to its panels, without a copy of the whole; zeros fill the last panel."""
    out, num_whole = len(weight), len(weight) // COLUMNS
    by_steps = weight.unflatten(1, panels.shape[1::2])
    panels[:num_whole].copy_(by_steps[: num_whole * COLUMNS].unflatten(0, (num_whole, COLUMNS)).transpose(1, 2))
    if rest := out - num_whole * COLUMNS:
        panels[num_whole].zero_()
        panels[num_whole, :, :rest].copy_(by_steps[num_whole * COLUMNS :].transpose(0, 1))


@per_item
def make_matmul(dtype: str, *, gated: bool) -> Any:
    """Makes the kernel of a product. Items that are next to each other are panels of the same rows.

    Arguments of the kernel: x and the elements from row to row; target and the elements from row to row; packed weight;
    float32 bias, or 0; rows; depth; panels of the target; SCRATCH_BYTES for each thread, on a 64-byte border; rows (at
    most MOST_ROWS) and panels of an item; panels between the end of an item and the next item of its thread.

    gated: the first half of the weight's panels are gates, the second half are gated: SiLU(first half) * second half.
    """
    element, arithmetic = ELEMENTS[dtype], arithmetic_of(dtype)
    arg = places(
        "x stride target target_stride weight bias rows depth panels scratch rows_at_once panels_at_once skipped"
    )
    parts, size, most_rows = 2 if gated else 1, element.size, ISA.tile_rows
    widens = arithmetic is Arithmetic.WIDENED
    a_bytes, of_step = arithmetic.a_bytes, arithmetic.depth
    most_steps = MOST_DEPTH // of_step
    multiply, finish = multiply_rows(arithmetic), make_finish(element, gated=gated)

    @njit
    def finish_rows(
        rows: int, sums: int, gated_sums: int, target: int, target_stride: int, bias: int, gated_bias: int
    ) -> None:
        for row in range(rows):
            shift = row * ROW_BYTES
            finish(sums + shift, gated_sums + shift, target + row * target_stride, bias, gated_bias)

    @njit
    def work(a: Any, item: int, thread: int) -> None:
        weight, bias, panels = a[arg.weight], a[arg.bias], a[arg.panels]
        rows_at_once, panels_at_once = a[arg.rows_at_once], a[arg.panels_at_once]
        target_stride = a[arg.target_stride] * size
        items = (panels + panels_at_once - 1) // panels_at_once  # that share their rows
        first_row, first_panel = item // items * rows_at_once, item % items * panels_at_once
        rows, end_panel = min(rows_at_once, a[arg.rows] - first_row), min(first_panel + panels_at_once, panels)
        x_rows = a[arg.x] + first_row * a[arg.stride] * size
        target_rows = a[arg.target] + first_row * target_stride
        x_stride = a[arg.stride] * size
        sums = a[arg.scratch] + thread * SCRATCH_BYTES
        partial = sums + SUMS_BYTES
        wide = partial + PARTIAL_BYTES
        all_steps = a[arg.depth] // of_step
        chunks = (all_steps + most_steps - 1) // most_steps
        chunk_steps = (all_steps + chunks - 1) // chunks
        tiles = (rows + most_rows - 1) // most_rows
        group_size = PANELS_TOGETHER if chunks > 1 else panels_at_once
        for group in range(first_panel, end_panel, group_size):
            for step in range(0, all_steps, chunk_steps):
                steps, is_last = min(chunk_steps, all_steps - step), step + chunk_steps >= all_steps
                x, stride = x_rows + step * of_step * size, x_stride
                if widens:
                    if chunks > 1 or group == first_panel:
                        widen_rows(x, stride, rows, steps * of_step, wide)
                    x, stride = wide, int64(WIDE_ROW_BYTES)
                for panel in range(group, min(group + group_size, end_panel)):
                    b = weight + (panel * all_steps + step) * STEP_BYTES
                    kept = partial + (panel - group) * parts * MOST_ROWS * ROW_BYTES
                    panel_bias = bias + panel * COLUMNS * 4 if bias != 0 else 0
                    gated_bias = panel_bias + panels * COLUMNS * 4 if bias != 0 else 0
                    following = panel + 1 if panel + 1 < end_panel else min(end_panel + a[arg.skipped], panels - 1)
                    for tile in range(tiles):
                        begin, end = tile * rows // tiles, (tile + 1) * rows // tiles
                        into, apart = sums, int64(most_rows * ROW_BYTES)
                        if chunks > 1:
                            into, apart = kept + begin * ROW_BYTES, int64(MOST_ROWS * ROW_BYTES)
                        for part in range(parts):
                            of_part = b + part * panels * all_steps * STEP_BYTES
                            # Each tile prefetches its share of the next panel; a single tile, what it reads soon.
                            ahead, ahead_step = of_part + AHEAD, int64(STEP_BYTES)
                            if tiles > 1:
                                ahead_step = STEP_BYTES // tiles + 1
                                ahead = of_part + (following - panel) * all_steps * STEP_BYTES
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
                            finish_rows(end - begin, into, into + apart, target, target_stride, panel_bias, gated_bias)

    return work


@njit
def widen_rows(x: int, stride: int, rows: int, width: int, wide: int) -> None:
    """Converts rows of bfloat16 to float32."""
    whole = width // LANES * LANES
    for row in range(rows):
        source, target = x + row * stride, wide + row * WIDE_ROW_BYTES
        for i in range(0, whole, LANES):
            store_floats(target + i * 4, load_bfloat16s(source + i * 2))
        for i in range(whole, width):
            float_pointer(target)[i] = load_bfloat16(half_pointer(source), i)
