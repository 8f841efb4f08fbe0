"""Matrix products of codes: y = x W^T + b, and SiLU(gate(x)) * up(x), which takes two products."""

from typing import Any

from numba import float32

from services.engine.kernels.cpu.amx import matmul as amx_matmul
from services.engine.kernels.cpu.coded_inputs import make_prepare_row
from services.engine.kernels.cpu.coded_panels import CodedPanels, step_depth
from services.engine.kernels.cpu.coded_products import (
    FEW_SUMS_BYTES,
    SCRATCH_BYTES,
    coded_arithmetic,
    make_few_product,
    make_many_product,
)
from services.engine.kernels.cpu.elements import ELEMENTS, Element
from services.engine.kernels.cpu.epilogue import make_finish
from services.engine.kernels.cpu.intrinsics import ISA, njit
from services.engine.kernels.cpu.matmul import MOST_DEPTH
from services.engine.kernels.cpu.per_item import per_item, places
from services.engine.kernels.cpu.register_tiles import COLUMNS, Arithmetic
from services.engine.kernels.cpu.scale_forms import ScaleForm
from services.engine.quantization.codes import Code

OWN_ROWS = 4  # so few are prepared by each item; more by a kernel before


@per_item
def make_few(dtype: str, code: Code, scales: ScaleForm, *, has_offsets: bool) -> Any:
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
    product = make_few_product(dtype, code, scales, _make_finish(element), has_offsets=has_offsets)
    prepare = make_prepare_row(dtype, widens=dtype == "bfloat16" and arithmetic is Arithmetic.SINGLES)

    @njit
    def work(a: Any, item: int, thread: int) -> None:
        rows, panels, panel_bytes, groups, steps = (
            a[arg.rows],
            a[arg.panels],
            a[arg.panel_bytes],
            a[arg.groups],
            a[arg.steps],
        )
        x, x_row, sums, sums_row = a[arg.x], a[arg.stride] * size, a[arg.sums], a[arg.sums_row]
        if a[arg.copies] != 0:
            x, x_row = a[arg.copies], a[arg.copies_row]
        if a[arg.prepares] != 0:
            padded_depth = ((groups - 1) * steps + a[arg.last_steps]) * of_step
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
        first = item * a[arg.panels_at_once]
        product(
            x,
            x_row,
            sums,
            sums_row,
            rows,
            a[arg.weight],
            panel_bytes,
            panels * panel_bytes,
            a[arg.parts],
            a[arg.bias],
            panels * COLUMNS * 4,
            first,
            min(first + a[arg.panels_at_once], panels),
            groups,
            steps,
            a[arg.last_steps],
            a[arg.table],
            a[arg.scratch] + thread * FEW_SUMS_BYTES,
            a[arg.target],
            a[arg.target_stride] * size,
            float32(0),
            float32(0),
        )

    return work


@per_item
def make_many(dtype: str, code: Code, scales: ScaleForm, *, has_offsets: bool, by_amx: bool) -> Any:
    """Makes the kernel of a product of many rows. Items that are next to each other are panels of the same rows.

    Arguments of the kernel: x, prepared if it has to be, and bytes from row to row; rows; target and the elements from
    row to row; panels; bytes of a panel; bytes of the scales and offsets of a block of groups; float32 bias, or 0;
    panels of the target; groups; steps of a group, and of the last; table of the codes; SCRATCH_BYTES for each thread;
    rows (at most MOST_ROWS) and panels of an item; 1 or 2, as in `make_few`; `amx.matmul.block_configs`.

    by_amx: see `make_many_product`.
    """
    element = ELEMENTS[dtype]
    arg = places(
        "x x_row rows target target_stride weight panel_bytes tail_bytes bias panels groups steps last_steps table "
        "scratch rows_at_once panels_at_once parts configs"
    )
    size = element.size
    product = make_many_product(dtype, code, scales, _make_finish(element), has_offsets=has_offsets, by_amx=by_amx)

    @njit
    def work(a: Any, item: int, thread: int) -> None:
        panels, panel_bytes, panels_at_once = a[arg.panels], a[arg.panel_bytes], a[arg.panels_at_once]
        items = (panels + panels_at_once - 1) // panels_at_once  # that share their rows
        first_row, first_panel = item // items * a[arg.rows_at_once], item % items * panels_at_once
        target_row = a[arg.target_stride] * size
        product(
            a[arg.x] + first_row * a[arg.x_row],
            a[arg.x_row],
            min(a[arg.rows_at_once], a[arg.rows] - first_row),
            a[arg.weight],
            panel_bytes,
            panels * panel_bytes,
            a[arg.parts],
            a[arg.bias],
            panels * COLUMNS * 4,
            first_panel,
            min(first_panel + panels_at_once, panels),
            a[arg.groups],
            a[arg.steps],
            a[arg.last_steps],
            a[arg.table],
            a[arg.tail_bytes],
            a[arg.scratch] + thread * SCRATCH_BYTES,
            a[arg.target] + first_row * target_row,
            target_row,
            a[arg.configs],
            float32(0),
            float32(0),
        )

    return work


def _make_finish(element: Element) -> Any:
    """Makes a `finish` that gates if there are two parts."""
    plain, gated = make_finish(element, gated=False), make_finish(element, gated=True)

    @njit
    def finish(
        sums: int, ups: int, target: int, bias: int, up_bias: int, parts: int, _limit: float, _alpha: float
    ) -> None:
        if parts == 2:
            gated(sums, ups, target, bias, up_bias)
        else:
            plain(sums, ups, target, bias, up_bias)

    return finish


def fits_amx(panels: CodedPanels, dtype: str) -> bool:
    """Returns True if AMX can multiply what is unpacked of these panels: each part of the depth is whole blocks."""
    block, depth = amx_matmul.BLOCK, panels.depth
    block_depth = panels.group_steps * panels.scales.block_groups * step_depth(panels.code)
    in_one = panels.num_groups == 1 or panels.padded_depth <= MOST_DEPTH
    is_whole = depth % block == 0 and (in_one or MOST_DEPTH // block_depth * block_depth % block == 0)
    return ISA.has_amx and dtype == "bfloat16" and is_whole
