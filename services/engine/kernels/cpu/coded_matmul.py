"""Matrix products of codes: y = x W^T + b, and SiLU(gate(x)) * up(x), which takes two products.

`make_few` multiplies codes as they are (`coded_tiles`): each panel comes from memory once, for all rows, and a tile's
rows are multiplied by what the caches hold of it. `make_many` unpacks a panel, along a part of the depth, and
multiplies it as `matmul` does (`coded_unpacking`).
"""

from typing import Any

from numba import int64

from services.engine.kernels.cpu.amx import matmul as amx_matmul
from services.engine.kernels.cpu.amx import tiles as amx
from services.engine.kernels.cpu.coded_inputs import make_prepare_row
from services.engine.kernels.cpu.coded_panels import CodedPanels, step_bytes, step_depth
from services.engine.kernels.cpu.coded_tiles import CODED_ROWS, multiply_codes
from services.engine.kernels.cpu.coded_unpacking import unpack_codes
from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.epilogue import make_finish
from services.engine.kernels.cpu.intrinsics import ISA, njit
from services.engine.kernels.cpu.matmul import AHEAD, MOST_DEPTH, MOST_ROWS, PANELS_TOGETHER
from services.engine.kernels.cpu.per_item import per_item, places
from services.engine.kernels.cpu.register_tiles import (
    COLUMNS,
    ROW_BYTES,
    Arithmetic,
    arithmetic_of,
    multiply_rows,
)
from services.engine.quantization.codes import Code

OWN_ROWS = 4  # so few are prepared by each item; more by a kernel before
FEW_SUMS_BYTES = 2 * CODED_ROWS * ROW_BYTES
# Of `make_many`, for one thread: an unpacked part of a panel, sums, and the configuration of AMX of other code.
UNPACKED_BYTES = MOST_DEPTH * COLUMNS * 4
_PANEL_SUMS_BYTES = 2 * MOST_ROWS * ROW_BYTES
_ALL_SUMS_BYTES, _CONFIG_BYTES = PANELS_TOGETHER * _PANEL_SUMS_BYTES, 64
SCRATCH_BYTES = UNPACKED_BYTES + _ALL_SUMS_BYTES + _CONFIG_BYTES


def coded_arithmetic(dtype: str) -> Arithmetic:
    """Returns the arithmetic of products of codes with x of this dtype."""
    return Arithmetic.PAIRS if arithmetic_of(dtype) is Arithmetic.PAIRS else Arithmetic.SINGLES


@per_item
def make_few(dtype: str, code: Code, scales: str, *, has_offsets: bool) -> Any:
    """Makes the kernel of a product of few rows. Items are panels, with all rows.

    Arguments of the kernel: x and the elements from row to row; copies of x, or 0, and bytes from row to row; sums of x
    over groups, or 0, and bytes from row to row; rows; depth; 1 if each item prepares the rows, each thread in its
    own OWN_ROWS rows of copies and sums, 0 if they are prepared; order; target and the elements from row to row;
    panels; bytes of a panel; float32 bias, or 0; panels of the target; groups; steps of a group, and of the last; table
    of the codes; FEW_SUMS_BYTES for each thread; panels of an item; 2 if the
    first half of the panels are gates and the second half are gated, SiLU(first half) * second half, else 1.
    """
    element, arithmetic = ELEMENTS[dtype], coded_arithmetic(dtype)
    arg = places(
        "x stride copies copies_row sums sums_row rows depth prepares order target target_stride weight panel_bytes "
        "bias panels groups steps last_steps table scratch panels_at_once parts"
    )
    size, of_step = element.size, step_depth(code)
    multiply = multiply_codes(arithmetic, code, scales, has_offsets=has_offsets)
    finish, finish_gated = make_finish(element, gated=False), make_finish(element, gated=True)
    prepare = make_prepare_row(dtype, widens=dtype == "bfloat16" and arithmetic is Arithmetic.SINGLES)

    @njit
    def work(a: Any, item: int, thread: int) -> None:
        rows, parts, panels, panel_bytes = a[arg.rows], a[arg.parts], a[arg.panels], a[arg.panel_bytes]
        groups, steps, last_steps = a[arg.groups], a[arg.steps], a[arg.last_steps]
        x, x_row, sums, sums_row = a[arg.x], a[arg.stride] * size, a[arg.sums], a[arg.sums_row]
        if a[arg.copies] != 0:
            x, x_row = a[arg.copies], a[arg.copies_row]
        if a[arg.prepares] != 0:
            padded_depth = ((groups - 1) * steps + last_steps) * of_step
            if sums != 0:
                sums += thread * OWN_ROWS * sums_row
            if a[arg.copies] != 0:
                x += thread * OWN_ROWS * x_row
            for row in range(rows):
                prepare(
                    a[arg.x] + row * a[arg.stride] * size,
                    a[arg.order],
                    a[arg.depth],
                    padded_depth,
                    x + row * x_row if a[arg.copies] != 0 else 0,
                    steps * of_step,
                    sums + row * sums_row if sums != 0 else 0,
                )
        totals = a[arg.scratch] + thread * FEW_SUMS_BYTES
        apart = CODED_ROWS * ROW_BYTES
        tiles = (rows + CODED_ROWS - 1) // CODED_ROWS
        target_row = a[arg.target_stride] * size
        first = item * a[arg.panels_at_once]
        for panel in range(first, min(first + a[arg.panels_at_once], panels)):
            b = a[arg.weight] + panel * panel_bytes
            bias = a[arg.bias] + panel * COLUMNS * 4 if a[arg.bias] != 0 else 0
            gated_bias = bias + panels * COLUMNS * 4 if bias != 0 else 0
            for tile in range(tiles):
                begin, end = tile * rows // tiles, (tile + 1) * rows // tiles
                for part in range(parts):
                    multiply(
                        end - begin,
                        x + begin * x_row,
                        x_row,
                        sums + begin * sums_row,
                        sums_row,
                        b + part * panels * panel_bytes,
                        groups,
                        steps,
                        last_steps,
                        totals + part * apart,
                        a[arg.table],
                        AHEAD if tiles == 1 else panel_bytes,
                    )
                target = a[arg.target] + begin * target_row + panel * COLUMNS * size
                for row in range(end - begin):
                    at = totals + row * ROW_BYTES
                    if parts == 2:
                        finish_gated(at, at + apart, target + row * target_row, bias, gated_bias)
                    else:
                        finish(at, at + apart, target + row * target_row, bias, gated_bias)

    return work


@per_item
def make_many(dtype: str, code: Code, scales: str, *, has_offsets: bool, by_amx: bool) -> Any:
    """Makes the kernel of a product of many rows. Items that are next to each other are panels of the same rows.

    Arguments of the kernel: x, prepared if it has to be, and bytes from row to row; rows; target and the elements from
    row to row; panels; bytes of a panel; bytes of the scales and offsets of a group; float32 bias, or 0; panels of the
    target; groups; steps of a group, and of the last; table of the codes; SCRATCH_BYTES for each thread; rows (at most
    MOST_ROWS) and panels of an item; 1 or 2, as in `make_few`; `amx.matmul.block_configs`.

    by_amx: AMX multiplies what is unpacked: bfloat16, along whole blocks of the depth.
    """
    element, arithmetic = ELEMENTS[dtype], coded_arithmetic(dtype)
    arg = places(
        "x x_row rows target target_stride weight panel_bytes tail_bytes bias panels groups steps last_steps table "
        "scratch rows_at_once panels_at_once parts configs"
    )
    size, code_bytes = element.size, step_bytes(code)
    words, a_bytes, most_rows = step_depth(code) // arithmetic.depth, arithmetic.a_bytes, ISA.tile_rows
    most_steps = MOST_DEPTH // step_depth(code)
    unpack = unpack_codes(arithmetic, code, scales, has_offsets=has_offsets)
    multiply = multiply_rows(arithmetic)
    finish, finish_gated = make_finish(element, gated=False), make_finish(element, gated=True)

    @njit
    def work(a: Any, item: int, thread: int) -> None:
        parts, panels, panels_at_once = a[arg.parts], a[arg.panels], a[arg.panels_at_once]
        panel_bytes = a[arg.panel_bytes]
        groups, group_steps, last_steps = a[arg.groups], a[arg.steps], a[arg.last_steps]
        items = (panels + panels_at_once - 1) // panels_at_once  # that share their rows
        first_row, first_panel = item // items * a[arg.rows_at_once], item % items * panels_at_once
        rows, end_panel = min(a[arg.rows_at_once], a[arg.rows] - first_row), min(first_panel + panels_at_once, panels)
        target_row = a[arg.target_stride] * size
        x_row = a[arg.x_row]
        b = a[arg.scratch] + thread * SCRATCH_BYTES
        sums = b + UNPACKED_BYTES
        all_steps = (groups - 1) * group_steps + last_steps
        chunk_steps = most_steps if groups == 1 else most_steps // group_steps * group_steps
        group_bytes = group_steps * code_bytes + a[arg.tail_bytes]
        tiles = (rows + most_rows - 1) // most_rows
        if by_amx:
            amx.save_config(sums + _ALL_SUMS_BYTES)
        together = PANELS_TOGETHER if chunk_steps < all_steps else panels_at_once
        for first in range(first_panel, end_panel, together):
            for step in range(0, all_steps, chunk_steps):
                steps, is_last = min(chunk_steps, all_steps - step), step + chunk_steps >= all_steps
                x = a[arg.x] + first_row * x_row + step * words * a_bytes
                own_groups, own_steps, own_last, between = (
                    int64(1),
                    steps,
                    steps,
                    (all_steps - steps - step) * code_bytes,
                )
                if groups > 1:
                    own_groups, own_steps, between = (steps + group_steps - 1) // group_steps, group_steps, int64(0)
                    own_last = steps - (own_groups - 1) * group_steps
                for panel in range(first, min(first + together, end_panel)):
                    own_sums = sums + (panel - first if chunk_steps < all_steps else 0) * _PANEL_SUMS_BYTES
                    codes = a[arg.weight] + panel * panel_bytes
                    codes += step // group_steps * group_bytes if groups > 1 else step * code_bytes
                    for part in range(parts):
                        unpack(
                            codes + part * panels * panel_bytes,
                            own_groups,
                            own_steps,
                            own_last,
                            between,
                            b,
                            a[arg.table],
                        )
                        if by_amx:
                            into = own_sums + part * (MOST_ROWS * ROW_BYTES)
                            blocks = steps * words * 2 // amx_matmul.BLOCK
                            amx_matmul.multiply_blocks(rows, x, x_row, b, blocks, into, step == 0, a[arg.configs])
                            continue
                        ahead_step = panel_bytes // (all_steps * words * tiles) + 1
                        for tile in range(tiles):
                            begin, end = tile * rows // tiles, (tile + 1) * rows // tiles
                            multiply(
                                end - begin,
                                x + begin * x_row,
                                x_row,
                                a_bytes,
                                b,
                                steps * words,
                                own_sums + part * (MOST_ROWS * ROW_BYTES) + begin * ROW_BYTES,
                                step == 0,
                                codes + part * panels * panel_bytes + panel_bytes + tile * steps * words * ahead_step,
                                ahead_step,
                            )
                    if is_last:
                        bias = a[arg.bias] + panel * COLUMNS * 4 if a[arg.bias] != 0 else 0
                        gated_bias = bias + panels * COLUMNS * 4 if bias != 0 else 0
                        target = a[arg.target] + first_row * target_row + panel * COLUMNS * size
                        for row in range(rows):
                            at = own_sums + row * ROW_BYTES
                            if parts == 2:
                                gated = at + MOST_ROWS * ROW_BYTES
                                finish_gated(at, gated, target + row * target_row, bias, gated_bias)
                            else:
                                finish(at, at, target + row * target_row, bias, gated_bias)
        if by_amx:
            amx.load_config(sums + _ALL_SUMS_BYTES)

    return work


def fits_amx(panels: CodedPanels, dtype: str) -> bool:
    """Returns True if AMX can multiply what is unpacked of these panels: each part of the depth is whole blocks."""
    block, depth = amx_matmul.BLOCK, panels.depth
    group = panels.group_steps * step_depth(panels.code)
    in_one = panels.num_groups == 1 or panels.padded_depth <= MOST_DEPTH
    is_whole = depth % block == 0 and (in_one or MOST_DEPTH // group * group % block == 0)
    return ISA.has_amx and dtype == "bfloat16" and is_whole
