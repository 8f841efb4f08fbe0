"""Products in int8, by AMX: blocks of `amx.matmul`, whose sums become what `cpu.int8_matmul` says."""

from typing import Any

from services.engine.kernels.cpu.amx import matmul
from services.engine.kernels.cpu.amx import tiles as amx
from services.engine.kernels.cpu.amx.matmul import BLOCK, Kind, make_item, make_multiply
from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.epilogue import make_finish
from services.engine.kernels.cpu.int8_matmul import DEPTH_OF_STEP, NUMBERS_BYTES, make_scale
from services.engine.kernels.cpu.intrinsics import float_pointer, njit
from services.engine.kernels.cpu.per_item import per_item, places

DEPTH = 64  # of a step
STEPS_OF_BLOCK = DEPTH // DEPTH_OF_STEP  # steps of register tiles in one of AMX
MOST_ROWS, SCRATCH_BYTES = matmul.MOST_ROWS, matmul.SCRATCH_BYTES


@per_item
def make_int8_matmul(dtype: str, *, gated: bool) -> Any:
    """Makes a kernel with the arguments of `int8_matmul.make_int8_matmul`, and one more: `block_configs`. Steps are
    whole blocks of 64.
    """
    element = ELEMENTS[dtype]
    arg = places(
        "codes stride scale_at target target_stride weight numbers rows steps units scratch rows_at_once "
        "units_at_once skipped configs"
    )
    finish_row, scale_sums, size = make_finish(element, gated=gated), make_scale(), element.size

    @njit
    def finish(sums: int, gated_sums: int, target: int, numbers: int, gated_numbers: int, scale: int) -> None:
        of_row = float_pointer(scale)[0]
        scale_sums(sums, numbers, of_row)
        if gated:
            scale_sums(gated_sums, gated_numbers, of_row)
        finish_row(sums, gated_sums, target, 0, 0)

    kind = Kind(make_multiply(amx.add_product_of_bytes), finish, unit_bytes=BLOCK * size, numbers_bytes=NUMBERS_BYTES)
    multiply_item = make_item(kind, gated=gated)

    @njit(error_model="numpy")
    def work(a: Any, item: int, thread: int) -> None:
        multiply_item(
            a[arg.codes],
            a[arg.stride],
            a[arg.codes] + a[arg.scale_at],
            a[arg.stride],
            a[arg.target],
            a[arg.target_stride] * size,
            a[arg.weight],
            a[arg.numbers],
            a[arg.rows],
            a[arg.steps] // STEPS_OF_BLOCK,
            a[arg.units],
            a[arg.scratch] + thread * SCRATCH_BYTES,
            a[arg.rows_at_once],
            a[arg.units_at_once],
            a[arg.skipped],
            a[arg.configs],
            item,
        )

    return work
