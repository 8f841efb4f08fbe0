"""The loops of products with panels of codes, which the kernels of single products and of experts share.

Few rows are multiplied by codes as they are (`coded_tiles`): each panel comes from memory once, for all rows, and a
tile's rows are multiplied by what the caches hold of it. For many rows a panel is unpacked, along a part of the depth,
and multiplied as `matmul` does (`coded_unpacking`).

A `finish` writes 32 columns of a row. Its arguments: address of the sums, and of the sums of the second part; address
of the target; addresses of both biases, float32, or 0; parts; limit and alpha (see `grouped_matmul`).
"""

from typing import Any

from numba import int64

from services.engine.kernels.cpu.amx import matmul as amx_matmul
from services.engine.kernels.cpu.amx import tiles as amx
from services.engine.kernels.cpu.coded_panels import step_bytes, step_depth
from services.engine.kernels.cpu.coded_tiles import CODED_ROWS, multiply_codes
from services.engine.kernels.cpu.coded_unpacking import unpack_codes
from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.intrinsics import ISA, njit
from services.engine.kernels.cpu.matmul import AHEAD, MOST_DEPTH, MOST_ROWS, PANELS_TOGETHER
from services.engine.kernels.cpu.register_tiles import COLUMNS, ROW_BYTES, Arithmetic, arithmetic_of, multiply_rows
from services.engine.kernels.cpu.scale_forms import ScaleForm
from services.engine.quantization.codes import Code

FEW_SUMS_BYTES = 2 * CODED_ROWS * ROW_BYTES
# For many rows, of one thread: an unpacked part of a panel, sums, and the configuration of AMX of other code.
UNPACKED_BYTES = MOST_DEPTH * COLUMNS * 4
_PANEL_SUMS_BYTES = 2 * MOST_ROWS * ROW_BYTES
_ALL_SUMS_BYTES, _CONFIG_BYTES = PANELS_TOGETHER * _PANEL_SUMS_BYTES, 64
SCRATCH_BYTES = UNPACKED_BYTES + _ALL_SUMS_BYTES + _CONFIG_BYTES


def coded_arithmetic(dtype: str) -> Arithmetic:
    """Returns the arithmetic of products of codes with x of this dtype."""
    return Arithmetic.PAIRS if arithmetic_of(dtype) is Arithmetic.PAIRS else Arithmetic.SINGLES


def make_few_product(dtype: str, code: Code, scales: ScaleForm, finish: Any, *, has_offsets: bool) -> Any:
    """Makes a function that kernels call to multiply few rows.

    Its arguments: x, and bytes from row to row; sums of x over groups, and bytes from row to row; rows; panels, bytes
    of a panel, and bytes from a panel to that of the second part; parts, 1 or 2; float32 bias, or 0, and bytes to that
    of the second part; the first panel, and the one after the last; groups; steps of a group, and of the last; table of
    the codes; FEW_SUMS_BYTES; target, and bytes from row to row; limit and alpha of `finish`.
    """
    size, multiply = (
        ELEMENTS[dtype].size,
        multiply_codes(coded_arithmetic(dtype), code, scales, has_offsets=has_offsets),
    )
    apart = CODED_ROWS * ROW_BYTES

    @njit
    def product(
        x: int,
        x_row: int,
        sums: int,
        sums_row: int,
        rows: int,
        weight: int,
        panel_bytes: int,
        part_bytes: int,
        parts: int,
        bias: int,
        part_bias: int,
        first: int,
        end_panel: int,
        groups: int,
        steps: int,
        last_steps: int,
        table: int,
        totals: int,
        target: int,
        target_row: int,
        limit: float,
        alpha: float,
    ) -> None:
        tiles = (rows + CODED_ROWS - 1) // CODED_ROWS
        for panel in range(first, end_panel):
            b = weight + panel * panel_bytes
            own_bias = bias + panel * COLUMNS * 4 if bias != 0 else 0
            second_bias = own_bias + part_bias if bias != 0 else 0
            for tile in range(tiles):
                begin, end = tile * rows // tiles, (tile + 1) * rows // tiles
                for part in range(parts):
                    multiply(
                        end - begin,
                        x + begin * x_row,
                        x_row,
                        sums + begin * sums_row,
                        sums_row,
                        b + part * part_bytes,
                        groups,
                        steps,
                        last_steps,
                        totals + part * apart,
                        table,
                        AHEAD if tiles == 1 else panel_bytes,
                    )
                into = target + begin * target_row + panel * COLUMNS * size
                for row in range(end - begin):
                    at = totals + row * ROW_BYTES
                    finish(at, at + apart, into + row * target_row, own_bias, second_bias, parts, limit, alpha)

    return product


def make_many_product(
    dtype: str, code: Code, scales: ScaleForm, finish: Any, *, has_offsets: bool, by_amx: bool = False
) -> Any:
    """Makes a function that kernels call to multiply many rows.

    Its arguments: x, and bytes from row to row; rows, at most MOST_ROWS; then as of `make_few_product` from the panels
    to the table; bytes of the scales and offsets of a block of groups; SCRATCH_BYTES, on a 64-byte border; target, and
    bytes from row to row; `amx.matmul.block_configs`; limit and alpha.

    by_amx: AMX multiplies what is unpacked: bfloat16, along whole blocks of the depth.
    """
    arithmetic = coded_arithmetic(dtype)
    size, code_bytes = ELEMENTS[dtype].size, step_bytes(code)
    words, a_bytes, most_rows = step_depth(code) // arithmetic.depth, arithmetic.a_bytes, ISA.tile_rows
    most_steps, of_part = MOST_DEPTH // step_depth(code), MOST_ROWS * ROW_BYTES
    block_groups, unpack = scales.block_groups, unpack_codes(arithmetic, code, scales, has_offsets=has_offsets)
    multiply = multiply_rows(arithmetic)

    @njit
    def multiply_unpacked(
        rows: int, x: int, x_row: int, b: int, steps: int, sums: int, afresh: bool, ahead: int, ahead_bytes: int
    ) -> None:
        """Multiplies in tiles, each of which prefetches its share of what is unpacked next."""
        tiles = (rows + most_rows - 1) // most_rows
        ahead_step = ahead_bytes // (steps * tiles) + 1
        for tile in range(tiles):
            begin, end = tile * rows // tiles, (tile + 1) * rows // tiles
            multiply(
                end - begin,
                x + begin * x_row,
                x_row,
                a_bytes,
                b,
                steps,
                sums + begin * ROW_BYTES,
                afresh,
                ahead + tile * steps * ahead_step,
                ahead_step,
            )

    @njit
    def product(
        x: int,
        x_row: int,
        rows: int,
        weight: int,
        panel_bytes: int,
        part_bytes: int,
        parts: int,
        bias: int,
        part_bias: int,
        first: int,
        end_panel: int,
        groups: int,
        group_steps: int,
        last_steps: int,
        table: int,
        tail_bytes: int,
        scratch: int,
        target: int,
        target_row: int,
        configs: int,
        limit: float,
        alpha: float,
    ) -> None:
        b, sums = scratch, scratch + UNPACKED_BYTES
        all_steps = (groups - 1) * group_steps + last_steps
        block_steps = group_steps * block_groups
        chunk_steps = most_steps if groups == 1 else most_steps // block_steps * block_steps
        in_parts = chunk_steps < all_steps
        together = PANELS_TOGETHER if in_parts else end_panel - first
        if by_amx:
            amx.save_config(sums + _ALL_SUMS_BYTES)
        for start in range(first, end_panel, max(together, 1)):
            for step in range(0, all_steps, chunk_steps):
                steps, is_last = min(chunk_steps, all_steps - step), step + chunk_steps >= all_steps
                own_x = x + step * words * a_bytes
                own_groups, own_steps, own_last = int64(1), steps, steps
                shift, between = step * code_bytes, (all_steps - steps - step) * code_bytes
                if groups > 1:
                    own_groups, own_steps, between = (steps + group_steps - 1) // group_steps, group_steps, int64(0)
                    own_last = steps - (own_groups - 1) * group_steps
                    shift = step // block_steps * (block_steps * code_bytes + tail_bytes)
                for panel in range(start, min(start + together, end_panel)):
                    own_sums = sums + (panel - start if in_parts else 0) * _PANEL_SUMS_BYTES
                    codes = weight + panel * panel_bytes + shift
                    for part in range(parts):
                        own_codes, into = codes + part * part_bytes, own_sums + part * of_part
                        unpack(own_codes, own_groups, own_steps, own_last, between, b, table)
                        if by_amx:
                            blocks = steps * words * 2 // amx_matmul.BLOCK
                            amx_matmul.multiply_blocks(rows, own_x, x_row, b, blocks, into, step == 0, configs)
                        else:
                            ahead_bytes = panel_bytes * steps // all_steps
                            ahead = own_codes + panel_bytes
                            multiply_unpacked(rows, own_x, x_row, b, steps * words, into, step == 0, ahead, ahead_bytes)
                    if is_last:
                        own_bias = bias + panel * COLUMNS * 4 if bias != 0 else 0
                        second_bias = own_bias + part_bias if bias != 0 else 0
                        for row in range(rows):
                            at, row_at = own_sums + row * ROW_BYTES, target + row * target_row + panel * COLUMNS * size
                            finish(at, at + of_part, row_at, own_bias, second_bias, parts, limit, alpha)
        if by_amx:
            amx.load_config(sums + _ALL_SUMS_BYTES)

    return product
