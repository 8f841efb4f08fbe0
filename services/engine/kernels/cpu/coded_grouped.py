"""Matrix products of experts whose weights stay in codes: each block of rows is multiplied by its expert's panels.

    panels [experts, parts, panels, bytes of a panel]

A plan says which expert a block has, and which rows (see `routing`). Rows of x are prepared beforehand, in the order of
the pairs (`coded_inputs`).
"""

from typing import Any

from numba import float32, int64

from services.engine.kernels.cpu.coded_inputs import make_prepare_row
from services.engine.kernels.cpu.coded_products import (
    SCRATCH_BYTES,
    make_few_product,
    make_many_product,
)
from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.grouped_matmul import Epilogue, make_grouped_finish
from services.engine.kernels.cpu.intrinsics import float64_of, int_pointer, njit
from services.engine.kernels.cpu.per_item import per_item, places
from services.engine.kernels.cpu.register_tiles import COLUMNS
from services.engine.kernels.cpu.routing import item_of_plan
from services.engine.kernels.cpu.scale_forms import ScaleForm
from services.engine.quantization.codes import Code


@per_item
def make_prepare_pairs(dtype: str, *, widens: bool) -> Any:
    """Makes the kernel that prepares the row of x of each pair, which is an item.

    Arguments of the kernel: x and the elements from row to row; the row of x of each pair, int32, or 0 where x has one
    for each pair; how many pairs there are, int32, of whose number the items may be more; depth; depth of whole steps;
    copies, and bytes from row to row; depth of a group; sums, or 0, and bytes from row to row.
    """
    arg = places("x stride rows_of_x num_pairs depth padded_depth target target_row group sums sums_row")
    size, prepare = ELEMENTS[dtype].size, make_prepare_row(dtype, widens=widens)

    @njit
    def work(a: Any, item: int, _thread: int) -> None:
        if item >= int_pointer(a[arg.num_pairs])[0]:
            return
        row = int64(int_pointer(a[arg.rows_of_x])[item]) if a[arg.rows_of_x] != 0 else item
        sums = a[arg.sums] + item * a[arg.sums_row] if a[arg.sums] != 0 else 0
        target = a[arg.target] + item * a[arg.target_row]
        x = a[arg.x] + row * a[arg.stride] * size
        prepare(x, 0, a[arg.depth], a[arg.padded_depth], target, a[arg.group], sums)

    return work


@per_item
def make_grouped_coded(dtype: str, code: Code, scales: ScaleForm, epilogue: Epilogue, *, has_offsets: bool) -> Any:
    """Makes the kernel of the products of experts. Items that are next to each other are panels of the same block.

    Arguments of the kernel: prepared x, and bytes from row to row; its sums over groups, or 0, and bytes from row to
    row; plan; target and the elements from row to row; panels; bytes of a panel; bytes of the scales and offsets of a
    block of groups; float32 biases [experts, parts, columns of whole panels], or 0; panels of the target; groups; steps
    of a group, and of the last; table of the codes; SCRATCH_BYTES for each thread, on a 64-byte border; panels of an
    item; most rows of a block whose codes are multiplied as they are; limit and alpha of CLAMPED.
    """
    element, parts = ELEMENTS[dtype], epilogue.parts
    arg = places(
        "x x_row sums sums_row plan target target_stride weight panel_bytes tail_bytes bias panels groups steps "
        "last_steps table scratch panels_at_once few_rows limit alpha"
    )
    size = element.size
    own_finish = make_grouped_finish(element, epilogue)

    @njit
    def finish(
        sums: int, ups: int, target: int, bias: int, up_bias: int, _parts: int, limit: float, alpha: float
    ) -> None:
        own_finish(sums, ups, target, bias, up_bias, limit, alpha)

    few = make_few_product(dtype, code, scales, finish, has_offsets=has_offsets)
    many = make_many_product(dtype, code, scales, finish, has_offsets=has_offsets)

    @njit
    def work(a: Any, item: int, thread: int) -> None:
        panels, panels_at_once = a[arg.panels], a[arg.panels_at_once]
        expert, first, rows, first_panel, end_panel = item_of_plan(a[arg.plan], item, panels, panels_at_once)
        if rows == 0:
            return
        panel_bytes = a[arg.panel_bytes]
        part_bytes, part_bias = panels * panel_bytes, panels * COLUMNS * 4
        weight = a[arg.weight] + expert * parts * part_bytes
        bias = a[arg.bias] + expert * parts * part_bias if a[arg.bias] != 0 else 0
        x, target_row = a[arg.x] + first * a[arg.x_row], a[arg.target_stride] * size
        target, scratch = a[arg.target] + first * target_row, a[arg.scratch] + thread * SCRATCH_BYTES
        limit, alpha = float32(float64_of(a[arg.limit])), float32(float64_of(a[arg.alpha]))
        if rows <= a[arg.few_rows]:
            few(
                x,
                a[arg.x_row],
                a[arg.sums] + first * a[arg.sums_row],
                a[arg.sums_row],
                rows,
                weight,
                panel_bytes,
                part_bytes,
                parts,
                bias,
                part_bias,
                first_panel,
                end_panel,
                a[arg.groups],
                a[arg.steps],
                a[arg.last_steps],
                a[arg.table],
                scratch,
                target,
                target_row,
                limit,
                alpha,
            )
        else:
            many(
                x,
                a[arg.x_row],
                rows,
                weight,
                panel_bytes,
                part_bytes,
                parts,
                bias,
                part_bias,
                first_panel,
                end_panel,
                a[arg.groups],
                a[arg.steps],
                a[arg.last_steps],
                a[arg.table],
                a[arg.tail_bytes],
                scratch,
                target,
                target_row,
                0,
                limit,
                alpha,
            )

    return work
